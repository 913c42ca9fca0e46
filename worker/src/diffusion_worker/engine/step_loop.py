# SPDX-License-Identifier: Apache-2.0
"""Keeps the ranks stepping while there are requests, and hands each request its picture or its error."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from diffusion_worker.engine.memory_model import MemoryModel
from diffusion_worker.engine.rank_group import RankGroup, TickReport
from diffusion_worker.engine.request_class import Defaults
from diffusion_worker.engine.scheduler import StepScheduler
from diffusion_worker.engine.wave_limit import wave_limit_s
from diffusion_worker.errors import ErrorCode, GroupFailed, RequestError
from diffusion_worker.messages import ErrorReport, ModelInfo, RequestSpec, StageSeconds, Tick

log = logging.getLogger(__name__)

# One tick runs while the next one is already with the ranks, so that none of them waits for the server.
TICKS_AHEAD = 2

# A request that was with the ranks at three losses of them is as likely their cause as their victim.
MAX_REPLAYS = 2

# Bytes of pictures on their way to the ranks.
InputFrames = Sequence[bytes | memoryview]


class Outcome(msgspec.Struct, frozen=True):
    """A finished picture: rows of RGB bytes, and what it took. `queued_s` is the time until it joined."""

    pixels: bytes | memoryview
    height: int
    width: int
    stages: StageSeconds = StageSeconds()
    queued_s: float = 0.0


class StepStats(msgspec.Struct):
    """What the ranks did since the start."""

    pictures: int = 0
    ticks: int = 0
    rows: int = 0
    model_calls: int = 0
    step_seconds: float = 0.0
    replayed: int = 0


class StepLoop:
    """The requests of one rank group, from their submission to their outcome. `broken` hears why stepping ended."""

    def __init__(
        self,
        ranks: RankGroup,
        *,
        max_batch_size: int,
        tick_timeout_s: float | None,
        window_s: float = 0.0,
        broken: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats = StepStats()
        self._ranks = ranks
        self._tick_timeout_s = tick_timeout_s
        self._broken = broken
        self._clock = clock
        self._scheduler = StepScheduler(max_batch_size, window_s=window_s)
        self._outcomes: dict[str, asyncio.Future[Outcome]] = {}
        self._frames: dict[str, InputFrames] = {}
        self._replays: Counter[str] = Counter()
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def describe(self, model: ModelInfo) -> None:
        """What was loaded; before the first request."""
        defaults = Defaults(model.default_height, model.default_width, model.default_frames, model.default_steps)
        self._scheduler.describe(defaults, model.free_bytes)

    @property
    def memory(self) -> MemoryModel:
        """What fits in a step, for admission."""
        return self._scheduler.memory

    @property
    def running(self) -> int:
        """Pictures that are being made."""
        return self._scheduler.running

    @property
    def waiting(self) -> int:
        """Pictures that wait for a place in the batch."""
        return self._scheduler.waiting

    def submit(self, spec: RequestSpec, frames: InputFrames = ()) -> asyncio.Future[Outcome]:
        """Queue a request with the frames of its pictures; whoever submits also calls `forget`, however it ends."""
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        if frames:
            self._frames[spec.request_id] = frames
        self._outcomes[spec.request_id] = outcome
        self._scheduler.add(spec, self._clock())
        self._idle.clear()
        self._work.set()
        return outcome

    def forget(self, request_id: str) -> None:
        """Nothing of a request stays here, nor on the ranks after their next step."""
        outcome = self._outcomes.pop(request_id, None)
        self._frames.pop(request_id, None)
        if outcome is not None:
            outcome.cancel()
            del self._replays[request_id]
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

    def lost(self, code: ErrorCode, message: str) -> None:
        """The ranks forgot all requests: those that ran are made again, before the others and from the same seeds.

        One that was made again `MAX_REPLAYS` times already ends with the error. Not while `run` runs.
        """
        for request_id in self._scheduler.requeue_running():
            self._replays[request_id] += 1
            if self._replays[request_id] > MAX_REPLAYS:
                self._scheduler.remove(request_id)
                self._settle(request_id, ErrorReport(code, message))
            else:
                self.stats.replayed += 1

    async def run(self) -> None:
        """Step until cancelled, or until the group or this loop breaks; may be called again after `lost`."""
        try:
            await self._step_for_ever()
        except GroupFailed as error:
            self._broken(str(error))
        except Exception as error:
            log.exception("the engine broke")
            self._broken(f"{type(error).__name__}: {error}")

    async def _step_for_ever(self) -> None:
        scheduler = self._scheduler
        while True:
            tick = scheduler.next_tick(self._clock()) if scheduler.in_flight < TICKS_AHEAD else None
            if tick is not None:
                self._broadcast(tick)
            elif scheduler.in_flight:
                wave = scheduler.oldest_wave()
                self._deliver(await self._ranks.next_report(wave_limit_s(wave, self._tick_timeout_s), phase=wave.phase))
            else:
                await self._wait_for_work()

    def _broadcast(self, tick: Tick) -> None:
        """Send a tick, with the frames of those that join: kept until their outcome, as they may have to join again."""
        frames = [self._frames.get(spec.request_id, ()) for spec in tick.join]
        if any(frames):
            tick = msgspec.structs.replace(tick, frames=[len(each) for each in frames])
        self._ranks.broadcast_tick(tick, [frame for each in frames for frame in each])

    async def _wait_for_work(self) -> None:
        """Returns when something was submitted or forgotten, or when nobody is to wait for company any longer."""
        self._work.clear()
        held_until_s = self._scheduler.held_until_s()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if held_until_s is None else held_until_s - self._clock()):
                await self._work.wait()

    def _deliver(self, report: TickReport) -> None:
        done = report.done
        self._scheduler.observe(done, self._clock())
        self.stats.ticks += 1
        self.stats.rows += done.rows
        self.stats.model_calls += done.calls
        self.stats.step_seconds += done.seconds
        for finished in done.finished:
            self.stats.pictures += 1
            height, width = finished.shape[-3:-1]
            self._settle(finished.request_id, Outcome(report.frames[finished.frame], height, width, finished.stages))
        for failed in done.failed:
            self._settle(failed.request_id, failed.error)

    def _settle(self, request_id: str, result: Outcome | ErrorReport) -> None:
        outcome = self._outcomes.get(request_id)
        if outcome is None or outcome.done():
            return
        if isinstance(result, ErrorReport):
            outcome.set_exception(RequestError(ErrorCode(result.code), result.message))
        else:
            outcome.set_result(result)
