# SPDX-License-Identifier: Apache-2.0
"""Tiny runs of every benchmark. Their figures mean nothing, but a benchmark fails here once it no longer fits the code that it measures.

The goals come from the registry, so none is forgotten. Those that need a cluster run in tests/cluster.
"""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.registry import GOALS, Needs
from benchmarks.result import Measured
from support.real_benchmarks import assert_whole

MARKS = {Needs.NOTHING: pytest.mark.slow, Needs.APISERVER: pytest.mark.apiserver}
# It runs from the command line, below.
BY_COMMAND = "P9"
HERE = [pytest.param(name, marks=MARKS[goal.needs]) for name, goal in GOALS.items() if goal.needs in MARKS and name != BY_COMMAND]


@pytest.fixture
def threads() -> Iterator[None]:
    """Restore the number of torch's threads, which benchmarks set."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", HERE)
@pytest.mark.usefixtures("threads")
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")
def test_a_benchmark_runs_tiny_and_gives_a_figure_for_each_target(name: str) -> None:
    assert_whole(GOALS[name].measure(tiny=True))


def test_every_module_that_measures_is_in_the_registry() -> None:
    folder = Path(__file__).parents[2] / "benchmarks"
    sources = [path for path in folder.rglob("*.py") if "\ndef measure(" in path.read_text()]
    measuring = {".".join(path.relative_to(folder).with_suffix("").parts) for path in sources}
    assert measuring == {goal.module for goal in GOALS.values()}


def test_each_takes_at_most_fifteen_minutes() -> None:
    assert all(0 < goal.minutes <= 15 for goal in GOALS.values())


def test_the_line_of_a_goal_has_results_targets_and_samples(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = Measured({"ratio": 1.5, "other": 2.0}, {"ratio": ">= 1"}, [{"s": 1.0}])
    monkeypatch.setattr(type(GOALS["P1"]), "measure", lambda self, tiny, device: measured)
    monkeypatch.chdir(tmp_path)
    assert main(["--tiny", "P1"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["goal"], line["results"], line["targets"], line["beside"]) == ("P1", {"ratio": 1.5}, {"ratio": ">= 1"}, {"other": 2.0})
    assert (line["rounds"], line["tiny"]) == ({}, True)
    assert json.loads(Path(line["samples"]).read_text()) == [{"s": 1.0}]


def test_a_failed_measurement_ends_with_status_1_and_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def busy(self: object, tiny: bool, device: str) -> Measured:
        raise RuntimeError("the copy: of 30 pairs 2 are left")

    monkeypatch.setattr(type(GOALS["P5"]), "measure", busy)
    assert main(["P5"]) == 1
    assert "P5: the measurement failed: the copy: of 30 pairs 2 are left" in capsys.readouterr().err


def test_an_unknown_goal_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["P99"]) == 1
    assert "unknown goal P99; there are: P1, P2" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_from_the_command_line_ends_with_one_line_of_json(tmp_path: Path) -> None:
    """Run the tiny P9 in a process and read its standard output; P9 is taken because it spawns rank processes.

    They import the main module again, and that is `benchmarks` only in a run from the command line.
    """
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "benchmarks", "--tiny", BY_COMMAND]
    ended = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr[-2000:]
    line = json.loads(ended.stdout)
    assert line["results"].keys() == line["targets"].keys()
    assert all(math.isfinite(value) for value in line["results"].values())
    assert (tmp_path / line["samples"]).exists()
