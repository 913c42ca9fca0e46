# SPDX-License-Identifier: Apache-2.0
"""The stages of the tests: what they run and show, in which order, and what is kept of them."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.suite import runner
from tools.suite.order import longest_first
from tools.suite.stages import CLUSTER, WITH_TORCH, LastRuns, Stage, StageRun

ROOT = Path(__file__).parents[2]


def stage(name: str, code: str) -> Stage:
    return Stage(name, "a stage of this test", (sys.executable, "-c", code))


def test_the_list_of_stages_says_what_each_does_and_how_long_it_took() -> None:
    last = {"lint": StageRun(31.4, passed=True), "fast": StageRun(150.0, passed=False)}
    lines = runner.describe([stage("lint", ""), stage("fast", ""), stage("slow", "")], last).splitlines()
    assert lines == [
        "  lint  a stage of this test (last time 31 s)",
        "  fast  a stage of this test (last time 2.5 min, failed)",
        "  slow  a stage of this test (not run here yet)",
    ]


def test_stages_side_by_side_show_whose_line_it_is_and_both_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = LastRuns(tmp_path / "new")
    assert runner.run_beside([stage("one", "print('a line')"), stage("two", "print('another')")], last)
    shown = capsys.readouterr().out
    assert "one: a line\n" in shown
    assert "two: another\n" in shown
    assert {name: run.passed for name, run in last.read().items()} == {"one": True, "two": True}


def test_a_line_that_does_not_end_is_shown_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "PART_OF_A_LINE_S", 0.2)
    dots = "import time\nfor _ in range(8): print('.', end='', flush=True); time.sleep(0.1)\nprint(' done')"
    assert runner.run_beside([stage("slow", dots)], LastRuns(tmp_path))
    first, *others = capsys.readouterr().out.splitlines()
    assert 0 < len(first) < 8
    assert "".join([first, *others]).startswith("........ done")


def test_a_stage_that_fails_is_named_and_the_others_run_to_their_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = LastRuns(tmp_path)
    assert not runner.run_beside([stage("bad", "raise SystemExit(3)"), stage("good", "import time; time.sleep(0.5)")], last)
    assert "bad: FAILED in 0 s" in capsys.readouterr().out
    assert {name: run.passed for name, run in last.read().items()} == {"bad": False, "good": True}


def test_the_messages_of_failed_tests_are_shown_again_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_bad.py").write_text("def test_bad():\n    assert 1 == 2, 'one is not two'\n")
    tests = Stage("bad", "a stage of this test", (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)))
    assert not runner.run_beside([tests, stage("good", "import time; time.sleep(0.5)")], LastRuns(tmp_path))
    at_the_end = capsys.readouterr().out.partition("bad: FAILED in ")[2]
    assert "bad: E       AssertionError: one is not two" in at_the_end
    assert "::test_bad" in at_the_end
    assert "good: " not in at_the_end


def with_tests(folder: Path, files: dict[str, str]) -> Stage:
    """Write files of tests to the folder, and return a stage that runs them."""
    for name, code in files.items():
        (folder / name).write_text(code)
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}")
    return Stage("tests", "a stage of this test", command, tuple(str(folder / name) for name in files))


def failing_once(folder: Path) -> str:
    """Return the source of a test that fails in its first run alone: it leaves a file in the folder."""
    ran = f"Path({str(folder / 'ran')!r})"
    return f"from pathlib import Path\ndef test_it():\n    if not {ran}.exists():\n        {ran}.touch()\n        assert 0\n"


def test_a_file_that_failed_once_runs_again_alone_and_its_test_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    good = f"from pathlib import Path\ndef test_good():\n    with Path({str(tmp_path / 'good')!r}).open('a') as f: f.write('x')\n"
    tests = with_tests(tmp_path, {"test_once.py": failing_once(tmp_path), "test_good.py": good})
    last = LastRuns(tmp_path)
    assert runner.run_beside([tests], last)
    shown = capsys.readouterr().out
    assert "tests: FAILED in " in shown and "tests: passed at the second look in " in shown
    assert "tests: FAILED ONCE test_once.py::test_it\n" in shown
    assert (tmp_path / "good").read_text() == "x"
    assert last.read()["tests"].passed


def test_a_file_that_fails_twice_fails_its_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not runner.run_beside([with_tests(tmp_path, {"test_bad.py": "def test_bad(): assert 1 == 2\n"})], LastRuns(tmp_path))
    assert "tests: FAILED again in " in capsys.readouterr().out


def test_failures_in_three_files_get_no_second_look(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {f"test_{number}.py": "def test_bad(): assert 1 == 2\n" for number in range(3)}
    assert not runner.run_beside([with_tests(tmp_path, files)], LastRuns(tmp_path))
    assert "second look" not in capsys.readouterr().out


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let SIGINT interrupt the tests as in a terminal, even where the shell had them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_run_ends_what_it_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    # A descriptor, because Python drops an interrupt that comes while it closes a file object.
    write = f"os.write(os.open({str(pid_file)!r}, os.O_CREAT | os.O_WRONLY), str(os.getpid()).encode())"
    sleeper = stage("sleeper", f"import os, time; {write}; time.sleep(600)")

    def interrupt() -> None:
        deadline = time.monotonic() + 30
        while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        runner.run_beside([sleeper], LastRuns(tmp_path))
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_times_of_another_version_are_as_none(tmp_path: Path) -> None:
    (tmp_path / "times.json").write_text('{"fast": 12}')
    assert LastRuns(tmp_path).read() == {}


def test_each_folder_that_is_apart_from_the_other_fast_tests_is_there() -> None:
    assert [path for path in WITH_TORCH if not (ROOT / path).exists()] == []


def test_tests_that_need_a_cluster_are_in_the_folders_of_their_stage() -> None:
    marked = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.cluster" in path.read_text()]
    assert [path for path in marked if not str(path).startswith((*CLUSTER.paths, "tests/tools"))] == []


def test_what_takes_longest_comes_first_and_what_nobody_recorded_before_it() -> None:
    assert longest_first(["short.py", "long.py", "new.py"], {"short.py": 1.0, "long.py": 9.0}) == ["new.py", "long.py", "short.py"]


@pytest.mark.slow
def test_the_files_that_took_longest_the_last_time_run_first_and_the_new_seconds_are_kept(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text("def test_it(): pass\n")
    record = tmp_path / "diffusion-operator" / "suite" / "seconds.json"
    record.parent.mkdir(parents=True)
    record.write_text('{"test_a.py": 1.0, "test_b.py": 9.0, "test_gone.py": 3.0}')
    options = ["-v", "-p", "tools.suite.order", "-p", "xdist", "-n", "1", "--dist", "loadfile", "--no-loadscope-reorder"]
    command = [sys.executable, "-m", "pytest", *options, f"--rootdir={tmp_path}", str(tmp_path)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, check=True, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert re.findall(r"PASSED \S*(test_\w\.py)::", done.stdout) == ["test_c.py", "test_b.py", "test_a.py"], done.stdout
    assert json.loads(record.read_text()).keys() == {"test_a.py", "test_b.py", "test_c.py"}
