# SPDX-License-Identifier: Apache-2.0
"""Work in slices: a generator that yields where it may be left for a moment, and returns its result."""

from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")
SLICE = 50
"""Adapters that are looked at in one go: a few milliseconds."""

Slices = Generator[None, None, Result]


def finish(slices: Slices[Result]) -> Result:
    """Run all slices without a pause, and return the result."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: Result = end.value
            return result
