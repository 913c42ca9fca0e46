# SPDX-License-Identifier: Apache-2.0
"""Long work that lets others have their turn: all deployments share one event loop."""

import asyncio
import time
from typing import TypeVar

from diffusion_operator.plan.adapters.slices import Slices

TURN_S = 0.01

Result = TypeVar("Result")


class Pace:
    """The time since others had their turn."""

    def __init__(self) -> None:
        self._begun = time.monotonic()

    async def keep(self) -> None:
        """Give way, if that was long ago."""
        if time.monotonic() - self._begun >= TURN_S:
            await asyncio.sleep(0)
            self._begun = time.monotonic()


async def unhurried(slices: Slices[Result]) -> Result:
    """Do all of it, and give way in between."""
    pace = Pace()
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: Result = end.value
            return result
        await pace.keep()
