# SPDX-License-Identifier: Apache-2.0
"""The loop that drives the ranks: ticks sent ahead, deadlines from measured times, aborts, replays. Over a fake rank group."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from diffusion_worker.engine.scheduling.scheduler import TickEstimate
from diffusion_worker.engine.scheduling.step_loop import TICKS_AHEAD, FinishedPixels, StepLoop
from diffusion_worker.engine.scheduling.tick_deadline import FACTOR, FLOOR_OF_NEW_CLASS_S, FLOOR_S, UNMEASURED_S, wave_limit_s
from diffusion_worker.engine.state.rank_protocol import TickReport
from diffusion_worker.messages import RequestSpec, Tick, WarmedUp, WarmTick
from support.worker.fake_rank_group import FakeRankGroup, fake_pixels

DEADLINE_S = 60.0


class WatchedRanks(FakeRankGroup):
    """A fake rank group that keeps the ticks it gets, and the limits with which reports are awaited.

    Each step takes no time and reports `seconds` of denoising.
    """

    def __init__(self, seconds: float = 0.001) -> None:
        super().__init__()
        self.ticks: list[Tick] = []
        self.limits: list[tuple[float, str]] = []
        self.most_ahead = 0
        self._reported = 0
        self._seconds = seconds

    def broadcast_tick(self, tick: Tick, frames: Sequence[bytes | memoryview] = ()) -> None:
        super().broadcast_tick(tick, frames)
        self.ticks.append(tick)
        self.most_ahead = max(self.most_ahead, len(self.ticks) - self._reported)

    async def next_report(self, timeout_s: float, *, phase: str = "a step") -> TickReport:
        self.limits.append((timeout_s, phase))
        report = await super().next_report(DEADLINE_S)
        self._reported += 1
        fields = {name: getattr(report.done, name) for name in report.done.__struct_fields__}
        return TickReport(type(report.done)(**fields | {"denoise_seconds": self._seconds}), report.frames)

    def names(self, field: str) -> list[list[str]]:
        """Return the requests in a field of each tick, such as those that join, leave or advance."""
        values = [getattr(tick, field) or [] for tick in self.ticks]
        return [[item.request_id if isinstance(item, RequestSpec) else item for item in value] for value in values]


def spec(name: str, **fields: Any) -> RequestSpec:
    return RequestSpec(**{"request_id": name, "prompt": "p kumquatfen", "seed": 1, "height": 64, "width": 64, "steps": 4} | fields)


@asynccontextmanager
async def running(ranks: WatchedRanks, **settings: Any) -> AsyncIterator[StepLoop]:
    """Start these ranks and a step loop over them, and yield the loop; it ends with the block.

    It must not have broken unless the test lost the ranks.
    """
    broken: list[str] = []
    loop = StepLoop(ranks, **{"max_batch_size": 2, "tick_timeout_s": None, "broken": broken.append} | settings)
    loop.describe(await ranks.start())
    task = asyncio.create_task(loop.run())
    try:
        yield loop
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert ranks.loss is not None or broken == []


async def settled(outcome: "asyncio.Future[FinishedPixels]") -> FinishedPixels:
    async with asyncio.timeout(DEADLINE_S):
        return await outcome


async def turns(count: int = 20) -> None:
    """Yield to the event loop this many times."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_requests_of_different_sizes_get_their_own_images() -> None:
    ranks = WatchedRanks()
    async with running(ranks) as loop:
        specs = [spec("a"), spec("b", height=32, seed=2), spec("c", steps=7), spec("d", guidance_scale=1.0)]
        outcomes = [loop.submit(item) for item in specs]
        frames = [await settled(outcome) for outcome in outcomes]
    for item, made in zip(specs, frames, strict=True):
        assert (bytes(made.pixels), made.height, made.width) == (fake_pixels(item), item.height, item.width)


async def test_ticks_are_sent_ahead_but_never_more_than_two() -> None:
    ranks = WatchedRanks()
    async with running(ranks) as loop:
        await settled(loop.submit(spec("a", steps=20)))
    assert ranks.most_ahead == TICKS_AHEAD
    assert len({tick.number for tick in ranks.ticks}) == len(ranks.ticks)


async def test_an_aborted_request_frees_its_row_with_the_next_tick_and_one_that_waits_never_joins() -> None:
    ranks = WatchedRanks()
    ranks.stepping.clear()
    async with running(ranks) as loop:
        outcomes = [loop.submit(spec(name, steps=30)) for name in "abcd"]
        await turns()
        assert (loop.running, loop.waiting) == (2, 2)
        loop.forget("c")
        assert loop.waiting == 1
        loop.forget("a")
        sent = len(ranks.ticks)
        ranks.stepping.set()
        await settled(outcomes[3])
    assert ranks.names("leave")[sent] == ["a"]
    assert ranks.names("join")[sent] == ["d"]
    assert not any("a" in names for names in ranks.names("advance")[sent:])
    assert ["c"] not in ranks.names("join")


async def test_the_last_request_that_is_aborted_is_taken_from_the_ranks_too() -> None:
    ranks = WatchedRanks()
    ranks.stepping.clear()
    async with running(ranks) as loop:
        loop.submit(spec("a", steps=30))
        await turns()
        loop.forget("a")
        ranks.stepping.set()
        await turns(100)
        assert ranks.names("leave")[-1] == ["a"]
        assert (loop.running, loop.waiting) == (0, 0)


async def test_a_request_that_was_replayed_has_the_image_of_its_seed() -> None:
    ranks = WatchedRanks()
    loop = StepLoop(ranks, max_batch_size=2, tick_timeout_s=None, broken=lambda _: None)
    loop.describe(await ranks.start())
    outcome = loop.submit(spec("a", seed=7, steps=30))
    task = asyncio.create_task(loop.run())
    await turns(30)
    ranks.lose("rank 0 was ended by SIGKILL")
    await task
    await ranks.restart()
    loop.lost("lost", 1)
    task = asyncio.create_task(loop.run())
    assert bytes((await settled(outcome)).pixels) == fake_pixels(spec("a", seed=7, steps=30))
    task.cancel()


async def test_the_limit_of_a_tick_follows_measured_steps_and_names_the_phase() -> None:
    ranks = WatchedRanks(seconds=10.0)
    async with running(ranks) as loop:
        await settled(loop.submit(spec("a", steps=50)))
        await settled(loop.submit(spec("b", steps=50, height=128)))
    first, second = ranks.limits[0], ranks.limits[1]
    assert first == (UNMEASURED_S, "step 1 of 51 of 1 requests for images of 64x64")
    assert second == (51 * 10.0 * FACTOR, "step 2 of 51 of 1 requests for images of 64x64")
    assert any(limit >= FLOOR_OF_NEW_CLASS_S and "64x128" in phase for limit, phase in ranks.limits)


async def test_a_limit_that_was_given_holds_for_every_tick() -> None:
    ranks = WatchedRanks(seconds=10.0)
    async with running(ranks, tick_timeout_s=7.0) as loop:
        await settled(loop.submit(spec("a")))
    assert {limit for limit, _ in ranks.limits} == {7.0}


def test_a_legitimate_long_video_is_never_ended_by_a_constant() -> None:
    video = TickEstimate("decode", steps=50, step_s=240.0, same_class=True)
    assert wave_limit_s(video, None) > 50 * 240.0
    assert wave_limit_s(TickEstimate("a step", steps=4, step_s=0.01, same_class=True), None) == FLOOR_S
    assert wave_limit_s(TickEstimate("a step", steps=4, step_s=0.01, same_class=False), None) == FLOOR_OF_NEW_CLASS_S
    assert wave_limit_s(video, 5.0) == 5.0
    # A model that compiles for five minutes may do so again for another size.
    compiled = TickEstimate("a step", steps=4, step_s=0.01, same_class=False, once_s=300.0)
    assert wave_limit_s(compiled, None) >= 900.0


async def test_the_first_request_has_a_limit_by_the_warm_up_and_another_size_by_its_pixels() -> None:
    ranks = WatchedRanks(seconds=2.0)
    async with running(ranks) as loop:
        loop.warmed_up(WarmedUp({}, [WarmTick(spec("warm-up"), 1, step_s=2.0, longest_s=5.0)]))
        await settled(loop.submit(spec("a", steps=49)))
        await settled(loop.submit(spec("b", steps=49, height=256)))
    assert ranks.limits[0] == (FACTOR * (50 * 2.0 + 5.0), "step 1 of 50 of 1 requests for images of 64x64")
    # Four times the pixels take at most sixteen times as long. The number of ticks is known then.
    first = next(limit for limit, phase in ranks.limits if phase == "step 1 of 49 of 1 requests for images of 64x256")
    assert first == FACTOR * 16 * (49 * 2.0 + 5.0)


async def test_a_first_step_waits_for_company_and_starts_without_it_when_the_window_is_over() -> None:
    ranks = WatchedRanks()
    now_s = 100.0
    async with running(ranks, window_s=0.02, clock=lambda: now_s) as loop:
        outcome = loop.submit(spec("a"))
        await turns()
        assert ranks.ticks == []
        now_s += 0.021  # the loop's timer follows the real clock: 20 ms
        await settled(outcome)
        ranks.ticks.clear()
        together = [loop.submit(spec(name)) for name in "bc"]
        for outcome in together:
            await settled(outcome)
    assert ranks.names("advance")[0] == ["b", "c"]


async def test_a_new_request_wakes_a_loop_that_waits_for_company() -> None:
    ranks = WatchedRanks()
    async with running(ranks, window_s=60.0) as loop:
        first = loop.submit(spec("a"))
        await turns()
        assert ranks.ticks == []
        second = loop.submit(spec("b"))
        await settled(first)
        await settled(second)
    assert ranks.names("advance")[0] == ["a", "b"]
