# SPDX-License-Identifier: Apache-2.0
"""The hold on the ranks' steps, by a caller of `pause` and by a sleep: no step runs while either holds."""

import asyncio
import enum

from diffusion_worker.engine.scheduling.step_loop import StepLoop
from diffusion_worker.engine.state.rank_calls import CallAll
from diffusion_worker.errors import ErrorCode, RequestError


class Pauser(enum.Enum):
    """The two that can hold the steps: a call of `pause`, and a sleep."""

    CALL = "pause"
    SLEEP = "sleep"


class Pausing:
    """The callers that hold the steps now. Ranks that are started meanwhile make no step either."""

    def __init__(self, steps: StepLoop, call_all: CallAll) -> None:
        self._steps = steps
        self._call_all = call_all
        self._holders: set[Pauser] = set()

    @property
    def paused(self) -> bool:
        """Return whether a caller of `pause` holds the steps; the hold of a sleep does not count."""
        return Pauser.CALL in self._holders

    def begin(self, who: Pauser) -> None:
        """Let no step begin from now on; running ones go on."""
        self._holders.add(who)
        self._steps.pause()

    async def hold(self, who: Pauser, *, timeout_s: float) -> None:
        """Let no step begin, and return when running ones are over on the ranks and their results are handed out.

        A failed hold lets the steps continue.

        Raises:
            RequestError: Timeout, or an error that names the rank. GroupFailed: the ranks are lost; the next ones make no step.
        """
        self.begin(who)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                await self._steps.quiet()
                limit.reschedule(None)  # the call has a deadline of its own
                await self._call_all("synchronize", timeout_s=timeout_s)
        except TimeoutError:
            self.release(who)
            raise RequestError(ErrorCode.TIMEOUT, f"{who.value}: expected running steps to end within {timeout_s:g} s") from None
        except (RequestError, asyncio.CancelledError):
            self.release(who)
            raise

    async def drain(self, timeout_s: float, code: ErrorCode, message: str) -> None:
        """Wait until no request is left; after `timeout_s` seconds end the rest with a RequestError. Steps go on meanwhile, unless held."""
        await self._steps.drain(timeout_s, code, message)

    def release(self, who: Pauser) -> None:
        """Let the steps go on, unless another caller holds them; harmless if they go on already."""
        self._holders.discard(who)
        if not self._holders:
            self._steps.resume()
