# SPDX-License-Identifier: Apache-2.0
"""The queue in fake time: joins, requeues, backoff, and that a key never runs twice at once."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from diffusion_operator.errors import OperatorError
from diffusion_operator.reconcile.keyed_queue import Key, KeyedQueue, Result

pytestmark = pytest.mark.looptime
ONE, TWO = Key("K", "n", "one"), Key("K", "n", "two")


class Recorder:
    """A reconcile that records its runs and follows its script."""

    def __init__(self) -> None:
        self.times: dict[Key, list[float]] = {}
        self.result: Callable[[Key], Awaitable[Result]] = self._steady
        self.running = 0
        self.most_running = 0

    async def __call__(self, key: Key) -> Result:
        self.times.setdefault(key, []).append(round(asyncio.get_running_loop().time(), 2))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self.result(key)
        finally:
            self.running -= 1

    async def _steady(self, key: Key) -> Result:
        return Result()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
async def queue(recorder: Recorder) -> AsyncIterator[KeyedQueue]:
    made = KeyedQueue(recorder, resync_s=100, parallel=2, random=lambda: 0.5)
    yield made
    await made.close()


async def test_wakes_in_a_burst_are_one_pass(queue: KeyedQueue, recorder: Recorder) -> None:
    for _ in range(10):
        queue.wake(ONE)
        await asyncio.sleep(0.001)
    await asyncio.sleep(1)
    assert len(recorder.times[ONE]) == 1


async def test_a_wake_during_a_pass_leads_to_another(queue: KeyedQueue, recorder: Recorder) -> None:
    async def slow(key: Key) -> Result:
        await asyncio.sleep(1)
        return Result()

    recorder.result = slow
    queue.wake(ONE)
    await asyncio.sleep(0.5)
    queue.wake(ONE)
    await asyncio.sleep(5)
    assert len(recorder.times[ONE]) == 2
    assert recorder.most_running == 1


async def test_a_result_asks_for_the_next_pass(queue: KeyedQueue, recorder: Recorder) -> None:
    async def often(key: Key) -> Result:
        return Result(requeue_after_s=2)

    recorder.result = often
    queue.wake(ONE)
    await asyncio.sleep(7)
    assert recorder.times[ONE] == [0.05, 2.05, 4.05, 6.05]


async def test_without_one_the_resync_comes(queue: KeyedQueue, recorder: Recorder) -> None:
    queue.wake(ONE)
    await asyncio.sleep(101)
    assert recorder.times[ONE] == [0.05, 100.05]


async def test_failures_back_off_and_a_success_ends_it(queue: KeyedQueue, recorder: Recorder) -> None:
    left = [OperatorError("first"), ValueError("second"), OperatorError("third")]

    async def failing(key: Key) -> Result:
        if left:
            raise left.pop(0)
        return Result()

    recorder.result = failing
    queue.wake(ONE)
    await asyncio.sleep(50)
    assert recorder.times[ONE] == [0.05, 1.05, 3.05, 7.05]


async def test_a_part_that_fails_delays_no_pass_that_is_due_sooner(
    queue: KeyedQueue, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    async def failing(key: Key) -> Result:
        return Result(requeue_after_s=3, failure=OperatorError("a webhook is away"))

    recorder.result = failing
    queue.wake(ONE)
    await asyncio.sleep(13)
    assert recorder.times[ONE] == [0.05, 1.05, 3.05, 6.05, 9.05, 12.05], "with backoff at first, and no later than it asks for"
    assert "reconcile failed object=K n/one error=OperatorError: a webhook is away" in caplog.text


async def test_a_part_that_fails_is_tried_with_backoff_where_no_pass_is_due(queue: KeyedQueue, recorder: Recorder) -> None:
    async def failing(key: Key) -> Result:
        return Result(failure=ValueError("no"))

    recorder.result = failing
    queue.wake(ONE)
    await asyncio.sleep(8)
    assert recorder.times[ONE] == [0.05, 1.05, 3.05, 7.05]


async def test_a_wake_cuts_a_backoff_short(queue: KeyedQueue, recorder: Recorder) -> None:
    async def failing(key: Key) -> Result:
        raise OperatorError("no")

    recorder.result = failing
    queue.wake(ONE)
    await asyncio.sleep(5)
    before = len(recorder.times[ONE])
    queue.wake(ONE)
    await asyncio.sleep(0.1)
    assert len(recorder.times[ONE]) == before + 1


async def test_backoff_is_capped(queue: KeyedQueue, recorder: Recorder) -> None:
    async def failing(key: Key) -> Result:
        raise OperatorError("no")

    recorder.result = failing
    queue.wake(ONE)
    await asyncio.sleep(3000)
    late = recorder.times[ONE]
    assert late[-1] - late[-2] == pytest.approx(300)


async def test_a_key_that_is_gone_leaves_no_task(queue: KeyedQueue, recorder: Recorder) -> None:
    async def gone(key: Key) -> Result:
        return Result(gone=True)

    recorder.result = gone
    queue.wake(ONE)
    await asyncio.sleep(1)
    assert len(queue) == 0
    queue.wake(ONE)
    await asyncio.sleep(1)
    assert len(recorder.times[ONE]) == 2


async def test_keys_run_beside_each_other_up_to_the_limit(queue: KeyedQueue, recorder: Recorder) -> None:
    async def slow(key: Key) -> Result:
        await asyncio.sleep(1)
        return Result()

    recorder.result = slow
    for key in (ONE, TWO, Key("K", "n", "three")):
        queue.wake(key, first=True)
    await asyncio.sleep(5)
    assert len(recorder.times) == 3
    assert recorder.most_running == 2


async def test_half_of_the_places_are_kept_for_the_first_lane(queue: KeyedQueue, recorder: Recorder) -> None:
    async def slow(key: Key) -> Result:
        await asyncio.sleep(1)
        return Result()

    recorder.result = slow
    queue.wake(ONE)
    queue.wake(TWO)
    await asyncio.sleep(0.1)
    assert (recorder.running, queue.waiting) == (1, 1)
    queue.wake(Key("K", "n", "declared"), first=True)
    await asyncio.sleep(0.1)
    assert recorder.running == 2
    await asyncio.sleep(3)
    assert len(recorder.times) == 3


async def test_closing_ends_a_pass_that_hangs(queue: KeyedQueue, recorder: Recorder) -> None:
    async def forever(key: Key) -> Result:
        await asyncio.Event().wait()
        return Result()

    recorder.result = forever
    queue.wake(ONE)
    await asyncio.sleep(1)
    await queue.close()
    assert recorder.running == 0


async def test_what_a_user_declared_goes_before_what_waits_already(recorder: Recorder) -> None:
    order, queue = await _busy_queue(recorder)
    for number in range(4):
        queue.wake(Key("K", "n", f"later{number}"))
    await asyncio.sleep(0.1)
    queue.wake(Key("K", "n", "declared"), first=True)
    await asyncio.sleep(10)
    assert order[:2] == ["running", "declared"]
    await queue.close()


async def test_a_key_that_waits_gets_ahead_when_its_spec_changes(recorder: Recorder) -> None:
    order, queue = await _busy_queue(recorder)
    for number in range(4):
        queue.wake(Key("K", "n", f"later{number}"))
    await asyncio.sleep(0.1)
    queue.wake(Key("K", "n", "later3"), first=True)
    await asyncio.sleep(0.1)
    assert queue.waiting == 4
    await asyncio.sleep(10)
    assert order == ["running", "later3", "later0", "later1", "later2"]
    await queue.close()


async def test_the_other_lane_has_every_fourth_turn(recorder: Recorder) -> None:
    order, queue = await _busy_queue(recorder)
    for number in range(3):
        queue.wake(Key("K", "n", f"later{number}"))
    for number in range(8):
        queue.wake(Key("K", "n", f"first{number}"), first=True)
    await asyncio.sleep(30)
    lanes = "".join(name[0] for name in order[1:])
    assert lanes == "ffflffflffl"
    await queue.close()


async def test_a_wake_that_goes_first_counts_for_one_turn(recorder: Recorder) -> None:
    order, queue = await _busy_queue(recorder)
    queue.wake(ONE, first=True)
    await asyncio.sleep(3)
    assert order == ["running", "one"]
    queue.wake(Key("K", "n", "running"))
    await asyncio.sleep(0.1)
    queue.wake(TWO)
    await asyncio.sleep(0.1)
    queue.wake(ONE)
    await asyncio.sleep(5)
    assert order == ["running", "one", "running", "two", "one"]
    await queue.close()


async def _busy_queue(recorder: Recorder) -> tuple[list[str], KeyedQueue]:
    """Return a queue with one slot, whose first pass of a second is under way, and the list of passes."""
    order: list[str] = []

    async def slow(key: Key) -> Result:
        order.append(key.name)
        await asyncio.sleep(1)
        return Result()

    recorder.result = slow
    queue = KeyedQueue(recorder, resync_s=1000, parallel=1, random=lambda: 0.5)
    queue.wake(Key("K", "n", "running"))
    await asyncio.sleep(0.1)
    return order, queue
