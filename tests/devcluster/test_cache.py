# SPDX-License-Identifier: Apache-2.0
"""The cache of slow builds: each content is made once, whole or not at all."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.devcluster.cache import cached, content_hash
from tools.devcluster.errors import CommandFailed
from tools.devcluster.paths import REPOSITORY
from tools.devcluster.progress import run_logged, run_quiet


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_second_call_makes_nothing() -> None:
    made: list[Path] = []

    def make(draft: Path) -> None:
        made.append(draft)
        (draft / "result").write_text("1")

    first, second = cached("thing", "0" * 12, make), cached("thing", "0" * 12, make)
    assert first == second
    assert (first / "result").read_text() == "1"
    assert len(made) == 1


def test_a_failed_or_killed_making_leaves_nothing_that_looks_whole() -> None:
    def fail(draft: Path) -> None:
        (draft / "half").write_text("")
        raise CommandFailed("no disk")

    with pytest.raises(CommandFailed):
        cached("thing", "0" * 12, fail)
    assert not (cached("thing", "0" * 12, lambda draft: None) / "half").exists()


def test_new_content_replaces_the_old_and_leaves_other_things() -> None:
    other, old = cached("thing-else", "a" * 12, lambda draft: None), cached("thing", "0" * 12, lambda draft: None)
    new = cached("thing", "1" * 12, lambda draft: None)
    assert new.exists()
    assert other.exists()
    assert not old.exists()


def test_a_hash_sees_names_and_bytes_and_where_one_file_ends(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").write_text("y")
    before = content_hash([tmp_path / "a", tmp_path / "b", "word"], relative_to=tmp_path)
    assert before != content_hash([tmp_path / "b", tmp_path / "a", "word"], relative_to=tmp_path)
    assert before != content_hash([tmp_path / "a", tmp_path / "b"], relative_to=tmp_path)
    (tmp_path / "a").rename(tmp_path / "c")
    assert before != content_hash([tmp_path / "c", tmp_path / "b", "word"], relative_to=tmp_path)


def test_a_failed_program_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match=r"making it: sh ended with code 3; the end of .*\nno such module"):
        run_logged(["sh", "-c", "echo no such module; exit 3"], what="making it", log=tmp_path / "log")
    with pytest.raises(CommandFailed, match="there is no program nowhere-to-be-found"):
        run_logged(["nowhere-to-be-found"], what="making it", log=tmp_path / "log")


def test_a_program_that_hangs_is_given_up() -> None:
    with pytest.raises(CommandFailed, match="was not done after 0 s"):
        run_quiet(["sleep", "60"], deadline_s=0.1)


def runs(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie one process to another")
def test_a_build_ends_with_the_tool_that_started_it_even_when_that_is_killed(tmp_path: Path) -> None:
    call = f"run_logged(['sh', '-c', 'echo $$; exec sleep 600'], what='build', log=Path({str(tmp_path / 'log')!r}))"
    script = f"from pathlib import Path; from tools.devcluster.progress import run_logged; {call}"
    with subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY) as tool:
        while not (tmp_path / "log").exists() or not (tmp_path / "log").read_text():
            assert tool.poll() is None
        pid = int((tmp_path / "log").read_text())
        assert runs(pid)
        tool.kill()
    ends = time.monotonic() + 10
    while runs(pid):
        assert time.monotonic() < ends
