# SPDX-License-Identifier: Apache-2.0
"""Keeps the ranks stepping while there are requests, and hands each request its picture or its error."""

import asyncio
import logging
from collections.abc import Callable

import msgspec

from diffusion_worker.engine.rank_group import RankGroup, TickReport
from diffusion_worker.engine.scheduler import StepScheduler
from diffusion_worker.errors import ErrorCode, GroupFailed, RequestError
from diffusion_worker.messages import ErrorReport, RequestSpec

log = logging.getLogger(__name__)

# One tick runs while the next one is already with the ranks, so that none of them waits for the server.
TICKS_AHEAD = 2

# Pixels (rows of RGB bytes), height, width.
Frame = tuple[bytes | memoryview, int, int]


class StepStats(msgspec.Struct):
    """What the ranks did since the start."""

    pictures: int = 0
    ticks: int = 0
    rows: int = 0
    model_calls: int = 0
    step_seconds: float = 0.0


class StepLoop:
    """The requests of one rank group, from their submission to their outcome. `broken` hears why stepping ended."""

    def __init__(self, ranks: RankGroup, *, max_batch_size: int, tick_timeout_s: float, broken: Callable[[str], None]) -> None:
        self.stats = StepStats()
        self._ranks = ranks
        self._tick_timeout_s = tick_timeout_s
        self._broken = broken
        self._scheduler = StepScheduler(max_batch_size)
        self._outcomes: dict[str, asyncio.Future[Frame]] = {}
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        """Pictures that are being made."""
        return self._scheduler.running

    @property
    def waiting(self) -> int:
        """Pictures that wait for a place in the batch."""
        return self._scheduler.waiting

    def submit(self, spec: RequestSpec) -> asyncio.Future[Frame]:
        """Queue a request; whoever submits also calls `forget`, however it ends."""
        outcome: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._outcomes[spec.request_id] = outcome
        self._scheduler.add(spec)
        self._idle.clear()
        self._work.set()
        return outcome

    def forget(self, request_id: str) -> None:
        """Nothing of a request stays here, nor on the ranks after their next step."""
        outcome = self._outcomes.pop(request_id, None)
        if outcome is not None:
            outcome.cancel()
            self._scheduler.remove(request_id)
            self._work.set()
        if not self._outcomes:
            self._idle.set()

    def end(self, error: Exception, *, only: Callable[[str], bool] = lambda _: True) -> None:
        """End requests with an error: all, or those whose id is wanted."""
        for request_id, outcome in self._outcomes.items():
            if only(request_id) and not outcome.done():
                outcome.set_exception(error)

    async def drain(self, timeout_s: float, code: ErrorCode, message: str) -> None:
        """Wait for all requests; past the time, end them with an error."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            self.end(RequestError(code, message))
            await self._idle.wait()

    async def run(self) -> None:
        """Step until cancelled, or until the group or this loop breaks."""
        try:
            await self._step_for_ever()
        except GroupFailed as error:
            self._broken(str(error))
        except Exception as error:
            log.exception("the engine broke")
            self._broken(f"{type(error).__name__}: {error}")

    async def _step_for_ever(self) -> None:
        ahead = 0
        while True:
            if self._scheduler.has_work and ahead < TICKS_AHEAD:
                self._ranks.broadcast_tick(self._scheduler.next_tick())
                ahead += 1
            elif ahead:
                self._deliver(await self._ranks.next_report(self._tick_timeout_s))
                ahead -= 1
            else:
                self._work.clear()
                await self._work.wait()

    def _deliver(self, report: TickReport) -> None:
        done = report.done
        self.stats.ticks += 1
        self.stats.rows += done.rows
        self.stats.model_calls += done.calls
        self.stats.step_seconds += done.seconds
        for finished in done.finished:
            self.stats.pictures += 1
            height, width, _ = finished.shape
            self._settle(finished.request_id, (report.frames[finished.frame], height, width))
        for failed in done.failed:
            self._settle(failed.request_id, failed.error)

    def _settle(self, request_id: str, result: Frame | ErrorReport) -> None:
        self._scheduler.finished(request_id)
        outcome = self._outcomes.get(request_id)
        if outcome is None or outcome.done():
            return
        if isinstance(result, ErrorReport):
            outcome.set_exception(RequestError(ErrorCode(result.code), result.message))
        else:
            outcome.set_result(result)
