# SPDX-License-Identifier: Apache-2.0
"""Events of a request: its steps and previews come in order and never after its outcome. The rank group is fake."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from diffusion_worker.engine.scheduling.step_loop import StepLoop
from diffusion_worker.engine.state.request_events import PreviewMade, RequestEvent, StepTaken
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.messages import RequestSpec, Task, WarmedUp, WarmTick
from support.worker.fake_rank_group import CHANGE, FakeRankGroup, fake_pixels, fake_preview

DEADLINE_S = 60.0


def spec(name: str, *, steps: int = 4, previews: int = 0) -> RequestSpec:
    return RequestSpec(request_id=name, prompt="p kumquatfen", seed=1, height=8, width=16, steps=steps, previews=previews)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def running(ranks: FakeRankGroup, *, clock: Callable[[], float] = time.monotonic, max_batch_size: int = 2) -> AsyncIterator[StepLoop]:
    """Start these ranks and a step loop over them, and yield the loop; it ends with the block, which has a deadline."""
    loop = StepLoop(ranks, max_batch_size=max_batch_size, tick_timeout_s=None, broken=lambda _: None, clock=clock)
    loop.describe(await ranks.start())
    task = asyncio.create_task(loop.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield loop
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def turns(count: int = 30) -> None:
    """Yield to the event loop this many times."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_request_out_of_memory_beside_another_begins_again_alone_and_nobody_gets_an_error() -> None:
    ranks, heard = FakeRankGroup(), list[RequestEvent]()
    ranks.out_of_memory_pixels, ranks.cramped = 1, True
    async with running(ranks) as loop:
        failing = loop.submit(spec("a", steps=2), on_event=heard.append)
        other = loop.submit(spec("b", steps=2))
        made = [bytes((await outcome).pixels) for outcome in (failing, other)]
    assert made == [fake_pixels(spec("a", steps=2)), fake_pixels(spec("b", steps=2))]
    assert heard == [StepTaken(0, 0, None, 2), StepTaken(0, 1, 2, 2), StepTaken(0, 2, 2, 2)]
    assert [name for name, _ in ranks.joined] == ["a", "b", "a"]
    assert loop.stats.replayed == 1


async def test_a_request_hears_of_every_step_in_order_and_others_do_not() -> None:
    heard: dict[str, list[RequestEvent]] = {"a": [], "b": []}
    async with running(FakeRankGroup()) as loop:
        a = loop.submit(spec("a", steps=3), on_event=heard["a"].append)
        b = loop.submit(spec("b", steps=2), index=1, on_event=heard["b"].append)
        unheard = loop.submit(spec("c"))
        await asyncio.gather(a, b, unheard)
    assert heard["a"] == [StepTaken(0, 1, 3), StepTaken(0, 2, 3), StepTaken(0, 3, 3)]
    assert heard["b"] == [StepTaken(1, 1, 2), StepTaken(1, 2, 2)]


async def test_previews_come_between_the_steps_that_they_show_with_their_image_and_only_where_asked() -> None:
    heard: list[RequestEvent] = []
    wanted = spec("a", steps=6, previews=2)
    async with running(FakeRankGroup()) as loop:
        plain: list[RequestEvent] = []
        await asyncio.gather(loop.submit(wanted, index=3, on_event=heard.append), loop.submit(spec("b"), on_event=plain.append))
    kinds = ["preview" if isinstance(event, PreviewMade) else event.step for event in heard]
    assert kinds == [1, 2, "preview", 3, 4, "preview", 5, 6]
    previews = [event for event in heard if isinstance(event, PreviewMade)]
    assert previews == [PreviewMade(3, number, fake_preview(wanted, number), 8, 16) for number in (0, 1)]
    assert not any(isinstance(event, PreviewMade) for event in plain)


async def test_a_request_that_is_made_again_after_a_loss_says_so_by_step_0_and_starts_over() -> None:
    ranks = FakeRankGroup(step_s=0.001)
    heard: list[RequestEvent] = []
    half_way = asyncio.Event()

    def on_event(event: RequestEvent) -> None:
        heard.append(event)
        if isinstance(event, StepTaken) and event.step == 2:
            half_way.set()

    async with running(ranks) as loop:
        outcome = loop.submit(spec("a", steps=3), on_event=on_event)
        await half_way.wait()
        ranks.lose("rank 0 was ended by SIGKILL")
        await turns()
        before = list(heard)
        await ranks.restart()
        loop.lost("lost", 1)
        again = asyncio.create_task(loop.run())
        await outcome
        again.cancel()
        await asyncio.gather(again, return_exceptions=True)
    assert heard == [*before, *(StepTaken(0, step, 3, attempt=2) for step in range(4))]


async def test_a_request_that_needs_the_model_alone_starts_over_once_and_those_of_its_task_go_alone_at_once() -> None:
    ranks = FakeRankGroup()
    ranks.changing = 2
    heard: list[RequestEvent] = []
    async with running(ranks, max_batch_size=1) as loop:
        first = loop.submit(spec("a", steps=3, previews=1), on_event=heard.append)
        waiting = loop.submit(spec("b", steps=3))
        edit = loop.submit(msgspec.structs.replace(spec("c", steps=2), task=Task.EDIT))
        made, others = await first, await waiting
        later = await loop.submit(spec("d", steps=3))
        await edit
    assert [(event.attempt, event.step) for event in heard if isinstance(event, StepTaken)] == [(1, 1), (2, 0), (2, 1), (2, 2), (2, 3)]
    assert [event.attempt for event in heard if isinstance(event, PreviewMade)] == [1, 2]
    assert bytes(made.pixels) == fake_pixels(spec("a", steps=3), None, [])
    assert others.height == later.height == 8
    assert sorted(ranks.joined) == [("a", False), ("a", True), ("b", True), ("c", False), ("c", True), ("d", True)]
    assert loop.whole == {Task.GENERATE: CHANGE, Task.EDIT: CHANGE}


async def test_requests_of_a_task_that_the_warm_up_made_alone_go_alone_from_the_first(caplog: pytest.LogCaptureFixture) -> None:
    ranks = FakeRankGroup()
    async with running(ranks) as loop:
        loop.warmed_up(WarmedUp({}, [WarmTick(spec("warm-up"), 1, 0.1, 0.1, CHANGE)] * 2))
        await loop.submit(spec("a"))
        await loop.submit(msgspec.structs.replace(spec("b"), task=Task.EDIT))
    assert ranks.joined == [("a", True), ("b", False)]
    assert loop.whole == {Task.GENERATE: CHANGE}
    assert caplog.text.count(f"run one at a time from now on, because the pipeline {CHANGE}") == 1


async def test_a_request_that_was_given_up_is_not_made_alone() -> None:
    ranks = FakeRankGroup()
    ranks.changing = 1
    ranks.stepping.clear()
    async with running(ranks) as loop:
        given_up = loop.submit(spec("a"))
        await turns()
        loop.forget("a")
        ranks.stepping.set()
        await loop.submit(spec("b", steps=2))
    assert given_up.cancelled()
    assert [name for name, whole in ranks.joined if name == "a"] == ["a"]


async def test_nothing_is_heard_after_the_outcome_nor_of_a_request_that_was_cancelled_or_lost_too_often() -> None:
    ranks = FakeRankGroup()
    ranks.stepping.clear()
    heard: list[RequestEvent] = []
    async with running(ranks) as loop:
        ended, cancelled = (loop.submit(spec(name), on_event=heard.append) for name in "ab")
        await turns()
        loop.end(RequestError(ErrorCode.ASLEEP, "the model goes to sleep"), only=lambda name: name == "a")
        loop.forget("b")
        for number in (1, 2):
            loop.lost("lost", number)
        ranks.stepping.set()
        await turns()
        assert (ended.done(), cancelled.cancelled()) == (True, True)
        with pytest.raises(RequestError, match="goes to sleep"):
            await ended
    assert heard == []


async def test_a_listener_that_fails_ends_its_own_request_with_what_it_raised_and_no_other() -> None:
    def broken(event: RequestEvent) -> None:
        raise ZeroDivisionError(str(event))

    async with running(FakeRankGroup()) as loop:
        bad, good = loop.submit(spec("a"), on_event=broken), loop.submit(spec("b"))
        with pytest.raises(ZeroDivisionError, match="step=1"):
            await bad
        loop.forget("a")
        assert (await good).height == 8


async def test_the_time_in_the_queue_ends_when_the_request_goes_to_the_ranks_and_a_replay_does_not_add_to_it() -> None:
    clock = Clock()
    ranks = FakeRankGroup()
    ranks.stepping.clear()
    async with running(ranks, clock=clock, max_batch_size=1) as loop:
        first = loop.submit(spec("a", steps=1))
        await turns()
        for name in ("b", "c", "d"):  # the ranks may have this many at once
            loop.submit(spec(name, steps=1))
        last = loop.submit(spec("e", steps=1))
        await turns()
        clock.now_s += 7
        ranks.lose("gone")
        await turns()
        await ranks.restart()
        loop.lost("lost", 1)
        ranks.stepping.set()
        again = asyncio.create_task(loop.run())
        assert (await first).queued_s == 0
        assert (await last).queued_s == 7
        again.cancel()
        await asyncio.gather(again, return_exceptions=True)


async def test_what_the_prompt_cache_did_adds_up_over_losses_of_the_ranks() -> None:
    ranks = FakeRankGroup()
    async with running(ranks) as loop:
        await asyncio.gather(*(loop.submit(spec(name)) for name in "abc"))
        counted = loop.stats.prompt_cache
        assert counted is not None
        assert (counted.hits, counted.misses, counted.size) == (2, 1, 1)
        ranks.lose("gone")
        await turns()
        await ranks.restart()
        loop.lost("lost", 1)
        assert loop.stats.prompt_cache is not None
        assert (loop.stats.prompt_cache.hits, loop.stats.prompt_cache.size) == (2, 0)
        again = asyncio.create_task(loop.run())
        await asyncio.gather(*(loop.submit(spec(name)) for name in "de"))
        again.cancel()
        await asyncio.gather(again, return_exceptions=True)
    counted = loop.stats.prompt_cache
    assert (counted.hits, counted.misses, counted.size) == (3, 2, 1)
