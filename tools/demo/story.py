# SPDX-License-Identifier: Apache-2.0
"""Tells a person what happens while it happens, and sums it up in a table at the end."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TextIO

INDENT = " " * 9


@dataclass
class Step:
    """A row of the demo's report: a step's title, its duration, and a result that its body may set; FAILED if the body raised."""

    title: str
    seconds: float = 0.0
    result: str = ""


@dataclass
class Story:
    out: TextIO = field(default_factory=lambda: sys.stdout)
    clock: Callable[[], float] = time.monotonic
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._began = self.clock()

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """Print a heading with the time since the start, yield the step, and print its result and duration after the block.

        If the block raises, the step's result is FAILED and only the table shows it.
        """
        step = Step(title)
        began = self.clock()
        self._write(f"\n{_minutes(began - self._began)}  {title}")
        try:
            yield step
        except BaseException:
            step.result = "FAILED"
            raise
        finally:
            step.seconds = self.clock() - began
            self.steps.append(step)
        self.say(f"done in {step.seconds:.1f} s{': ' + step.result if step.result else ''}")

    def say(self, text: str) -> None:
        for line in text.rstrip().splitlines():
            self._write(f"{INDENT}{line}".rstrip())

    def table(self) -> str:
        """Return a table of the ended steps, with their seconds and results, and the seconds in all."""
        total = Step("in all", self.clock() - self._began)
        rows = [("what", "seconds", "result"), *((s.title, f"{s.seconds:.1f}", s.result) for s in [*self.steps, total])]
        wide = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [f"{what:<{wide[0]}}  {seconds:>{wide[1]}}  {result}".rstrip() for what, seconds, result in rows]
        rule = "-" * (wide[0] + wide[1] + wide[2] + 4)
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])

    def _write(self, line: str) -> None:
        print(line, file=self.out, flush=True)


def _minutes(seconds: float) -> str:
    return f"[{int(seconds) // 60:3d}:{int(seconds) % 60:02d}]"
