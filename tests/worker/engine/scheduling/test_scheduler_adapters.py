# SPDX-License-Identifier: Apache-2.0
"""Requests that use adapters: at most as many adapters as slots are in use, and no request waits for ever for a slot."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.replay import Arrival, Outcome, VirtualDevice, replay
from diffusion_worker.engine.scheduling.scheduler import LOOKAHEAD, PATIENCE, StepScheduler
from diffusion_worker.messages import Finished, LoRAUse, RequestSpec, Tick, TickDone

STEP_S = 0.01
STEPS = 4


def spec(name: str, *adapters: int, side: int = 64, steps: int = STEPS) -> RequestSpec:
    loras = [LoRAUse(adapter, 1.0) for adapter in adapters]
    return RequestSpec(
        request_id=name, prompt="p kumquatfen", seed=1, height=side, width=side, steps=steps, guidance_scale=5.0, loras=loras
    )


def step(scheduler: StepScheduler, now_s: float = 0.0, finished: tuple[str, ...] = ()) -> Tick:
    """Take the next tick, which must exist, report it as done and return it."""
    tick = scheduler.next_tick(now_s)
    assert tick is not None
    done = TickDone(tick.number, [Finished(name, 0, (8, 8, 3)) for name in finished], denoise_seconds=STEP_S)
    scheduler.observe(done, now_s)
    return tick


def joined(scheduler: StepScheduler, now_s: float = 0.0, finished: tuple[str, ...] = ()) -> list[str]:
    return [item.request_id for item in step(scheduler, now_s, finished).join]


def scheduler_with(*specs: RequestSpec, slots: int = 2, size: int = 8) -> StepScheduler:
    scheduler = StepScheduler(size, slots=slots)
    for item in specs:
        scheduler.add(item, 0.0)
    return scheduler


def run(arrivals: list[tuple[float, RequestSpec]], *, slots: int, size: int = 8) -> Outcome:
    device = VirtualDevice(lambda specs: STEP_S)
    return replay(StepScheduler(size, slots=slots), [Arrival(at_s, item) for at_s, item in arrivals], device)


def test_a_request_without_a_slot_is_passed_by_those_that_need_none_more() -> None:
    scheduler = scheduler_with(spec("a", 1), spec("b", 2), spec("c", 3), spec("d", 2), spec("e"), spec("f", 1, 2))
    assert joined(scheduler) == ["a", "b", "d", "e", "f"]
    assert (scheduler.running, scheduler.waiting, scheduler.active_adapters) == (5, 1, 2)


def test_a_slot_is_free_when_the_last_request_that_used_it_is_done() -> None:
    scheduler = scheduler_with(spec("a", 1), spec("b", 1), spec("c", 2), slots=1)
    assert joined(scheduler, finished=("a",)) == ["a", "b"]
    assert joined(scheduler, finished=("b",)) == []
    assert joined(scheduler) == ["c"]


def test_a_request_that_is_given_up_frees_its_slots_in_the_tick_in_which_it_leaves() -> None:
    scheduler = scheduler_with(spec("a", 1), spec("b", 2), slots=1)
    step(scheduler)
    scheduler.remove("a")
    tick = step(scheduler)
    assert (tick.leave, [item.request_id for item in tick.join]) == (["a"], ["b"])


def test_a_request_waits_until_all_of_its_adapters_have_slots() -> None:
    scheduler = scheduler_with(spec("a", 1), spec("b", 2, 3), spec("c", 3))
    assert joined(scheduler, finished=("a",)) == ["a", "c"]
    assert joined(scheduler) == ["b"]


def test_requests_of_other_classes_count_for_the_slots_while_they_are_paused() -> None:
    scheduler = scheduler_with(spec("a", 1, side=128, steps=40), slots=1)
    step(scheduler)
    scheduler.add(spec("b", 2), 0.0)
    scheduler.add(spec("c"), 0.0)
    assert joined(scheduler) == ["c"]


def test_after_a_loss_of_the_ranks_no_slot_is_taken() -> None:
    scheduler = scheduler_with(spec("a", 1), spec("b", 2), slots=1)
    step(scheduler)
    assert scheduler.requeue_running() == ["a"]
    assert scheduler.active_adapters == 0
    assert joined(scheduler) == ["a"]
    assert scheduler.active_adapters == 1


@pytest.mark.parametrize("slots", [1, 2])
def test_a_stream_of_requests_with_adapters_in_slots_cannot_keep_another_out(slots: int) -> None:
    """Send a new request for each adapter in a slot with every step, and one for another adapter, which must not wait too long."""
    stream = [(STEP_S * n, spec(f"{adapter}-{n}", adapter)) for n in range(200) for adapter in range(1, slots + 1)]
    outcome = run([*stream, (0.05, spec("mine", 9))], slots=slots, size=64)
    alone_s = (STEPS + 1) * STEP_S
    # The time is the request's patience, the rest of the running ones, and its own run. TICKS_AHEAD steps are under way each time.
    assert outcome.latency_s["mine"] < PATIENCE * alone_s + 2 * alone_s + 6 * STEP_S
    assert max(outcome.latency_s.values()) < 0.5


def test_while_one_waits_too_long_adapters_that_leave_it_room_are_joined_on() -> None:
    """Let a request wait for one of two slots: requests for the adapter in one slot stop, and those for the other go on."""
    stream = [(STEP_S * n, spec(f"{adapter}-{n}", adapter)) for n in range(60) for adapter in (1, 2)]
    outcome = run([*stream, (0.05, spec("mine", 9))], slots=2, size=64)
    begun = next(n for n, tick in enumerate(outcome.ticks) if any(item.request_id == "mine" for item in tick.join))
    reserved = outcome.ticks[begun - 4 : begun]
    assert {use.lora_int_id for tick in reserved for item in tick.join for use in item.loras} == {1}


def test_a_removed_request_reserves_nothing() -> None:
    scheduler = scheduler_with(spec("a", 1), slots=1)
    step(scheduler)
    scheduler.add(spec("b", 2), 0.0)
    step(scheduler, 0.0)
    scheduler.add(spec("c", 1), 50.0)
    assert joined(scheduler, 100.0) == []  # b has waited too long
    scheduler.remove("b")
    assert joined(scheduler, 100.0) == ["c"]


def test_a_request_behind_many_that_have_no_slot_is_found_when_they_are_fewer() -> None:
    scheduler = scheduler_with(spec("a", 1), *(spec(f"b{n}", 2) for n in range(LOOKAHEAD)), spec("c", 1), slots=1)
    assert joined(scheduler) == ["a"]
    scheduler.remove("b0")
    assert joined(scheduler) == ["c"]


adapters_of_one = st.lists(st.integers(1, 5), max_size=2, unique=True)
actions = st.lists(
    st.one_of(
        st.tuples(adapters_of_one, st.sampled_from([64, 128]), st.integers(1, 6)), st.sampled_from(["send", "report", "abort", "lose"])
    ),
    max_size=100,
)


class Ranks:
    """A model of the ranks that takes the scheduler's ticks, and fails if a tick's joins put more than `slots` adapters in use."""

    def __init__(self, slots: int, size: int) -> None:
        self.scheduler = StepScheduler(size, slots=slots)
        self.slots = slots
        self.here: dict[str, tuple[RequestSpec, int]] = {}
        self.alive: set[str] = set()
        self.sent: list[TickDone] = []
        self.now_s = 0.0

    def act(self, action: Any, number: int) -> None:
        self.now_s += STEP_S
        if isinstance(action, tuple):
            adapters, side, steps = action
            self.alive.add(str(number))
            self.scheduler.add(spec(str(number), *adapters, side=side, steps=steps), self.now_s)
        elif action == "send" and len(self.sent) < 2 and (tick := self.scheduler.next_tick(self.now_s)) is not None:
            self.sent.append(self.executed(tick))
        elif action == "report" and self.sent:
            done = self.sent.pop(0)
            self.scheduler.observe(done, self.now_s)
            self.alive -= {item.request_id for item in done.finished}
        elif action == "abort" and self.alive:
            name = sorted(self.alive)[number % len(self.alive)]
            self.alive.remove(name)
            self.scheduler.remove(name)
        elif action == "lose":
            self.here.clear()
            self.sent.clear()
            self.scheduler.requeue_running()

    def executed(self, tick: Tick) -> TickDone:
        for name in tick.leave:
            self.here.pop(name, None)
        for item in tick.join:
            self.here[item.request_id] = (item, (item.steps or 0) + 1)
        active = {use.lora_int_id for item, _ in self.here.values() for use in item.loras}
        assert len(active) <= self.slots, f"{active} in {self.slots} slots"
        finished = []
        for name in tick.advance or []:
            if name in self.here:
                item, left = self.here[name]
                self.here[name] = (item, left - 1)
                if left == 1:
                    finished.append(name)
                    del self.here[name]
        return TickDone(tick.number, [Finished(name, 0, (8, 8, 3)) for name in finished], denoise_seconds=STEP_S)

    def finish(self) -> None:
        for number in range(3000):
            self.act("send", number)
            if not self.sent:
                return
            self.act("report", number)
        raise AssertionError("it never ends")


@given(actions, st.integers(2, 4), st.integers(1, 4))
def test_slots_are_never_exceeded_and_all_requests_finish(actions: list[Any], slots: int, size: int) -> None:
    ranks = Ranks(slots, size)
    for number, action in enumerate(actions):
        ranks.act(action, number)
    ranks.finish()
    assert (ranks.alive, ranks.here) == (set(), {})
    assert (ranks.scheduler.waiting, ranks.scheduler.running, ranks.scheduler.active_adapters) == (0, 0, 0)


@settings(max_examples=20)
@given(st.lists(adapters_of_one, min_size=1, max_size=6), adapters_of_one, st.integers(2, 3))
def test_a_request_joins_within_a_bound_that_others_of_its_class_cannot_move(others: list[list[int]], mine: list[int], slots: int) -> None:
    stream = [(STEP_S * n, spec(f"{kind}-{n}", *adapters)) for n in range(100) for kind, adapters in enumerate(others)]
    outcome = run([*stream, (0.03, spec("mine", *mine))], slots=slots, size=400)
    alone_s = (STEPS + 1) * STEP_S
    # The patience comes once. Then each kind that came before may have its turn first, which is a drain and a run.
    assert outcome.latency_s["mine"] <= PATIENCE * alone_s + (len(others) + 1) * (2 * alone_s + 6 * STEP_S)
