# SPDX-License-Identifier: Apache-2.0
"""The loop that keeps the ranks stepping while there are requests, and hands each request its image or its error."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence

import msgspec

from diffusion_worker.engine.scheduling.memory_model import MemoryModel
from diffusion_worker.engine.scheduling.poison import Poisons, content_of
from diffusion_worker.engine.scheduling.request_class import Defaults
from diffusion_worker.engine.scheduling.scheduler import StepScheduler
from diffusion_worker.engine.scheduling.tick_deadline import wave_limit_s
from diffusion_worker.engine.state.histogram import Durations
from diffusion_worker.engine.state.rank_protocol import RankGroup, TickReport
from diffusion_worker.engine.state.request_events import PreviewMade, RequestEvent, StepTaken
from diffusion_worker.errors import ErrorCode, GroupFailed, RequestError
from diffusion_worker.messages import (
    ErrorReport,
    ModelInfo,
    PromptCacheStats,
    Replay,
    RequestSpec,
    StageSeconds,
    Task,
    Tick,
    TickDone,
    WarmedUp,
)

log = logging.getLogger(__name__)

# The next tick is with the ranks while the current one runs, so that none of them waits for the server.
TICKS_AHEAD = 2

# Bytes of images on their way to the ranks.
InputFrames = Sequence[bytes | memoryview]

# Listener to the steps and previews of a request, called in order and never after its outcome. An exception from it ends the request.
OnEvent = Callable[[RequestEvent], None]


class FinishedPixels(msgspec.Struct, frozen=True):
    """A finished image: rows of RGB bytes, and the seconds of its stages. `queued_s` are those from its submission to its first step."""

    pixels: bytes | memoryview
    height: int
    width: int
    stages: StageSeconds = StageSeconds()
    queued_s: float = 0.0


class Submission(msgspec.Struct, eq=False):
    """A submitted request for one image, number `index` of its caller's. `joined_s` is the time at which it first went to the ranks."""

    spec: RequestSpec
    outcome: "asyncio.Future[FinishedPixels]"
    frames: InputFrames
    index: int
    on_event: OnEvent | None
    submitted_s: float
    joined_s: float | None = None
    # The number of the loss of the ranks at which it was there; it has run alone since.
    lost_in: int | None = None
    # Counted from 1: one more after each loss of the ranks, and when the request has to run alone.
    attempt: int = 1
    # The number of steps it will take, as last reported.
    steps: int | None = None
    on_join: Callable[[], None] | None = None

    @property
    def content(self) -> bytes:
        """The digest of its parameters and input images, without id and seed."""
        return content_of(self.spec, self.frames)

    def start_over(self) -> None:
        """Begin another attempt at the request, and report its step 0."""
        self.attempt += 1
        self.tell(StepTaken(self.index, 0, self.steps, self.attempt))

    def tell(self, event: RequestEvent) -> None:
        """Pass an event to the listener, unless there is none or the outcome is known; an exception from it becomes the outcome."""
        if self.on_event is None or self.outcome.done():
            return
        try:
            self.on_event(event)
        except Exception as error:
            self.outcome.set_exception(error)


class StepStats(msgspec.Struct):
    """Counters of the ranks' work since the start of the server, over all generations."""

    images: int = 0
    ticks: int = 0
    rows: int = 0
    model_calls: int = 0
    # The part of the rows that a step cache mostly skipped.
    skipped_rows: int = 0
    pixels: int = 0
    step_durations: Durations = msgspec.field(default_factory=Durations)
    replayed: int = 0
    # None where there is no prompt cache.
    prompt_cache: PromptCacheStats | None = None


class StepLoop:
    """The requests of one rank group, from submission to outcome. `broken` gets the reason when an error, not a cancel, ends `run`."""

    def __init__(
        self,
        ranks: RankGroup,
        *,
        max_batch_size: int,
        max_loras: int = 1,
        tick_timeout_s: float | None,
        window_s: float = 0.0,
        broken: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats = StepStats()
        # The current outcome of the options that speed up or shrink the model, by their names.
        self.features: dict[str, str] = {}
        # Tasks whose requests run alone, with the change to the shared model that their pipeline was about to make.
        self.whole: dict[Task, str] = {}
        self._ranks = ranks
        self._tick_timeout_s = tick_timeout_s
        self._broken = broken
        self._clock = clock
        self._scheduler = StepScheduler(max_batch_size, slots=max_loras, window_s=window_s)
        self._requests: dict[str, Submission] = {}
        self._poisons = Poisons()
        # Counts of the prompt caches of lost generations.
        self._prompts_before = PromptCacheStats()
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._paused = False
        # Set while steps are paused and nothing is on its way to the ranks.
        self._quiet = asyncio.Event()

    def describe(self, model: ModelInfo) -> None:
        """Give the scheduler the defaults of the loaded model and the device's free bytes. Requests come after that."""
        defaults = Defaults(model.default_height, model.default_width, model.default_frames, model.default_steps, model.references)
        self._scheduler.describe(defaults, model.free_bytes)

    def warmed_up(self, report: WarmedUp) -> None:
        """Take the ranks' report of their warm-up: the outcome of the options, times for the first deadlines, and tasks to run alone."""
        self.features = report.features
        self._scheduler.warmed_up(report.ticks)
        for tick in report.ticks:
            if tick.replayed:
                self._remember_whole(tick.spec.task, tick.replayed)

    @property
    def memory(self) -> MemoryModel:
        """Return the memory model of steps, for admission."""
        return self._scheduler.memory

    def expected_s(self, spec: RequestSpec) -> float:
        """Return the device seconds that a request is expected to take, from the steps measured so far."""
        return self._scheduler.expected_s(spec)

    def left_s(self, request_id: str) -> float:
        """Return the device seconds that a submitted request still takes, by estimate; 0 for an unknown id."""
        return self._scheduler.left_s(request_id)

    @property
    def running(self) -> int:
        """Images that are being made."""
        return self._scheduler.running

    @property
    def active_adapters(self) -> int:
        """Different adapters of the images that are being made."""
        return self._scheduler.active_adapters

    @property
    def waiting(self) -> int:
        """Images that wait for their first step."""
        return self._scheduler.waiting

    def submit(
        self,
        spec: RequestSpec,
        frames: InputFrames = (),
        *,
        index: int = 0,
        on_event: OnEvent | None = None,
        on_join: Callable[[], None] | None = None,
    ) -> asyncio.Future[FinishedPixels]:
        """Queue a request and return the future of its pixels. The caller must `forget` the request in every case.

        While its content is refused, as it lost the rank group twice, the future fails at once with RequestFailed. Events reach `on_event`
        on the event loop, each with `index`. `on_join` is called when the ranks first get the request.
        """
        outcome: asyncio.Future[FinishedPixels] = asyncio.get_running_loop().create_future()
        now_s = self._clock()
        if spec.task in self.whole:
            spec = msgspec.structs.replace(spec, whole=True)
        request = Submission(spec, outcome, frames, index, on_event, now_s, on_join=on_join)
        self._requests[spec.request_id] = request
        if self._poisons and (left_s := self._poisons.refused_for_s(request.content, now_s)):
            why = "the rank group was lost twice while such an image was made, the second time with no other beside it"
            message = f"requests like this one are refused for {left_s:.0f} s more: {why}"
            outcome.set_exception(RequestError(ErrorCode.REQUEST_FAILED, message))
            return outcome
        self._scheduler.add(spec, now_s)
        self._idle.clear()
        self._work.set()
        return outcome

    def forget(self, request_id: str) -> None:
        """Drop a request and cancel its outcome if it has none yet; the ranks drop it with their next tick. Harmless when repeated."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            request.outcome.cancel()
            self._scheduler.remove(request_id)
            self._work.set()
        if not self._requests:
            self._idle.set()

    def end(self, error: Exception, *, only: Callable[[str], bool] = lambda _: True) -> None:
        """Give an error as outcome to all requests without one, or to those whose id satisfies `only`; callers still `forget` them."""
        for request_id, request in self._requests.items():
            if only(request_id) and not request.outcome.done():
                request.outcome.set_exception(error)

    async def drain(self, timeout_s: float, code: ErrorCode, message: str) -> None:
        """Wait until all requests are forgotten; after `timeout_s` seconds end the rest with a RequestError first.

        New requests are still accepted.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            self.end(RequestError(code, message))
            await self._idle.wait()

    def pause(self) -> None:
        """Let no step begin from now on. Requests keep their places, and the ranks still remove those that end meanwhile."""
        self._paused = True
        self._quiet.clear()
        self._work.set()

    async def quiet(self) -> None:
        """Wait until steps are paused, all that began are reported, and their images are handed out; call `pause` before."""
        await self._quiet.wait()

    def resume(self) -> None:
        """Let steps begin again; harmless if they are not paused."""
        self._paused = False
        self._quiet.clear()
        self._work.set()

    def lost(self, reason: str, number: int) -> set[int]:
        """Queue the requests of lost ranks again, each to run alone before the others, with the same seed.

        A request that is lost for the second time was alone, so it ends and its like is refused for a while. Must not be called while `run`
        runs.

        Returns the numbers of the losses that this explains: none, or both of that request.
        """
        self._keep_prompt_counts()
        running = self._scheduler.requeue_running()
        if len(running) == 1 and (first := self._requests[running[0]].lost_in) is not None:
            return {first, number} if self._condemn(running[0], reason) else set()
        for request_id in running:
            request = self._requests[request_id]
            request.lost_in = number
            self._scheduler.run_alone(request_id)
            self.stats.replayed += 1
            request.start_over()
        return set()

    def _condemn(self, request_id: str, reason: str) -> bool:
        """End a request that lost the ranks alone, and all with its content; return whether its losses are explained."""
        content = self._requests[request_id].content
        told = "request %s ran both times when the ranks were lost, the second time alone; it ends, and equal ones are refused for a while"
        log.error(told, request_id)
        twice = "the rank group was lost twice while this image was made, the second time with no other beside it"
        for other_id, other in self._requests.items():
            if not other.outcome.done() and (other_id == request_id or other.content == content):
                self._scheduler.remove(other_id)
                self._settle(other_id, ErrorReport(ErrorCode.REQUEST_FAILED, f"{twice}: {reason}"))
        return self._poisons.condemn(content, self._clock())

    async def run(self) -> None:
        """Step until cancelled, or until the group is lost or a defect occurs, which `broken` gets in place of an exception.

        May be called again after `lost`.
        """
        try:
            await self._step_for_ever()
        except GroupFailed as error:
            self._broken(str(error))
        except Exception as error:
            log.exception("the loop that runs the steps failed unexpectedly, and the worker fails")
            self._broken(f"{type(error).__name__}: {error}")

    async def _step_for_ever(self) -> None:
        scheduler = self._scheduler
        while True:
            tick = self._next_tick() if scheduler.in_flight < TICKS_AHEAD else None
            if tick is not None:
                self._broadcast(tick)
            elif scheduler.in_flight:
                wave = scheduler.oldest_wave()
                self._deliver(await self._ranks.next_report(wave_limit_s(wave, self._tick_timeout_s), phase=wave.phase))
            else:
                await self._wait_for_work()

    def _next_tick(self) -> Tick | None:
        return self._scheduler.leave_tick() if self._paused else self._scheduler.next_tick(self._clock())

    def _broadcast(self, tick: Tick) -> None:
        """Send a tick with the frames of requests that join. Frames are kept until the outcome, as a request may have to join again."""
        self._quiet.clear()
        joining = [self._requests[spec.request_id] for spec in tick.join]
        for request in joining:
            if request.joined_s is None:
                request.joined_s = self._clock()
                if request.on_join is not None:
                    request.on_join()
        frames = [frame for request in joining for frame in request.frames]
        if frames:
            tick = msgspec.structs.replace(tick, frames=[len(request.frames) for request in joining])
        self._ranks.broadcast_tick(tick, frames)

    async def _wait_for_work(self) -> None:
        """Wait until a request is submitted or forgotten, or has waited long enough for company."""
        self._work.clear()
        if self._paused:
            self._quiet.set()
        held_until_s = None if self._paused else self._scheduler.held_until_s()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if held_until_s is None else held_until_s - self._clock()):
                await self._work.wait()

    def _deliver(self, report: TickReport) -> None:
        done = report.done
        again = self._scheduler.observe(done, self._clock())
        self._count(done)
        self._tell(report)
        for finished in done.finished:
            height, width = finished.shape[-3:-1]
            self._poisons.image_made()
            self._settle(finished.request_id, FinishedPixels(report.frames[finished.frame], height, width, finished.stages))
        for failed in done.failed:
            if failed.request_id not in again:
                self._settle(failed.request_id, failed.error)
        for request_id in again:
            log.warning("request %s ran out of memory beside others, and runs once more by itself", request_id)
            self.stats.replayed += 1
            self._requests[request_id].start_over()
        for replay in done.replays:
            self._make_alone(replay)

    def _make_alone(self, replay: Replay) -> None:
        """Queue a request again to run alone, and let all requests of its task run alone from now on."""
        request = self._requests.get(replay.request_id)
        if request is None:
            return
        spec = self._scheduler.replay_whole(replay.request_id)
        self._remember_whole(spec.task, replay.what)
        self.stats.replayed += 1
        request.start_over()

    def _remember_whole(self, task: Task, what: str) -> None:
        """Let all requests of a task run alone from now on; the reason is logged once."""
        if task not in self.whole:
            self.whole[task] = what
            log.warning(
                "requests to %s run one at a time from now on, because the pipeline %s, which other requests would notice", task, what
            )

    def _count(self, done: TickDone) -> None:
        stats = self.stats
        stats.ticks += 1
        stats.rows += done.rows
        stats.model_calls += done.calls
        stats.skipped_rows += done.skipped
        stats.step_durations.observe(done.seconds)
        stats.images += len(done.finished)
        stats.pixels += sum(math.prod(finished.shape[:-1]) for finished in done.finished)
        if done.features is not None:
            self.features = done.features
        if done.prompt_cache is not None:
            stats.prompt_cache = _added(self._prompts_before, done.prompt_cache)

    def _keep_prompt_counts(self) -> None:
        """Save the lost generation's hits and misses of the prompt cache, onto which the next one's are added; its entries are gone."""
        if self.stats.prompt_cache is not None:
            self.stats.prompt_cache = self._prompts_before = msgspec.structs.replace(self.stats.prompt_cache, size=0)

    def _tell(self, report: TickReport) -> None:
        """Pass on the steps and previews of requests that are still here."""
        for progress in report.done.progress:
            if (request := self._requests.get(progress.request_id)) is not None:
                request.steps = progress.steps
                request.tell(StepTaken(request.index, progress.step, progress.steps, request.attempt))
        for preview in report.done.previews:
            if (request := self._requests.get(preview.request_id)) is not None:
                height, width = preview.shape[:2]
                pixels = report.frames[preview.frame]
                request.tell(PreviewMade(request.index, preview.number, pixels, height, width, request.attempt))

    def _settle(self, request_id: str, result: FinishedPixels | ErrorReport) -> None:
        request = self._requests.get(request_id)
        if request is None or request.outcome.done():
            return
        if isinstance(result, ErrorReport):
            request.outcome.set_exception(RequestError(ErrorCode(result.code), result.message))
        else:
            assert request.joined_s is not None, "only what joined can finish"
            request.outcome.set_result(msgspec.structs.replace(result, queued_s=request.joined_s - request.submitted_s))


def _added(before: PromptCacheStats, now: PromptCacheStats) -> PromptCacheStats:
    """Return the counts of both prompt caches added up, with the entries of the current one."""
    return PromptCacheStats(now.size, now.max_size, before.hits + now.hits, before.misses + now.misses, before.bypassed + now.bypassed)
