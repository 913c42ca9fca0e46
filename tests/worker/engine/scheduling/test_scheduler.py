# SPDX-License-Identifier: Apache-2.0
"""The scheduler's choice of the next step, on a virtual clock: order, classes, sizes, the batching window, and measured costs."""

from typing import Any

import pytest

from benchmarks.replay import Arrival, Outcome, VirtualDevice, percentile, replay
from benchmarks.stand_ins.fifo import FifoScheduler
from diffusion_worker.engine.scheduling.request_class import Defaults
from diffusion_worker.engine.scheduling.residents import RESIDENT_BATCHES
from diffusion_worker.engine.scheduling.scheduler import PATIENCE, SHARE, StepScheduler
from diffusion_worker.messages import ErrorReport, Failed, Finished, RequestSpec, Tick, TickDone

SMALL_S, LARGE_S = 0.03, 0.12


def spec(name: str, side: int = 512, steps: int = 4, **fields: Any) -> RequestSpec:
    return RequestSpec(**{"request_id": name, "prompt": "p kumquatfen", "seed": 1, "height": side, "width": side, "steps": steps} | fields)


def cost(specs: list[RequestSpec]) -> float:
    """Return the seconds of a step: bound by launches for up to four images of 512 pixels, by arithmetic at 1024."""
    return max(SMALL_S, SMALL_S / 4 * len(specs)) if specs[0].height == 512 else LARGE_S * len(specs)


def done(tick: Tick, *, finished: tuple[str, ...] = (), failed: dict[str, str] | None = None, **fields: Any) -> TickDone:
    """Build what the ranks answer to `tick`: images for `finished`, errors by code for `failed`. The default denoising time is 10 ms."""
    return TickDone(
        tick.number,
        [Finished(name, 0, (8, 8, 3)) for name in finished],
        [Failed(name, ErrorReport(code, "no")) for name, code in (failed or {}).items()],
        **{"denoise_seconds": 0.01} | fields,
    )


def step(scheduler: StepScheduler, now_s: float = 0.0, **report: Any) -> Tick:
    """Take the next tick, which must exist, report it as done and return it."""
    tick = scheduler.next_tick(now_s)
    assert tick is not None
    scheduler.observe(done(tick, **report), now_s)
    return tick


def scheduler_with(*specs: RequestSpec, size: int = 8, **settings: Any) -> StepScheduler:
    scheduler = StepScheduler(size, **settings)
    for item in specs:
        scheduler.add(item, 0.0)
    return scheduler


def run(*arrivals: tuple[float, RequestSpec], size: int = 8, **settings: Any) -> Outcome:
    return replay(StepScheduler(size, **settings), [Arrival(at_s, item) for at_s, item in arrivals], VirtualDevice(cost))


def test_requests_of_a_class_join_in_the_order_they_came_as_far_as_the_batch_has_room() -> None:
    scheduler = scheduler_with(*(spec(name) for name in "abc"), size=2)
    assert [item.request_id for item in step(scheduler).join] == ["a", "b"]
    assert step(scheduler, finished=("a",)).join == []
    assert [item.request_id for item in step(scheduler).join] == ["c"]
    assert (scheduler.running, scheduler.waiting) == (2, 0)


def test_a_compatible_request_joins_in_the_middle_of_others_whatever_its_steps_seed_and_guidance() -> None:
    scheduler = scheduler_with(spec("a", steps=20))
    for _ in range(3):
        step(scheduler)
    scheduler.add(spec("b", steps=4, seed=9, guidance_scale=3.0), 1.0)
    tick = step(scheduler, 1.0)
    assert ([item.request_id for item in tick.join], tick.advance) == (["b"], ["a", "b"])


@pytest.mark.parametrize("other", [{"height": 256}, {"frames": 9}, {"guidance_scale": 1.0}, {"exact": True}])
def test_requests_whose_calls_cannot_merge_never_share_a_step(other: dict[str, Any]) -> None:
    outcome = run((0.0, spec("a")), (0.0, spec("b", **other)))
    assert all(len(tick.advance or ()) == 1 for tick in outcome.ticks)
    assert set(outcome.latency_s) == {"a", "b"}


def test_a_request_that_says_nothing_of_its_size_is_of_the_class_of_the_default() -> None:
    scheduler = StepScheduler(8)
    scheduler.describe(Defaults(height=512, width=512, steps=4), free_bytes=0)
    scheduler.add(spec("a"), 0.0)
    scheduler.add(spec("b", height=None, width=None, steps=None), 0.0)
    assert step(scheduler).advance == ["a", "b"]


def test_exact_requests_run_one_after_another() -> None:
    outcome = run(*((0.0, spec(name, exact=True)) for name in "abc"))
    assert outcome.largest_step == 1
    assert sorted(outcome.latency_s, key=lambda name: outcome.latency_s[name]) == ["a", "b", "c"]


def test_a_small_request_behind_a_large_one_does_not_wait_for_all_of_it() -> None:
    outcome = run((0.0, spec("large", side=1024, steps=50)), (1.0, spec("small")))
    # Two steps of the large request are under way already, and two more may be taken before its cost is known.
    assert outcome.latency_s["small"] < 4 * SMALL_S + 4 * LARGE_S
    assert outcome.latency_s["large"] > 50 * LARGE_S


def test_large_requests_get_their_share_while_small_ones_never_end() -> None:
    arrivals = [(0.0, spec("large", side=1024, steps=20))] + [(0.025 * n, spec(f"s{n}")) for n in range(4000)]
    outcome = run(*arrivals, size=4)  # the small requests alone exceed the device
    alone_s = 20 * LARGE_S
    # The large request waits for its patience and then has its share; estimates of cost have an error.
    assert outcome.latency_s["large"] < PATIENCE * alone_s + alone_s / SHARE * 2


def test_requests_of_many_classes_with_the_same_cost_run_one_after_another_and_not_all_at_once() -> None:
    sides = [1024 + 8 * n for n in range(6)]
    outcome = run(*((0.0, spec(str(side), side=side, steps=20)) for side in sides))
    ends = sorted(outcome.latency_s.values())
    alone_s = 20 * LARGE_S
    # If the classes shared the device, all would finish near the end. A probe of each class costs a step or two.
    assert ends[0] < alone_s * 1.5
    assert sum(ends) / len(ends) < alone_s * (len(sides) + 1) / 2 * 1.2


def test_where_batching_does_not_pay_requests_of_a_class_run_one_after_another() -> None:
    learning = [(0.0, spec(f"first {n}", side=1024, steps=20)) for n in range(6)]
    outcome = run(*learning, *((100.0, spec(str(n), side=1024, steps=20)) for n in range(6)))
    ends = sorted(outcome.latency_s[str(n)] for n in range(6))
    assert sum(ends) / len(ends) == pytest.approx(20 * LARGE_S * 3.5, rel=0.02)
    assert outcome.busy_s == pytest.approx(12 * 20 * LARGE_S, rel=0.02)


def test_where_batching_pays_the_batch_is_full() -> None:
    outcome = run(*((0.0, spec(str(n), steps=20)) for n in range(64)))
    assert outcome.busy_s < 64 * 20 * SMALL_S / 4 * 1.1


def test_the_window_holds_a_first_step_until_company_comes_or_the_time_is_over() -> None:
    alone = run((0.0, spec("a")), window_s=0.5)
    assert alone.latency_s["a"] == pytest.approx(0.5 + 4 * SMALL_S, abs=0.02)
    together = run((0.0, spec("a")), (0.3, spec("b")), window_s=0.5)
    assert together.ticks[0].advance == ["a", "b"]
    full = run((0.0, spec("a")), (0.3, spec("b")), window_s=0.5, size=2)
    assert full.latency_s["a"] == pytest.approx(0.3 + 4 * SMALL_S, abs=0.02)


def test_the_window_never_delays_what_runs_nor_what_joins_it() -> None:
    outcome = run((0.0, spec("a", steps=40)), (0.6, spec("b")), (0.6, spec("other", side=256)), window_s=0.5)
    assert outcome.latency_s["a"] < 0.5 + 44 * SMALL_S + 0.7
    assert outcome.latency_s["b"] < 0.4
    assert outcome.latency_s["other"] >= 0.5


def test_a_report_of_a_request_that_was_removed_does_not_end_a_new_one_of_its_name() -> None:
    scheduler = scheduler_with(spec("a"))
    tick = scheduler.next_tick(0.0)
    assert tick is not None
    scheduler.remove("a")
    scheduler.add(spec("a"), 1.0)
    scheduler.observe(done(tick, finished=("a",)), 1.0)
    assert scheduler.waiting == 1


def test_an_image_that_is_only_decoded_takes_no_place_from_one_that_is_denoised() -> None:
    scheduler = scheduler_with(spec("first"), spec("a"), spec("b"), size=1)
    for number in range(5):
        step(scheduler, finished=("first",) if number == 4 else ())
    for _ in range(4):
        step(scheduler)
    assert step(scheduler).advance == ["a", "b"]


def test_a_pipeline_that_takes_more_ticks_than_steps_is_carried_to_its_end() -> None:
    class TwoCallsAStep(VirtualDevice):
        def execute(self, tick: Tick) -> TickDone:
            doubled = [RequestSpec(**{name: getattr(item, name) for name in item.__struct_fields__} | {"steps": 7}) for item in tick.join]
            return super().execute(Tick(tick.number, doubled, tick.leave, tick.advance))

    arrivals = [Arrival(0.0, spec(str(n))) for n in range(6)]
    outcome = replay(StepScheduler(2), arrivals, TwoCallsAStep(cost))
    assert len(outcome.latency_s) == 6
    assert outcome.largest_step <= 2 + 1  # once, a request counted as finished still runs


def test_a_batch_that_does_not_fit_in_memory_gets_smaller_and_nobody_is_lost() -> None:
    device = VirtualDevice(cost, fits=lambda specs: len(specs) <= 2)
    outcome = replay(StepScheduler(8), [Arrival(0.0, spec(str(n), steps=20)) for n in range(16)], device)
    assert len(outcome.latency_s) == 16
    splits = [tick for tick in outcome.ticks if len(tick.advance or ()) > 2 + 2]
    assert len(splits) <= 8


def test_one_bad_request_that_breaks_a_merged_call_does_not_shrink_the_batch() -> None:
    scheduler = scheduler_with(*(spec(str(n), steps=20) for n in range(8)))
    step(scheduler, split=True, failed={"3": "EngineFailed"})
    scheduler.add(spec("9"), 0.0)
    assert len(step(scheduler).advance or ()) == 8


def test_a_request_out_of_memory_alone_teaches_what_does_not_fit() -> None:
    scheduler = scheduler_with(spec("a", side=1024))
    step(scheduler, split=True, failed={"a": "InsufficientMemory"})
    assert scheduler.memory.most_load(0.0) < 2 * 1024 * 1024


def test_requests_on_the_ranks_are_bounded_however_many_classes_there_are() -> None:
    arrivals = [Arrival(0.01 * n, spec(str(n), side=2048 - 8 * n, steps=30)) for n in range(60)]
    scheduler = StepScheduler(2)
    most = 0

    class Watched(VirtualDevice):
        def execute(self, tick: Tick) -> TickDone:
            nonlocal most
            most = max(most, scheduler.running)
            return super().execute(tick)

    outcome = replay(scheduler, arrivals, Watched(lambda specs: specs[0].height * 1e-5))  # type: ignore[operator]
    assert len(outcome.latency_s) == 60
    assert most <= RESIDENT_BATCHES * 2


def test_what_ran_when_the_ranks_were_lost_runs_again_first_and_in_its_old_order() -> None:
    scheduler = scheduler_with(*(spec(name) for name in "abcd"), size=2)
    step(scheduler)
    scheduler.next_tick(0.0)
    scheduler.remove("b")
    assert scheduler.requeue_running() == ["a"]
    assert (scheduler.in_flight, scheduler.running, scheduler.waiting) == (0, 0, 3)
    tick = step(scheduler)
    assert ([item.request_id for item in tick.join], tick.leave, tick.advance) == (["a", "c"], [], ["a", "c"])


def test_mixed_sizes_at_a_load_of_four_fifths_answer_small_requests_ten_times_sooner_than_first_come_first_served() -> None:
    arrivals = mixed_arrivals(1200, load=0.8)
    ours = replay(StepScheduler(8), arrivals, VirtualDevice(cost))
    fifo = replay(FifoScheduler(), arrivals, VirtualDevice(cost))
    gains = {kind: p99(fifo, kind) / p99(ours, kind) for kind in ("small", "large")}
    assert len(ours.latency_s) == len(fifo.latency_s) == 1200
    assert gains["small"] >= 10
    assert gains["large"] >= 0.8
    assert ours.busy_s <= fifo.busy_s


def mixed_arrivals(count: int, *, load: float) -> list[Arrival]:
    """Return arrivals at random times from a fixed seed: nine small requests of 4 steps to each large one of 50."""
    import random

    rng = random.Random(4)
    mean_s = (0.9 * 4 * SMALL_S + 0.1 * 50 * LARGE_S) / load
    now_s, arrivals = 0.0, []
    for number in range(count):
        now_s += rng.expovariate(1 / mean_s)
        large = rng.random() < 0.1
        item = spec(f"large-{number}", side=1024, steps=50) if large else spec(f"small-{number}")
        arrivals.append(Arrival(now_s, item))
    return arrivals


def p99(outcome: Outcome, kind: str) -> float:
    return percentile([seconds for name, seconds in outcome.latency_s.items() if name.startswith(kind)], 0.99)
