# SPDX-License-Identifier: Apache-2.0
"""Records of a rehearsal: each blocking wait and each copy, with the line of code that asked for it."""

import re
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch

from diffusion_worker.runner.stepping import async_copies

# Frames of torch and of the rehearsal itself ask for nothing by themselves, nor do those of the mode that is around a pipeline.
_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parent), async_copies.__file__, "<")
# Python 3.11 gives these a frame of their own, and later versions do not.
_COMPREHENSION = re.compile(r"\.<locals>\.<(list|set|dict)comp>")
_ROOTS = ("site-packages/", "worker/src/", "/tests/")


class Cause(NamedTuple):
    """The reason for a wait or a copy: the operation, the function that asked for it (`DDIMScheduler.step`), and its line."""

    operation: str
    function: str
    line: str

    def __str__(self) -> str:
        return f"{self.operation} by {self.function} ({self.line})"


class Records:
    """Waits and copies since the last `clear`.

    A wait stops the host until the device has done all work before. A copy is one between host and device. A copy of memory that
    is not pinned, or that does not ask for `non_blocking`, is a wait as well. `races` are uses of values that were not ordered.
    """

    def __init__(self) -> None:
        self.waits: Counter[Cause] = Counter()
        self.copies: Counter[Cause] = Counter()
        self.races: list[str] = []
        self.operations = 0

    def wait(self, operation: str) -> None:
        """Count a wait of the code that asks now."""
        self.waits[_cause(operation)] += 1

    def copy(self, operation: str) -> None:
        """Count a copy for the code that asks now."""
        self.copies[_cause(operation)] += 1

    def race(self, what: str) -> None:
        """Add `what`, a use of a value that may not be there yet, to the races, with the line of code that asks now."""
        self.races.append(f"{what} by {asking()[1]}")

    def clear(self) -> None:
        """Forget all waits, copies and races, and set the number of operations to 0."""
        self.waits.clear()
        self.copies.clear()
        self.races.clear()
        self.operations = 0


def _cause(operation: str) -> Cause:
    return Cause(operation, *asking())


def asking() -> tuple[str, str]:
    """Return the function and the line that ask now: the innermost frame outside of torch and of the rehearsal. Both are `?` if there is
    none. A comprehension counts as its function."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_OWN):
            return _COMPREHENSION.sub("", code.co_qualname), f"{_short(code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?", "?"


def _short(path: str) -> str:
    for root in _ROOTS:
        if root in path:
            return path.split(root)[-1]
    return path
