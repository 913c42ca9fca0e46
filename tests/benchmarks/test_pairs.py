# SPDX-License-Identifier: Apache-2.0
"""The judge of every benchmark that compares: the pairs it drops, when it stops, and how close it comes on a noisy machine."""

import itertools
import math
import random
import statistics
from collections.abc import Iterator

import pytest

from benchmarks.pairs import TINY_PLAN, Pairs, Plan, Taking, take_pairs, timed
from benchmarks.result import Measured

PLAN = Plan(wanted=5, least=5, at_most=12, noise=0.10, within_s=100.0)


class StoppedClock:
    """A clock that stands still: a test sets its seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def add(taking: Taking, before: float, ours: float, after: float) -> None:
    taking.add({"s": before}, {"s": ours}, {"s": after})


def noisy(seed: int, *, busy_share: float, slower: float) -> Iterator[float]:
    """Yield factors for run times without end: each is up to 3 % above 1, and runs of them are `slower` times as large.

    `busy_share` is the share of such runs.
    """
    rng = random.Random(seed)
    factor = 1.0
    while True:
        if rng.random() < 0.15:
            factor = slower if rng.random() < busy_share else 1.0
        yield factor * rng.uniform(1.0, 1.03)


@pytest.mark.parametrize("seed", range(20))
def test_the_ratio_is_found_on_a_machine_that_is_slower_by_half_of_the_time(seed: int) -> None:
    factors = noisy(seed, busy_share=0.5, slower=3.0)
    taken = take_pairs("work", lambda: {"s": next(factors)}, lambda: {"s": 0.8 * next(factors)}, plan=Plan(wanted=9, at_most=60))
    assert len(taken.used) == 9
    assert taken.ratio() == pytest.approx(0.8, rel=0.05)


def test_the_fastest_rounds_of_both_sides_would_not_find_it_where_noise_outlasts_one_of_them() -> None:
    """Slow the machine down threefold from the eleventh run on.

    The baselines then differ as much, yet the ratio is right: only the pair across the change is dropped.
    """
    factors = itertools.chain(itertools.repeat(1.0, 10), itertools.repeat(3.0))
    taken = take_pairs("work", lambda: {"s": next(factors)}, lambda: {"s": 0.8 * next(factors)}, plan=Plan(wanted=9))
    baseline = [pair.baseline("s") for pair in taken.used]
    assert max(baseline) / min(baseline) == pytest.approx(3.0)
    assert taken.ratio() == pytest.approx(0.8)
    assert [pair.number for pair in taken.dropped] == [3]


@pytest.mark.parametrize("ours", [0.001, 1.0, 1000.0])
def test_a_pair_is_kept_whatever_its_own_ratio_says(ours: float) -> None:
    taking = Taking("work", plan=PLAN)
    for _ in range(5):
        add(taking, 1.0, ours, 1.05)
    assert taking.done().ratio() == pytest.approx(ours / 1.025)


@pytest.mark.parametrize("ours", [0.001, 1.0, 1000.0])
def test_a_pair_is_dropped_where_its_baseline_moved_whatever_its_own_ratio_says(ours: float) -> None:
    taking = Taking("work", plan=PLAN)
    add(taking, 1.0, ours, 1.2)
    for _ in range(5):
        add(taking, 1.0, 2.0, 1.0)
    taken = taking.done()
    assert (len(taken.used), len(taken.dropped)) == (5, 1)
    assert taken.ratio() == 2.0


def test_dropped_pairs_are_taken_again_up_to_the_bound_and_then_the_spread_is_told() -> None:
    taking = Taking("the copy", plan=PLAN)
    for _ in range(4):
        add(taking, 1.0, 1.0, 1.0)
    while taking.wants_more:
        add(taking, 1.0, 1.0, 1.5)
    assert taking.number == PLAN.at_most
    with pytest.raises(RuntimeError, match=r"the copy: of 12 pairs 4 are left, expected 5: .* by 0% to 50%, 50% at the median"):
        taking.done()


def test_enough_pairs_end_it_at_once() -> None:
    taking = Taking("work", plan=PLAN)
    for _ in range(5):
        assert taking.wants_more
        add(taking, 1.0, 1.0, 1.0)
    assert not taking.wants_more


def test_past_its_time_it_ends_with_the_least_and_goes_on_for_as_long_again_without_them() -> None:
    clock = StoppedClock()
    taking = Taking("work", plan=Plan(wanted=9, least=5, within_s=10.0), clock=clock)
    for _ in range(4):
        add(taking, 1.0, 1.0, 1.0)
    clock.now_s = 10.0
    assert taking.wants_more
    add(taking, 1.0, 1.0, 1.0)
    assert not taking.wants_more


def test_it_gives_up_after_twice_its_time() -> None:
    clock = StoppedClock()
    taking = Taking("work", plan=PLAN, clock=clock)
    add(taking, 1.0, 1.0, 1.0)
    clock.now_s = 2 * PLAN.within_s
    assert not taking.wants_more
    with pytest.raises(RuntimeError, match="of 1 pairs 1 are left, expected 5"):
        taking.done()


def test_no_pair_in_time_is_an_error_of_its_own() -> None:
    with pytest.raises(RuntimeError, match=r"of 0 pairs 0 are left, expected 5: .* never taken"):
        Taking("work", plan=PLAN).done()


def test_a_baseline_of_no_time_is_apart_from_any_other() -> None:
    taking = Taking("work", plan=PLAN)
    add(taking, 0.0, 1.0, 1.0)
    with pytest.raises(RuntimeError, match="inf"):
        taking.done()


def test_other_figures_of_the_same_pairs_are_ratios_too() -> None:
    taking = Taking("work", by="cpu_s", plan=TINY_PLAN)
    taking.add({"cpu_s": 1.0, "s": 4.0}, {"cpu_s": 2.0, "s": 4.0, "first_s": 10.0}, {"cpu_s": 1.0, "s": 6.0})
    taken = taking.done()
    assert (taken.ratio(), taken.ratio("s"), taken.ratio("first_s", "s")) == (2.0, 0.8, 2.0)
    assert (taken.ours("s"), taken.baseline("s")) == (4.0, 5.0)


def test_the_spread_is_that_of_the_ratios_and_the_samples_say_what_counted() -> None:
    taking = Taking("work", plan=Plan(wanted=3, least=1, at_most=4))
    for ours, after in ((1.0, 1.0), (2.0, 1.0), (9.0, 2.0), (1.5, 1.0)):
        add(taking, 1.0, ours, after)
    taken = taking.done()
    assert taken.spread() == pytest.approx((2.0 - 1.0) / 1.5)
    assert [(sample["pair"], sample["used"], sample["ours_s"]) for sample in taken.samples()] == [
        (0, 1, 1.0),
        (1, 1, 2.0),
        (3, 1, 1.5),
        (2, 0, 9.0),
    ]


def test_a_result_says_how_many_pairs_were_used_and_dropped_over_all_comparisons() -> None:
    def of(used: int, dropped: int) -> Pairs:
        taking = Taking("work", plan=Plan(wanted=used, least=used))
        for number in range(used + dropped):
            add(taking, 1.0, 1.0 + 0.1 * number, 2.0 if number < dropped else 1.0)
        return taking.done()

    pairs = [of(5, 1), of(7, 0)]
    rounds = Measured({"a": 1.0}, {"a": ">= 1"}, [], pairs).rounds
    assert rounds == {"used": 12, "dropped": 1, "spread": round(max(each.spread() for each in pairs), 3)}
    assert Measured({"a": 1.0}, {"a": ">= 1"}, []).rounds == {}


def test_a_target_without_a_figure_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="expected a figure for each target, found none for b"):
        Measured({"a": 1.0}, {"a": ">= 1", "b": ">= 1"}, [])


def test_work_is_timed_by_three_clocks() -> None:
    times = timed(lambda: statistics.fmean(range(1000)))
    assert times.keys() == {"s", "cpu_s", "thread_s"}
    assert all(0 <= seconds < math.inf for seconds in times.values())
