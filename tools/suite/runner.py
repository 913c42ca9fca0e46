# SPDX-License-Identifier: Apache-2.0
"""Runs stages, one after the other or side by side, and shows the progress of each."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Sequence

from .stages import LastRuns, Stage, StageRun

PART_OF_A_LINE_S = 20.0
# pytest begins the lines of a failure's message, and those of its summary, with these.
OF_A_FAILURE = (b"E  ", b"FAILED ", b"ERROR ")
FAILED_TEST = re.compile(rb"(?:FAILED|ERROR) (([^ :]+\.py)::[^ ]+)")
SHOWN_AGAIN = 25
# Failures in more files than these are no accident of a busy machine.
SECOND_LOOK_FILES = 2


def describe(stages: Sequence[Stage], last: dict[str, StageRun]) -> str:
    """Return a line for each stage: what it does, and how long it took the last time on this machine."""
    width = max(len(stage.name) for stage in stages)
    return "\n".join(f"  {stage.name:{width}}  {stage.what} ({_last_time(last.get(stage.name))})" for stage in stages)


def _last_time(run: StageRun | None) -> str:
    if run is None:
        return "not run here yet"
    return f"last time {minutes(run.seconds)}{'' if run.passed else ', failed'}"


def minutes(seconds: float) -> str:
    """Return a duration as a short text: in seconds below two minutes, else in minutes."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def run_beside(stages: Sequence[Stage], last: LastRuns) -> bool:
    """Run stages at the same time and print a verdict for each; return True if all passed. Ctrl-C and SIGTERM end every process.

    The output of failed tests comes once more at the end, for readers that keep only that. Failed tests of no more than two files get a
    second run of those files, alone. Passing there counts for the stage, but the tests are named as failed once.
    """
    processes = [_Running(stage, prefix=len(stages) > 1) for stage in stages]
    _wait(processes)
    for process in sorted(processes, key=lambda process: not process.passed):
        print(f"{process.stage.name}: {'passed' if process.passed else 'FAILED'} in {minutes(process.seconds)}", flush=True)
        if not process.passed:
            process.show_failures()
            process.passed = _second_look(process)
        last.note(process.stage, process.result())
    return all(process.passed for process in processes)


def _wait(processes: Sequence[_Running]) -> None:
    try:
        while sum(process.lives() for process in processes):  # each is asked, since it notes its own end
            time.sleep(0.2)
    except BaseException:
        for process in processes:
            process.end()
        raise


def _second_look(first: _Running) -> bool:
    """Run the files of a stage's failed tests again, alone; return whether they pass.

    Return False at once if pytest named none, or they are in more than two files.
    """
    name, failed = first.stage.name, first.failed_tests()
    files = sorted(set(failed.values()))
    if not 0 < len(files) <= SECOND_LOOK_FILES:
        return False
    print(f"{name}: a second look, alone, at {' and '.join(files)}", flush=True)
    second = _Running(first.stage.only(files), prefix=True)
    _wait([second])
    if not second.passed:
        print(f"{name}: FAILED again in {minutes(second.seconds)}", flush=True)
        second.show_failures()
        return False
    print(f"{name}: passed at the second look in {minutes(second.seconds)}", flush=True)
    for test in failed:
        print(f"{name}: FAILED ONCE {test}", flush=True)
    return True


class _Running:
    """A stage that runs, started when this is made, in a process group of its own; a thread prints its output."""

    def __init__(self, stage: Stage, *, prefix: bool) -> None:
        self.stage = stage
        self.seconds = 0.0
        self.passed = False
        self._began = time.monotonic()
        self._prefix = f"{stage.name}: " if prefix else ""
        self._of_failures: list[bytes] = []
        unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            (*stage.command, *stage.paths), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, env=unbuffered
        )
        self._shown = threading.Thread(target=self._show)
        self._shown.start()

    def lives(self) -> bool:
        """Return whether the stage still runs; the first call after its end notes its seconds and verdict."""
        if self._shown.is_alive() or self._process.poll() is None:
            return True
        if not self.seconds:
            self.seconds, self.passed = time.monotonic() - self._began, self._process.returncode == 0
        return False

    def end(self) -> None:
        """Interrupt the stage's process group, so that pytest tears down its fixtures; kill the group if it still runs after a minute."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGINT)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)

    def result(self) -> StageRun:
        """Return the record of the stage's run, after its end."""
        return StageRun(round(self.seconds, 1), self.passed)

    def failed_tests(self) -> dict[str, str]:
        """Return the failed tests that pytest's summary names, each with its file."""
        found = (FAILED_TEST.match(line) for line in self._of_failures)
        return {match[1].decode(): match[2].decode() for match in found if match}

    def show_failures(self) -> None:
        """Print the last 25 lines of the output that are about failed tests again."""
        for line in self._of_failures[-SHOWN_AGAIN:]:
            self._print(line[:300])

    def _show(self) -> None:
        """Print the stage's output until it ends, by whole lines; a part of a line that has waited 20 s is printed too.

        Pytest's dots take minutes for a line.
        """
        assert self._process.stdout is not None
        part, shown = b"", time.monotonic()
        while read := os.read(self._process.stdout.fileno(), 65536):
            *lines, part = (part + read).split(b"\n")
            if part and time.monotonic() - shown > PART_OF_A_LINE_S:
                lines, part = [*lines, part], b""
            self._of_failures += [line for line in lines if line.startswith(OF_A_FAILURE)]
            for line in lines:
                self._print(line)
                shown = time.monotonic()
        if part:
            self._print(part)

    def _print(self, line: bytes) -> None:
        print(self._prefix + line.decode(errors="replace"), flush=True)
