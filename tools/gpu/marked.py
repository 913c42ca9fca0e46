# SPDX-License-Identifier: Apache-2.0
"""The tests marked `gpu`, and the benchmarks that take a device, on the device of this run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.registry import GOALS

from .process import Run

ROOT = Path(__file__).parents[2]
MARK = "@pytest.mark.gpu\n"
SETTINGS = Path(__file__).with_name("pytest.ini")


def files() -> list[str]:
    """Return the paths of the test files that have the mark `gpu`. They import nothing but what is carried, torch and pytest."""
    return sorted(str(path) for path in (ROOT / "tests").rglob("test_*.py") if MARK in path.read_text())


def run_tests(run: Run) -> None:
    """Run the tests marked `gpu` with pytest alone, without plugins and conftest files, and report how many passed.

    Raises:
        AssertionError: a test failed, or none passed.
    """
    words = [sys.executable, "-m", "pytest", "-c", str(SETTINGS), f"--rootdir={ROOT}", "--noconftest", "-q", "-m", "gpu", *files()]
    environment = {**os.environ, "DIFFUSION_TEST_DEVICE": "cuda:0" if run.on_gpu else "cpu", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ended = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    print(ended.stdout, ended.stderr, file=sys.stderr)
    passed = re.search(r"(\d+) passed", ended.stdout)
    run.figure("tests_passed", int(passed[1]) if passed else 0)
    good = ended.returncode == 0 and passed is not None
    run.require(good, f"all tests to pass; pytest ended with {ended.returncode}:\n{ended.stdout[-400:]}")


def run_benchmarks(run: Run) -> None:
    """Run each benchmark that takes a device, on the device of this run, and report its figures. Sets one torch thread."""
    torch.set_num_threads(1)
    for name, goal in GOALS.items():
        if goal.takes_device:
            measured = goal.measure(tiny=run.tiny, device=run.device)
            for figure, value in measured.figures.items():
                run.figure(f"{name}.{figure}", value, measured.targets.get(figure))
