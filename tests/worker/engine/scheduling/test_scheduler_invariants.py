# SPDX-License-Identifier: Apache-2.0
"""Invariants of the scheduler under generated requests, aborts, failures and losses of the ranks."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.replay import Arrival, VirtualDevice, replay
from diffusion_worker.engine.scheduling.request_class import Defaults, class_of
from diffusion_worker.engine.scheduling.scheduler import PATIENCE, SHARE, StepScheduler
from diffusion_worker.engine.scheduling.step_loop import TICKS_AHEAD
from diffusion_worker.messages import ErrorReport, Failed, Finished, RequestSpec, Tick, TickDone

SIDES = (256, 512, 1024)
# The steps left of a request that runs out of memory in its next one.
NO_MEMORY = -100
PIXEL_S = 1e-7

requests = st.tuples(st.sampled_from(SIDES), st.integers(1, 12), st.sampled_from([1.0, 5.0]))
actions = st.lists(st.one_of(requests, st.sampled_from(["send", "report", "abort", "fail", "no memory", "lose"])), max_size=120)


def spec(name: str, side: int, steps: int, guidance: float = 5.0) -> RequestSpec:
    return RequestSpec(request_id=name, prompt="p kumquatfen", seed=1, height=side, width=side, steps=steps, guidance_scale=guidance)


class Ranks:
    """A model of the ranks that takes the scheduler's ticks and fails an assertion at the first one that breaks a rule."""

    def __init__(self, size: int, window_s: float) -> None:
        self.scheduler = StepScheduler(size, window_s=window_s)
        self.size = size
        self.specs: dict[str, RequestSpec] = {}
        self.arrived: list[str] = []
        self.here: dict[str, int] = {}
        self.sent: list[tuple[Tick, TickDone]] = []
        self.ended: set[str] = set()
        self.gone: set[str] = set()  # ended, perhaps without a report so far
        self.alone: set[str] = set()  # to run while no other is here
        self.now_s = 0.0

    def act(self, action: Any, number: int) -> None:
        self.now_s += 0.01
        if isinstance(action, tuple):
            self.specs[str(number)] = spec(str(number), *action)
            self.arrived.append(str(number))
            self.scheduler.add(self.specs[str(number)], self.now_s)
        elif action == "report" and self.sent:
            self.report()
        elif action == "send" and len(self.sent) < TICKS_AHEAD:
            tick = self.scheduler.next_tick(self.now_s)
            if tick is not None:
                self.send(tick)
        elif action == "abort" and (alive := [name for name in self.arrived if name not in self.ended]):
            name = alive[number % len(alive)]
            self.ended.add(name)
            self.alone.discard(name)
            self.scheduler.remove(name)
        elif action in ("fail", "no memory") and self.here:
            name = list(self.here)[number % len(self.here)]
            self.here[name] = -1 if action == "fail" else NO_MEMORY
        elif action == "lose":
            self.here.clear()
            self.gone.clear()
            self.sent.clear()
            self.scheduler.requeue_running()

    def send(self, tick: Tick) -> None:
        assert tick.advance is not None
        kinds = {class_of(self.specs[name], Defaults()) for name in tick.advance}
        assert len(kinds) <= 1, "two classes in a step"
        assert len(set(tick.advance)) == len(tick.advance), "advanced twice in a tick"
        for name in tick.leave:
            self.here.pop(name, None)
        for item in tick.join:
            name = item.request_id
            assert name not in self.here, "joined twice"
            assert name not in self.ended, "joined after its end"
            assert not self.alone or (name in self.alone and not self.here), "joined beside one that runs alone"
            self.gone.discard(name)
            earlier = [other for other in self.arrived[: self.arrived.index(name)] if other not in self.ended | self.gone]
            alike = [other for other in earlier if class_of(self.specs[other], Defaults()) == class_of(item, Defaults())]
            assert name in self.alone or all(other in self.here for other in alike), "overtook one of its class"
            self.here[name] = (item.steps or 0) + 1
        denoised = [name for name in tick.advance if self.here.get(name, 0) > 1]
        assert len(denoised) <= self.size, "more than the batch"
        finished, failed, without_memory = [], [], []
        for name in tick.advance:
            if name not in self.here:
                continue
            self.here[name] -= 1
            if self.here[name] <= 0:
                (finished if self.here[name] == 0 else without_memory if self.here[name] < NO_MEMORY else failed).append(name)
                del self.here[name]
                self.gone.add(name)
        done = TickDone(
            tick.number,
            [Finished(name, 0, (8, 8, 3)) for name in finished],
            [Failed(name, ErrorReport("EngineFailed", "no")) for name in failed]
            + [Failed(name, ErrorReport("InsufficientMemory", "no")) for name in without_memory],
            denoise_seconds=0.01 * max(1, len(denoised)),
        )
        self.sent.append((tick, done))

    def report(self) -> None:
        _, done = self.sent.pop(0)
        again = self.scheduler.observe(done, self.now_s)
        assert not self.alone.intersection(again), "ran alone a second time"
        self.alone.update(again)
        for name in [item.request_id for item in done.finished] + [item.request_id for item in done.failed]:
            if name not in again:
                self.ended.add(name)
                self.alone.discard(name)

    def finish(self) -> None:
        """Send every tick that the scheduler makes, a second apart, and report each, until it makes none.

        Raises:
            AssertionError: it still makes some after 5000 of them.
        """
        for _ in range(5000):
            self.now_s += 1.0
            self.act("send", 0)
            if not self.sent:
                return
            self.report()
        raise AssertionError("it never ends")


@given(actions, st.integers(1, 4), st.sampled_from([0.0, 0.05]))
def test_nobody_is_lost_advanced_twice_or_overtaken_in_its_class_and_the_batch_is_never_over_its_size(
    actions: list[Any], size: int, window_s: float
) -> None:
    ranks = Ranks(size, window_s)
    for number, action in enumerate(actions):
        ranks.act(action, number)
    ranks.finish()
    assert ranks.ended == set(ranks.arrived)
    assert ranks.here == {}
    assert (ranks.scheduler.waiting, ranks.scheduler.running, ranks.scheduler.in_flight) == (0, 0, 0)
    assert ranks.scheduler._residents.bytes == 0


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.floats(0, 2), requests), min_size=1, max_size=10),
    st.sampled_from(SIDES),
    st.integers(1, 12),
    st.integers(1, 4),
)
def test_a_request_is_done_within_a_bound_that_what_comes_after_it_in_other_classes_cannot_move(
    others: list[tuple[float, tuple[int, int, float]]], side: int, steps: int, size: int
) -> None:
    """Replay a request and floods of requests of other classes after it, and bound its latency.

    The bound is its patience, its share of the device among the classes, and the steps under way.
    """
    mine = RequestSpec(request_id="mine", prompt="p kumquatfen", seed=1, height=side, width=side + 8, steps=steps)
    arrivals = [Arrival(0.0, mine)]
    for number, (at_s, (other_side, other_steps, guidance)) in enumerate(others):
        # Each comes fifteen times in a row: more than the device can do.
        arrivals += [Arrival(at_s + 0.05 * n, spec(f"{number}-{n}", other_side, other_steps, guidance)) for n in range(15)]

    def cost(specs: list[RequestSpec]) -> float:
        return class_of(specs[0], Defaults()).load * PIXEL_S * len(specs)

    outcome = replay(StepScheduler(size), arrivals, VirtualDevice(cost))
    assert len(outcome.latency_s) == len(arrivals)
    alone_s = (steps + 1) * cost([mine])
    classes = 1 + len(SIDES) * 2
    slack_s = (TICKS_AHEAD + classes) * size * cost([spec("", max(SIDES), 1)])
    assert outcome.latency_s["mine"] <= PATIENCE * alone_s + alone_s * classes / SHARE + slack_s
