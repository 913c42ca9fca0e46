# SPDX-License-Identifier: Apache-2.0
"""Items for the tests of `make gpu`'s runner: they end in every way that an item can."""

import os
import subprocess
import sys
import time
from pathlib import Path

from tools.gpu.process import Run, Skip


def good(run: Run) -> None:
    """Keep something for later items, and report a figure that meets its target and another that misses it."""
    run.kept["pid"] = os.getpid()
    run.figure("fast", 1.0, "<= 1.02")
    run.figure("slow", 2.0, "<= 1.02")
    run.note(f"device {run.device}")


def sharing(run: Run) -> None:
    """Require that `good` ran before in this process, by the pid that it kept."""
    run.require(run.kept.get("pid") == os.getpid(), "what the item before kept in this process")


def failing(run: Run) -> None:
    """Report a figure, and raise RuntimeError."""
    run.figure("before", 3.0)
    raise RuntimeError("the driver is of another age")


def absent(run: Run) -> None:
    """Raise Skip, since the item does not apply."""
    raise Skip("torchao is not there")


def dying(run: Run) -> None:
    """Write a line to stderr, and end the process with status 3, without a word on the pipe."""
    print("last words on the log", file=sys.stderr, flush=True)
    os._exit(3)


def endless(run: Run) -> None:
    """Start a process that sleeps ten minutes, report its pid as a figure, and sleep as long."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    run.figure("child", child.pid)
    time.sleep(600)


def slow(run: Run) -> None:
    """Sleep for a second and a half."""
    time.sleep(1.5)


def answered(run: Run) -> None:
    """Report a figure, and end only once the file that FAKE_ITEMS_ANSWER names exists; fail after 30 s without it."""
    run.figure("asked", 1.0)
    until = time.monotonic() + 30
    while not Path(os.environ["FAKE_ITEMS_ANSWER"]).exists():
        run.require(time.monotonic() < until, "an answer to the figure")
        time.sleep(0.01)
