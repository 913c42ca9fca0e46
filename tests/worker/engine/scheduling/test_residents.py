# SPDX-License-Identifier: Apache-2.0
"""Requests on the ranks are bounded by the bytes that they hold there. Those that ran out of memory beside others run once more alone."""

from typing import Any

import pytest

from diffusion_worker.engine.scheduling.request_class import Defaults, class_of
from diffusion_worker.engine.scheduling.residents import GUESSED_BYTES_PER_PIXEL, HELD_SHARE
from diffusion_worker.engine.scheduling.scheduler import StepScheduler
from diffusion_worker.messages import ErrorReport, Failed, Finished, Progress, RequestSpec, Tick, TickDone

MIB = 2**20


def spec(name: str, side: int = 512, steps: int = 4, **fields: Any) -> RequestSpec:
    given = {"request_id": name, "prompt": "p kumquatfen", "seed": 1, "height": side, "width": side, "steps": steps}
    return RequestSpec(**given | fields)


def scheduler_with(*specs: RequestSpec, size: int = 8, free_mib: int = 0) -> StepScheduler:
    scheduler = StepScheduler(size)
    scheduler.describe(Defaults(), free_mib * MIB)
    for item in specs:
        scheduler.add(item, 0.0)
    return scheduler


def report(
    scheduler: StepScheduler,
    tick: Tick,
    *,
    finished: str = "",
    out_of_memory: str = "",
    held_mib: int = 0,
    peak_mib: int = 0,
    calls: int = 1,
) -> list[str]:
    """Report a tick to the scheduler, and return the ids of the requests that run once more. Each letter of a string is an id."""
    done = TickDone(
        tick.number,
        [Finished(name, 0, (8, 8, 3)) for name in finished],
        [Failed(name, ErrorReport("InsufficientMemory", "no")) for name in out_of_memory],
        denoise_seconds=0.01,
        calls=1,
        peak_bytes=peak_mib * MIB,
        progress=[Progress(name, 1, 4, held_mib * MIB) for name in tick.advance or [] if held_mib],
    )
    return scheduler.observe(done, 0.0)


def step(scheduler: StepScheduler, **fields: Any) -> Tick:
    tick = scheduler.next_tick(0.0)
    assert tick is not None
    report(scheduler, tick, **fields)
    return tick


def joined(tick: Tick) -> list[str]:
    return [item.request_id for item in tick.join]


# Requests that hold memory


def test_paused_requests_with_large_step_caches_keep_others_from_joining_and_small_ones_do_not() -> None:
    most = {}
    for held_mib in (1, 200):
        scheduler = scheduler_with(spec("a", steps=20, accelerated=True), free_mib=1000)
        step(scheduler, held_mib=held_mib)
        for name in "bcdefgh":
            scheduler.add(spec(name, steps=20, accelerated=True), 0.0)
        step(scheduler, held_mib=held_mib)
        most[held_mib] = scheduler.running
    # Half of the memory holds two of those with a cache of 200 MiB.
    assert most == {1: 8, 200: 2}


def test_a_request_that_alone_holds_more_than_the_share_joins_where_nobody_is() -> None:
    scheduler = scheduler_with(spec("a"), spec("b"), free_mib=100)
    assert joined(step(scheduler, held_mib=90)) == ["a", "b"]
    step(scheduler, finished="ab")
    scheduler.add(spec("c"), 0.0)
    scheduler.add(spec("d"), 0.0)
    assert joined(step(scheduler)) == ["c"]


def test_before_any_report_a_request_counts_by_its_pixels() -> None:
    each_mib = class_of(spec("a"), Defaults()).load * GUESSED_BYTES_PER_PIXEL / MIB
    scheduler = scheduler_with(*(spec(name) for name in "abcdefgh"), free_mib=round(3.5 * each_mib / HELD_SHARE))
    assert joined(step(scheduler)) == ["a", "b", "c"]


def test_a_size_that_was_not_reported_yet_counts_in_proportion_to_the_nearest_and_as_a_quarter_of_it_at_least() -> None:
    scheduler = scheduler_with(spec("a"), free_mib=1000)
    step(scheduler, finished="a", held_mib=100)
    residents = scheduler._residents
    estimates = [residents.estimate(class_of(spec("b", side), Defaults())) for side in (64, 512, 1024)]
    assert estimates == [25 * MIB, 100 * MIB, 400 * MIB]


def test_bytes_of_requests_that_left_failed_or_were_lost_count_no_more() -> None:
    scheduler = scheduler_with(*(spec(name) for name in "abcd"), free_mib=10_000)
    step(scheduler, held_mib=100)
    step(scheduler, finished="a", held_mib=100)
    scheduler.remove("b")
    assert scheduler._residents.bytes == 200 * MIB
    scheduler.requeue_running()
    assert (scheduler._residents.bytes, scheduler.running) == (0, 0)
    step(scheduler)
    assert scheduler._residents.bytes == 200 * MIB
    scheduler.remove("c")
    scheduler.remove("d")
    assert scheduler._residents.bytes == 0


def test_what_paused_requests_hold_counts_for_no_step_of_others_and_makes_their_batches_smaller() -> None:
    scheduler = scheduler_with(spec("a", 1024, steps=20), free_mib=1000)
    step(scheduler, held_mib=300, peak_mib=500)
    scheduler.add(spec("b", 256, steps=20), 0.0)
    # The step of b had 300 MiB of a beside it.
    assert step(scheduler, held_mib=10, peak_mib=350).advance == ["b"]
    small = class_of(spec("b", 256), Defaults())
    assert scheduler.memory._alone.peaks[small.load] == 50 * MIB
    scheduler.memory.observe(small, 2, 150 * MIB)
    alone, beside = scheduler.memory.batch(small, 100), scheduler.memory.batch(small, 100, beside_bytes=300 * MIB)
    assert (alone, beside) == (10, 7)


# Out of memory


def test_a_request_out_of_memory_beside_others_runs_once_more_when_they_are_done_and_meanwhile_nobody_joins() -> None:
    scheduler = scheduler_with(spec("a"), spec("b"))
    tick = scheduler.next_tick(0.0)
    assert tick is not None
    assert report(scheduler, tick, out_of_memory="b") == ["b"]
    scheduler.add(spec("c"), 0.0)
    assert (joined(tick := step(scheduler)), tick.advance) == ([], ["a"])
    step(scheduler, finished="a")
    assert (joined(tick := step(scheduler)), tick.advance) == (["b"], ["b"])
    assert step(scheduler).advance == ["b"]
    # Alone it had room: its size is refused for nobody, and the others come.
    step(scheduler, finished="b")
    assert joined(step(scheduler)) == ["c"]
    assert scheduler.memory.most_load(0.0) == float("inf")


def test_only_a_failure_alone_counts_against_a_size_and_it_is_the_end_of_the_request() -> None:
    scheduler = scheduler_with(spec("a"), spec("b"))
    step(scheduler, finished="a", out_of_memory="b")
    assert scheduler.memory.most_load(0.0) == float("inf")
    tick = scheduler.next_tick(0.0)
    assert tick is not None and joined(tick) == ["b"]
    assert report(scheduler, tick, out_of_memory="b") == []
    assert scheduler.memory.most_load(0.0) < class_of(spec("b"), Defaults()).load
    assert (scheduler.running, scheduler.waiting, scheduler.next_tick(0.0)) == (0, 0, None)


@pytest.mark.parametrize(("side", "cleared"), [(1024, True), (512, True), (256, False)])
def test_a_failure_alone_is_forgotten_when_an_equal_or_larger_image_was_made(side: int, cleared: bool) -> None:
    scheduler = scheduler_with(spec("a"))
    step(scheduler, out_of_memory="a")
    assert scheduler.memory.most_load(0.0) < class_of(spec("a"), Defaults()).load
    scheduler.add(spec("b", side), 0.0)
    step(scheduler, finished="b")
    assert (scheduler.memory.most_load(0.0) == float("inf")) is cleared


def test_a_paused_request_of_another_size_is_company_too() -> None:
    scheduler = scheduler_with(spec("a", 1024, steps=20))
    step(scheduler)
    scheduler.add(spec("b", 256), 0.0)
    tick = scheduler.next_tick(0.0)
    assert tick is not None and tick.advance == ["b"]
    assert report(scheduler, tick, out_of_memory="b") == ["b"]
    assert step(scheduler).advance == ["a"]


def test_several_that_failed_together_run_one_after_the_other_in_the_order_they_came() -> None:
    scheduler = scheduler_with(*(spec(name) for name in "abc"))
    step(scheduler, out_of_memory="abc")
    order = []
    for _ in range(3):
        tick = step(scheduler)
        assert tick.advance is not None
        order += tick.advance
        step(scheduler, finished=tick.advance[0])
    assert order == ["a", "b", "c"]


def test_a_request_is_not_begun_alone_while_a_tick_is_on_its_way() -> None:
    scheduler = scheduler_with(spec("a"), spec("b"))
    first, second = scheduler.next_tick(0.0), scheduler.next_tick(0.0)
    assert first is not None and second is not None
    assert report(scheduler, first, finished="a", out_of_memory="b") == ["b"]
    assert scheduler.next_tick(0.0) is None
    report(scheduler, second)
    assert joined(step(scheduler)) == ["b"]


def test_a_request_that_is_cancelled_before_its_run_alone_keeps_nobody_waiting() -> None:
    scheduler = scheduler_with(spec("a"), spec("b"))
    step(scheduler, out_of_memory="b")
    scheduler.remove("b")
    scheduler.add(spec("c"), 0.0)
    assert joined(step(scheduler)) == ["c"]


def test_a_request_that_was_to_run_alone_does_so_after_a_loss_of_the_ranks_too() -> None:
    scheduler = scheduler_with(spec("a"), spec("b"))
    step(scheduler, out_of_memory="b")
    scheduler.requeue_running()
    assert joined(step(scheduler, finished="b")) == ["b"]
    assert joined(step(scheduler)) == ["a"]
