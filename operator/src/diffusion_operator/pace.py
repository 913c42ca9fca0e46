# SPDX-License-Identifier: Apache-2.0
"""Long work that lets others have their turn: all deployments share one event loop."""

import asyncio
import time
from typing import TypeVar

from diffusion_operator.plan.adapters.slices import Slices

TURN_S = 0.01

Result = TypeVar("Result")


class Pace:
    """A clock by which long work gives way to other tasks now and then."""

    def __init__(self) -> None:
        self._begun = time.monotonic()

    async def keep(self) -> None:
        """Let other tasks run, if they last could 10 ms ago or earlier."""
        if time.monotonic() - self._begun >= TURN_S:
            await asyncio.sleep(0)
            self._begun = time.monotonic()


async def unhurried(slices: Slices[Result]) -> Result:
    """Run all slices of a piece of work, let other tasks run in between, and return its result."""
    pace = Pace()
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: Result = end.value
            return result
        await pace.keep()
