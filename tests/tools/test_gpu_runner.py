# SPDX-License-Identifier: Apache-2.0
"""The runner of `make gpu`: limits, failures, the lines and the JSON. Real: the processes and the pipe. Not real: the items."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools.gpu import __main__ as program
from tools.gpu.items import Item
from tools.gpu.report import FAILED, NO_TIME, PASSED, SKIPPED, Outcome, meets, summary
from tools.gpu.runner import Runner, Settings

ROOT = Path(__file__).parents[2]


def item(function: str, *, process: str = "one", limit_s: float = 30, name: str | None = None) -> Item:
    return Item(name or function, process, f"support.gpu.fake_items:{function}", limit_s, "a fake")


def run(items: Sequence[Item], folder: Path, *, total_s: float = 60, tiny: bool = False, **more: str) -> tuple[list[Outcome], list[str]]:
    """Run items on the CPU, each line of progress kept; return how they ended, and these lines.

    A line with `asked 1` lets the item that waits for an answer go on. `more` adds to the environment of the items.
    """
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if "asked 1" in line:
            (folder / "answer").touch()

    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "FAKE_ITEMS_ANSWER": str(folder / "answer"), **more}
    runner = Runner(Settings("cpu", tiny, total_s, 1.0, folder / "output"), say, environment=environment)
    return runner.run(items), said


def statuses(outcomes: Sequence[Outcome]) -> dict[str, str]:
    return {outcome.name: outcome.status for outcome in outcomes}


def is_gone(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def test_items_of_a_process_share_what_the_first_made_and_a_failure_stops_none_of_them(tmp_path: Path) -> None:
    outcomes, said = run([item("good"), item("failing"), item("absent"), item("sharing")], tmp_path)
    assert statuses(outcomes) == {"good": PASSED, "failing": FAILED, "absent": SKIPPED, "sharing": PASSED}
    assert outcomes[1].error == "RuntimeError: the driver is of another age"
    assert outcomes[1].figures == {"before": 3.0}
    assert outcomes[2].error == "torchao is not there"
    assert any("failing: FAILED" in line and "the driver is of another age" in line for line in said)
    assert "Traceback" in (tmp_path / "output" / "log.txt").read_text()


def test_a_figure_is_printed_before_its_item_has_ended(tmp_path: Path) -> None:
    outcomes, _ = run([item("answered")], tmp_path)
    assert statuses(outcomes) == {"answered": PASSED}


@pytest.mark.slow
def test_an_item_over_its_time_is_skipped_with_its_figures_and_the_next_one_runs(tmp_path: Path) -> None:
    began = time.monotonic()
    outcomes, said = run([item("endless", limit_s=5), item("good")], tmp_path)
    assert statuses(outcomes) == {"endless": NO_TIME, "good": PASSED}
    assert time.monotonic() - began < 30
    assert any(line.endswith("s") and "endless: skipped: time in" in line for line in said)
    child = int(outcomes[0].figures["child"])
    until = time.monotonic() + 10
    while not is_gone(child) and time.monotonic() < until:
        time.sleep(0.01)
    assert is_gone(child), "what the item started must end with it"


@pytest.mark.slow
def test_the_first_item_of_a_process_that_is_started_again_has_time_to_load_the_model(tmp_path: Path) -> None:
    outcomes, _ = run([item("endless", limit_s=0.5), item("slow", limit_s=0.5), item("slow", limit_s=0.5, name="last")], tmp_path)
    assert statuses(outcomes) == {"endless": NO_TIME, "slow": PASSED, "last": NO_TIME}


def test_a_process_that_ends_by_itself_has_failed_and_its_log_says_more(tmp_path: Path) -> None:
    outcomes, _ = run([item("dying"), item("good")], tmp_path)
    assert statuses(outcomes) == {"dying": FAILED, "good": PASSED}
    assert outcomes[0].error is not None
    assert "its process ended with 3" in outcomes[0].error and "last words on the log" in outcomes[0].error


@pytest.mark.slow
def test_items_beyond_the_time_in_all_are_skipped(tmp_path: Path) -> None:
    outcomes, _ = run([item("endless"), item("good"), item("sharing", process="two")], tmp_path, total_s=2)
    assert statuses(outcomes) == {"endless": NO_TIME, "good": NO_TIME, "sharing": NO_TIME}


def test_without_a_device_nothing_else_runs(tmp_path: Path) -> None:
    outcomes, _ = run([item("failing", name="device", process="device"), item("good")], tmp_path)
    assert statuses(outcomes) == {"device": FAILED, "good": SKIPPED}
    assert outcomes[1].error == "no device"
    assert program.exit_code(outcomes) == program.exit_code(outcomes[1:]) == 1


@pytest.mark.parametrize("tiny", [False, True])
def test_a_missed_target_is_named_unless_sizes_are_tiny_and_is_no_failure(tiny: bool, tmp_path: Path) -> None:
    outcomes, said = run([item("good")], tmp_path, tiny=tiny)
    found = summary(outcomes, device="cpu", tiny=tiny, seconds=1.0)
    assert found["missed"] == ([] if tiny else ["good.slow"])
    assert any("slow 2 (<= 1.02, MISSED)" in line for line in said) is not tiny
    assert any("fast 1 (<= 1.02)" in line for line in said) is not tiny
    assert any(line.endswith("device cpu") for line in said)
    assert found["counts"] == {PASSED: 1, FAILED: 0, NO_TIME: 0, SKIPPED: 0}
    assert program.exit_code(outcomes) == 0


def test_targets_bound_from_either_side() -> None:
    assert meets(0.95, ">= 0.95") and not meets(0.94, ">= 0.95")
    assert meets(1.02, "<= 1.02") and not meets(1.03, "<= 1.02")


def test_the_last_line_is_json_and_the_same_is_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = item("good", name="device", process="device")
    monkeypatch.setattr(program, "ITEMS", (first, item("absent"), item("failing")))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    words = ["--device", "cpu", "--tiny", "--packages", str(tmp_path), "--output", str(tmp_path / "output"), "absent"]
    assert program.main(words) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [each["name"] for each in last["items"]] == ["device", "absent"], "the device is looked at first whatever is asked for"
    assert last["items"][0]["figures"] == {"fast": 1.0, "slow": 2.0}
    assert json.loads((tmp_path / "output" / "gpu.json").read_text()) == last


def test_without_wheels_it_says_what_makes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--wheels", str(tmp_path)]) == 1
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"no wheels for Python {version} in {tmp_path}: run `make gpu-wheels`" in capsys.readouterr().err


def test_an_unknown_item_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["warp"])
    assert "unknown item warp" in capsys.readouterr().err
