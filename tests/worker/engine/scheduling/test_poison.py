# SPDX-License-Identifier: Apache-2.0
"""Suspects of a loss are made again one at a time. A request that loses the ranks alone is refused from then on. The rank group is fake."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from diffusion_worker.engine.scheduling.poison import MOST_IN_A_ROW, REFUSED_S, REMEMBERED, Poisons, content_of
from diffusion_worker.engine.scheduling.step_loop import StepLoop
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.messages import LoRAUse, RequestSpec, Task
from support.worker.fake_rank_group import FakeRankGroup, fake_pixels

DEADLINE_S = 60.0


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class PoisonedRanks(FakeRankGroup):
    """Fake ranks that are lost at the second step of a request whose prompt has the word poison."""

    def __init__(self) -> None:
        super().__init__()
        # The requests that were on the ranks at each loss.
        self.losses: list[list[str]] = []

    def _advance(self, tick: Any) -> Any:
        for name in tick.advance or ():
            spec, left = self.active.get(name, (None, 0))
            if spec is not None and "poison" in spec.prompt and left < (spec.steps or 0):
                self.losses.append(list(self.active))
                self.lose("rank 0 was ended by SIGKILL")
                self._check()
        return super()._advance(tick)


class Rig:
    """A step loop over poisoned ranks that is restarted after each loss, as the supervisor does."""

    def __init__(self, size: int) -> None:
        self.ranks, self.clock = PoisonedRanks(), Clock()
        self.loop = StepLoop(self.ranks, max_batch_size=size, tick_timeout_s=None, broken=lambda _: None, clock=self.clock)
        self.explained: list[set[int]] = []

    async def supervise(self) -> None:
        while True:
            await self.loop.run()
            loss = self.ranks.loss
            assert loss is not None
            self.explained.append(self.loop.lost(loss.reason, self.ranks.generation))
            await self.ranks.restart()

    async def outcome(self, item: RequestSpec) -> bytes | ErrorCode:
        """Submit a request and wait for its end; return its pixels or the code of its error."""
        try:
            return bytes((await self.loop.submit(item)).pixels)
        except RequestError as error:
            return error.code
        finally:
            self.loop.forget(item.request_id)


@asynccontextmanager
async def running(size: int = 4) -> AsyncIterator[Rig]:
    rig = Rig(size)
    rig.loop.describe(await rig.ranks.start())
    task = asyncio.create_task(rig.supervise())
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield rig
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def spec(name: str, prompt: str = "p kumquatfen", **fields: Any) -> RequestSpec:
    given = {"request_id": name, "prompt": prompt, "seed": 1, "height": 8, "width": 8, "steps": 4}
    return RequestSpec(**given | fields)


def poison(name: str, **fields: Any) -> RequestSpec:
    return spec(name, f"poison kumquatfen {name}", **fields)


async def test_a_poison_costs_two_losses_and_those_beside_it_get_their_images() -> None:
    async with running() as rig:
        innocents = [spec(name, seed=number) for number, name in enumerate("abc")]
        found = await asyncio.gather(*(rig.outcome(item) for item in (*innocents, poison("x"))))
        assert found == [*map(fake_pixels, innocents), ErrorCode.REQUEST_FAILED]
        assert rig.ranks.losses == [["a", "b", "c", "x"], ["x"]]
        assert rig.explained == [set(), {1, 2}]
        # Each innocent was made again by itself.
        assert [name for name, _ in rig.ranks.joined] == ["a", "b", "c", "x", "a", "b", "c", "x"]


async def test_ten_different_poisons_among_thirty_innocents_cost_two_losses_each_at_most_and_harm_nobody() -> None:
    async with running() as rig:
        items = [item for n in range(10) for item in (poison(f"x{n}"), *(spec(f"{n}{name}", seed=n) for name in "abc"))]
        found = await asyncio.gather(*(rig.outcome(item) for item in items))
        for item, outcome in zip(items, found, strict=True):
            assert outcome == (ErrorCode.REQUEST_FAILED if "poison" in item.prompt else fake_pixels(item))
        assert len(rig.ranks.losses) <= 20
        # Every loss is explained in the end.
        assert set().union(*rig.explained) == set(range(1, len(rig.ranks.losses) + 1))


async def test_what_lost_the_ranks_is_refused_for_ten_minutes_whatever_its_seed_and_other_requests_are_not() -> None:
    async with running() as rig:
        assert await rig.outcome(poison("x")) is ErrorCode.REQUEST_FAILED
        losses = len(rig.ranks.losses)
        again = poison("x", request_id="y", seed=99)
        with pytest.raises(RequestError, match="requests like this one are refused for 600 s more"):
            await rig.loop.submit(again)
        rig.clock.now_s += REFUSED_S - 1
        assert await rig.outcome(again) is ErrorCode.REQUEST_FAILED
        assert len(rig.ranks.losses) == losses
        assert await rig.outcome(spec("a")) == fake_pixels(spec("a"))
        rig.clock.now_s += 2
        assert await rig.outcome(again) is ErrorCode.REQUEST_FAILED
        assert len(rig.ranks.losses) == losses + 2


async def test_all_waiting_requests_with_the_content_of_a_poison_end_with_it() -> None:
    async with running(size=2) as rig:
        images = [poison("x", request_id=f"x-{number}", seed=number) for number in range(5)]
        found = await asyncio.gather(*(rig.outcome(item) for item in (*images, spec("a"))))
        assert found == [ErrorCode.REQUEST_FAILED] * 5 + [fake_pixels(spec("a"))]
        assert len(rig.ranks.losses) == 2
        assert (rig.loop.running, rig.loop.waiting) == (0, 0)


async def test_a_suspect_whose_client_leaves_is_not_made_again_and_the_others_are() -> None:
    async with running() as rig:
        leaving = rig.loop.submit(poison("x"))
        other = asyncio.create_task(rig.outcome(spec("a")))
        while not rig.ranks.losses:  # noqa: ASYNC110
            await asyncio.sleep(0)
        rig.loop.forget("x")
        assert await other == fake_pixels(spec("a"))
        assert leaving.cancelled()
        assert len(rig.ranks.losses) == 1


def test_a_content_is_all_that_a_request_asks_for_but_its_seed() -> None:
    frames = [b"one"]
    same = content_of(spec("a"), frames)
    assert same == content_of(spec("b", seed=9, whole=True), [memoryview(b"one")])
    others = [
        {"steps": 5},
        {"height": 16},
        {"guidance_scale": 2.0},
        {"loras": [LoRAUse(1, 1.0)]},
        {"task": Task.EDIT},
        {"prompt": "q kumquatfen"},
    ]
    contents = {content_of(spec("a", **fields), frames) for fields in others} | {content_of(spec("a"), [b"two"])}
    assert len(contents | {same}) == len(others) + 2


def test_more_poisons_in_a_row_than_the_limit_explain_nothing_until_an_image_is_made() -> None:
    poisons = Poisons()
    assert [poisons.condemn(bytes([n]), 0.0) for n in range(MOST_IN_A_ROW + 1)] == [True] * MOST_IN_A_ROW + [False]
    poisons.image_made()
    assert poisons.condemn(b"x", 0.0)


def test_as_many_contents_are_remembered_as_there_is_room_for_and_the_oldest_goes_first() -> None:
    poisons = Poisons()
    for number in range(REMEMBERED + 1):
        poisons.condemn(str(number).encode(), 0.0)
    assert poisons.refused_for_s(b"0", 1.0) == 0
    assert poisons.refused_for_s(b"1", 1.0) == REFUSED_S - 1
