# SPDX-License-Identifier: Apache-2.0
"""The stages of `make test`: what each runs, and how long each took the last time on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tools.devcluster.paths import cache_dir

LAST_RUNS = cache_dir() / "suite"
# The tests of a file stay in one process, for what they share. Three processes were no faster on two cores.
ON_TWO = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")


class Stage(msgspec.Struct, frozen=True):
    """A part of the tests that can run alone, as `command` followed by `paths`; without paths the command selects its own tests."""

    name: str
    what: str
    command: tuple[str, ...]
    paths: tuple[str, ...] = ()

    def only(self, files: Sequence[str]) -> Stage:
        """Return a copy of the stage that runs the tests of these files alone."""
        return Stage(self.name, self.what, self.command, tuple(files))


def _tests(name: str, what: str, *options: str, paths: tuple[str, ...] = (), before: tuple[str, ...] = ()) -> Stage:
    command = (*before, sys.executable, "-m", "pytest", "-q", "--durations=10", *options)
    return Stage(name, what, command, paths)


LINT = Stage("lint", "ruff, mypy, the layers", ("make", "--no-print-directory", "lint"))
# The fast tests in two processes without pytest-xdist: each collects only its own, and one of them needs no torch.
IS_FAST = ("-m", "not apiserver and not cluster and not slow")
WITH_TORCH = (
    *("tests/benchmarks", "tests/digits", "tests/docs/test_reference_system.py", "tests/worker/lora", "tests/worker/memory"),
    *("tests/worker/processes", "tests/worker/ranks", "tests/worker/rehearsal", "tests/worker/runner"),
    *("tests/contract/test_private_names.py", "tests/contract/test_prompts_stay_secret.py", "tests/worker/options/test_withheld.py"),
    "tests/worker/engine/scheduling/test_memory_model.py",
    # It needs no torch; so both processes take as long.
    "tests/chart/test_chart_values.py",
)
# All of the families' tests are slow ones, and to import them takes seconds.
WITHOUT_TORCH = ("tests", *(f"--ignore={path}" for path in (*WITH_TORCH, "tests/cluster", "tests/worker/families")))
FAST = _tests("fast", "tests that need neither a cluster nor minutes nor torch", *IS_FAST, paths=WITHOUT_TORCH)
FAST_TORCH = _tests("fast-torch", "tests that need torch, and neither a cluster nor minutes", *IS_FAST, paths=WITH_TORCH)
IMAGES = Stage(
    "images",
    "the cluster's programs and our images, made where they are new",
    (sys.executable, "-m", "tools.devcluster", "prepare", "worker", "operator"),
)
SLOW = _tests("slow", "tests with real ranks, workers and API servers", "-m", "(apiserver or slow) and not cluster", *ON_TWO)
# All tests that need a cluster are here; other folders would only cost the import of torch.
# The engines' tests come first: they need a machine without a cluster.
ENGINES = "tests/devcluster/kind"
# The first test brings the cluster up, whose steps have deadlines of their own: to unpack an image takes minutes on a busy machine.
NEEDS_CLUSTER = ("-m", "cluster", "-o", "timeout_func_only=true")
CLUSTER = _tests(
    "cluster",
    "tests on a kind cluster with our images",
    *NEEDS_CLUSTER,
    paths=(ENGINES, "tests/cluster", "tests/devcluster/test_real_cluster.py"),
)
# The stages of a group run side by side. A cluster's tests mostly wait, and the slow ones compute.
GROUPS = ((LINT, FAST, FAST_TORCH), (IMAGES,), (SLOW, CLUSTER))
STAGES = tuple(stage for group in GROUPS for stage in group)


class StageRun(msgspec.Struct, frozen=True):
    """The seconds of one run of a stage, and whether it passed."""

    seconds: float
    passed: bool


class LastRuns:
    """The record of each stage's last run, kept in a file of a folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "times.json"

    def read(self) -> dict[str, StageRun]:
        """Return the last runs by the stage's name; none if the file is missing or its content is not valid."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, StageRun])
        except (FileNotFoundError, msgspec.MsgspecError):
            return {}

    def note(self, stage: Stage, run: StageRun) -> None:
        """Save a stage's run to the file, in place of the earlier one. Runs of other stages are kept, and a missing folder is made."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_suffix(".new")
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(self.read() | {stage.name: run})))
        draft.rename(self._path)
