# SPDX-License-Identifier: Apache-2.0
"""Runs items in processes, prints each line when it is known, and goes on after a failure. Needs nothing but Python.

An item over its time is killed with its process, and the items after it start a process again. A process sends lines of JSON on a pipe;
what it prints otherwise goes to the log.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from .items import Item
from .report import FAILED, NO_TIME, PASSED, SKIPPED, Outcome

TAIL_LINES = 12
NO_DEVICE = "no device"
# The item that finds the device. Without one no other item runs.
FIRST = "device"
# Added to the limit of the first item in a process that was started again: it makes what the first process had.
AGAIN_S = 40.0


@dataclass(frozen=True)
class Settings:
    """A run: its device, whether sizes are tiny, the seconds in all, the factor for the items' limits, and the folder of files."""

    device: str
    tiny: bool
    total_s: float
    patience: float
    output: Path


class Runner:
    """Runs items in processes of their own and prints progress through `say`, a line at a time. Seconds count from when it is made."""

    def __init__(
        self,
        settings: Settings,
        say: Callable[[str], None],
        *,
        command: Sequence[str] = (sys.executable, "-m", "tools.gpu.process"),
        environment: dict[str, str] | None = None,
    ) -> None:
        self._settings = settings
        self._say = say
        self._command = command
        self._environment = dict(os.environ if environment is None else environment)
        self._began = time.monotonic()
        self._log = settings.output / "log.txt"

    @property
    def seconds(self) -> float:
        """The seconds since this runner was made."""
        return time.monotonic() - self._began

    def run(self, items: Sequence[Item]) -> list[Outcome]:
        """Run all items in their order and return how each ended, in the same order; a failed one does not stop the others.

        Without a device, or after the time in all, the rest is skipped. The log in the output folder is begun again.
        """
        self._settings.output.mkdir(parents=True, exist_ok=True)
        self._log.write_bytes(b"")
        outcomes: list[Outcome] = []
        for _, group in groupby(items, key=lambda item: item.process):
            together = list(group)
            left = together
            while left:
                if any(outcome.name == FIRST and outcome.status != PASSED for outcome in outcomes):
                    ended = [self._skip(item, SKIPPED, NO_DEVICE) for item in left]
                elif self._left_s() <= 0:
                    ended = [self._skip(item, NO_TIME, None) for item in left]
                else:
                    ended = self._run_process(left, extra_s=AGAIN_S if len(left) < len(together) else 0.0)
                outcomes += ended
                left = left[len(ended) :]
        return outcomes

    def _left_s(self) -> float:
        return self._settings.total_s - self.seconds

    def _skip(self, item: Item, status: str, why: str | None) -> Outcome:
        outcome = Outcome(item.name, status, error=why)
        self._tell(outcome)
        return outcome

    def _run_process(self, items: Sequence[Item], extra_s: float) -> list[Outcome]:
        """Run items in one process until all are through, or one of them ends it or is over its time; return the outcomes so far.

        The first item gets `extra_s` more seconds. The process is killed at the end with all that it started.
        """
        reading, writing = os.pipe()
        words = ["--device", self._settings.device, "--pipe", str(writing), *(["--tiny"] if self._settings.tiny else [])]
        try:
            with self._log.open("ab") as log:
                process = subprocess.Popen(
                    (*self._command, *words, *(f"{item.name}={item.function}" for item in items)),
                    pass_fds=[writing], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment, start_new_session=True,
                )  # fmt: skip
        finally:
            os.close(writing)
        try:
            return self._listen(items, process, Lines(reading), extra_s)
        finally:
            with contextlib.suppress(ProcessLookupError):  # it and all that it started ended by themselves
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
            os.close(reading)

    def _listen(self, items: Sequence[Item], process: subprocess.Popen[bytes], lines: Lines, extra_s: float) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for item in items:
            if self._left_s() <= 0:
                break
            outcome, began = Outcome(item.name), self.seconds
            limit_s = (item.limit_s + (0.0 if outcomes else extra_s)) * self._settings.patience
            until = time.monotonic() + min(limit_s, self._left_s())
            self._say(f"{self._clock()} {item.name}: {item.what}")
            outcomes.append(outcome)
            alive = self._take(outcome, lines, until)
            outcome.seconds = round(self.seconds - began, 1)
            if not alive and outcome.error is None:
                code = process.wait(10)
                outcome.error = f"its process ended with {code}; the end of its log:\n{self._tail()}"
            self._tell(outcome)
            if not alive or outcome.status == NO_TIME:
                break
        return outcomes

    def _take(self, outcome: Outcome, lines: Lines, until: float) -> bool:
        """Fill an outcome from the lines of its item until it ends or the time is over; return False if the process ended first.

        After the time the outcome's status is NO_TIME, and the item still runs.
        """
        while (line := lines.next(until)) is not None:
            if line == "":
                return False
            said = json.loads(line)
            if "figure" in said:
                self._figure(outcome, said)
            elif "note" in said:
                outcome.notes.append(said["note"])
                self._say(f"{self._clock()}   {said['note']}")
            else:
                outcome.status, outcome.error = said["status"], said.get("error")
                return True
        outcome.status = NO_TIME
        return True

    def _figure(self, outcome: Outcome, said: dict[str, Any]) -> None:
        name, value, target = said["figure"], said["value"], said.get("target")
        outcome.figures[name] = value
        shown = f"{self._clock()}   {name} {value:g}"
        if target is not None and not self._settings.tiny:
            outcome.targets[name] = target
            shown += f" ({target}{', MISSED' if name in outcome.missed else ''})"
        self._say(shown)

    def _tell(self, outcome: Outcome) -> None:
        shown = f"{self._clock()} {outcome.name}: {outcome.status.upper() if outcome.status == FAILED else outcome.status}"
        if outcome.seconds:
            shown += f" in {outcome.seconds:g} s"
        self._say(f"{shown}: {outcome.error}" if outcome.error else shown)

    def _clock(self) -> str:
        seconds = int(self.seconds)
        return f"[{seconds // 60}:{seconds % 60:02}]"

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(f"    {line[:300]}" for line in lines[-TAIL_LINES:])


class Lines:
    """The lines that come out of a pipe, read one by one with a deadline."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting = self._read()
        self._until = 0.0

    def next(self, until: float) -> str | None:
        """Wait for the next line and return it without its end; return "" for an empty line and at the end of the pipe.

        None if there is none before `until`, a time of the monotonic clock; a later call may still get it.
        """
        self._until = until
        return next(self._waiting, "")

    def _read(self) -> Iterator[str | None]:
        part = b""
        while True:
            while b"\n" not in part:
                left = self._until - time.monotonic()
                if left <= 0 or not select.select([self._descriptor], [], [], left)[0]:
                    yield None
                    continue
                if not (read := os.read(self._descriptor, 1 << 16)):
                    return
                part += read
            line, _, part = part.partition(b"\n")
            yield line.decode()
