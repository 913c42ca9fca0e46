# SPDX-License-Identifier: Apache-2.0
"""The decision to hold, refuse or serve a request, and the wait of held ones, with a clock and a state that the tests set."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator

import msgspec
import pytest

from diffusion_worker.engine.requests import holding as holding_module
from diffusion_worker.engine.requests.holding import ColdSituation, HeldOutcome, HoldBudget, Holding, decide
from diffusion_worker.engine.state.lifecycle import EngineLife
from diffusion_worker.engine.state.rank_protocol import Loss
from diffusion_worker.engine.state.request_events import Held, RequestEvent
from diffusion_worker.engine.state.state_document import ColdMode, ColdRequests, EngineState, SleepPolicy
from diffusion_worker.errors import ErrorCode, Fault, RequestError

DEADLINE_S = 60.0
STARTING, READY, RESTARTING, WAKING = EngineState.STARTING, EngineState.READY, EngineState.RESTARTING, EngineState.WAKING
DRAINING, SLEEPING, ASLEEP = EngineState.DRAINING, EngineState.SLEEPING, EngineState.ASLEEP
AWAKE, SLEEP, ON_IDLE = SleepPolicy.ALWAYS_AWAKE, SleepPolicy.ASLEEP, SleepPolicy.ON_IDLE


def situation(
    state: EngineState, policy: SleepPolicy = AWAKE, *, state_after_restart: EngineState = READY, **cold: object
) -> ColdSituation:
    return ColdSituation(state, state_after_restart if state is RESTARTING else state, policy, msgspec.convert(cold, ColdRequests))


# The decision


@pytest.mark.parametrize(
    ("state", "policy", "code"),
    [
        *((READY, policy, None) for policy in SleepPolicy),
        (STARTING, AWAKE, None),
        (STARTING, ON_IDLE, None),
        # The policy keeps the model asleep after its load, as a person asked.
        (STARTING, SLEEP, "Asleep"),
        *((state, policy, None) for state in (RESTARTING, WAKING) for policy in SleepPolicy),
        *((state, ON_IDLE, None) for state in (DRAINING, SLEEPING, ASLEEP)),
        *((state, policy, "Asleep") for state in (DRAINING, SLEEPING, ASLEEP) for policy in (AWAKE, SLEEP)),
        *((EngineState.FAILED, policy, "EngineFailed") for policy in SleepPolicy),
        *((EngineState.TERMINATING, policy, "Terminating") for policy in SleepPolicy),
    ],
)
def test_the_state_and_the_policy_say_who_waits_and_who_is_refused(state: EngineState, policy: SleepPolicy, code: str | None) -> None:
    error = decide(situation(state, policy), 0)
    assert (error.code if error else None) == code


@pytest.mark.parametrize("state_after_restart", [DRAINING, SLEEPING, ASLEEP])
def test_a_group_that_is_started_again_to_sleep_is_asleep_for_requests(state_after_restart: EngineState) -> None:
    refused = decide(situation(RESTARTING, AWAKE, state_after_restart=state_after_restart), 0)
    assert refused is not None and refused.code is ErrorCode.ASLEEP
    assert decide(situation(RESTARTING, ON_IDLE, state_after_restart=state_after_restart), 0) is None
    assert situation(RESTARTING, ON_IDLE, state_after_restart=state_after_restart).wakes


@pytest.mark.parametrize(
    ("state", "code"), [(STARTING, "Starting"), (RESTARTING, "Busy"), (WAKING, "Busy"), (DRAINING, "Asleep"), (ASLEEP, "Asleep")]
)
def test_with_the_mode_reject_nobody_waits_and_everybody_is_told_when_to_come_back(state: EngineState, code: str) -> None:
    error = decide(situation(state, ON_IDLE, mode=ColdMode.REJECT), 0)
    assert error is not None and (error.code, error.status) == (code, 503)
    assert error.retry_after_s is not None and error.retry_after_s > 0
    assert decide(situation(READY, ON_IDLE, mode=ColdMode.REJECT), 0) is None


def test_past_the_limit_a_request_is_one_too_many_but_never_where_the_model_serves() -> None:
    assert decide(situation(WAKING, maxHeld=2), 1) is None
    error = decide(situation(WAKING, maxHeld=2), 2)
    assert error is not None and (error.code, error.status, error.retryable) == (ErrorCode.OVERLOADED, 429, True)
    assert error.retry_after_s == 1.0 and "at most 2 requests that wait for the model, found 2" in error.message
    assert decide(situation(READY, maxHeld=0), 5) is None


@pytest.mark.parametrize(("policy", "retryable"), [(SLEEP, False), (AWAKE, True)])
def test_a_sleep_that_somebody_asked_for_has_no_time_to_come_back_and_by_policy_no_use(policy: SleepPolicy, retryable: bool) -> None:
    error = decide(situation(ASLEEP, policy), 0)
    assert error is not None and (error.retryable, error.retry_after_s) == (retryable, None)


# The wait


class Rig:
    """The holding of requests before a model, with a counter of wakes and a clock that advances only by `pass_time`.

    A test sets the model's state and the policy.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.life = EngineLife()
        self.policy = AWAKE
        self.cold_requests = ColdRequests()
        self.wakes = 0
        self.holding = Holding(self.life, self, wake=self._wake, clock=lambda: self.now_s)
        self.tasks: dict[str, asyncio.Task[str]] = {}
        self.served: list[str] = []
        self.events: dict[str, list[RequestEvent]] = {}

    def _wake(self) -> None:
        self.wakes += 1

    def ask(self, name: str, turn: HoldBudget | None = None) -> None:
        """Begin a request that wants to be admitted, and return at once; `outcome` tells later how it ended."""
        self.events[name] = []
        self.tasks[name] = asyncio.create_task(self._request(name, turn or HoldBudget(self.events[name].append)))

    async def _request(self, name: str, turn: HoldBudget) -> str:
        try:
            await self.holding.admit(turn)
        except RequestError as error:
            return error.code
        assert self.life.state is READY
        self.served.append(name)
        return "OK"

    async def settle(self) -> None:
        """Let all requests proceed as far as they can."""
        # A model that serves admits the held requests one at a time.
        for _ in range(5 + 2 * self.holding.current):
            await asyncio.sleep(0)

    async def outcome(self, name: str) -> str:
        """Wait for the end of a call that `ask` began. Return OK if it was admitted to a ready model, else its error code.

        Raises:
            TimeoutError: it did not end within DEADLINE_S seconds.
        """
        async with asyncio.timeout(DEADLINE_S):
            return await self.tasks[name]

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.holding.look()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    for task in rig.tasks.values():
        task.cancel()
    await asyncio.gather(*rig.tasks.values(), return_exceptions=True)


async def test_where_the_model_serves_a_request_goes_on_without_a_word(rig: Rig) -> None:
    rig.life.enter(READY)
    rig.ask("a")
    assert await rig.outcome("a") == "OK"
    assert rig.events["a"] == [] and rig.holding.outcomes == Counter()


async def test_held_requests_go_in_the_order_in_which_they_came_and_newcomers_go_behind(rig: Rig) -> None:
    for name in "abc":
        rig.ask(name)
    await rig.settle()
    assert rig.holding.current == 3
    rig.life.enter(READY)
    # A new request comes before any held one could go on.
    rig.ask("d")
    await rig.settle()
    assert rig.served == ["a", "b", "c", "d"]
    assert rig.holding.outcomes == {HeldOutcome.SERVED: 4}


async def test_who_was_told_to_go_and_meets_a_sleeping_model_keeps_its_place(rig: Rig) -> None:
    rig.policy = ON_IDLE
    for name in "ab":
        rig.ask(name)
    await rig.settle()
    rig.life.enter(READY)
    rig.holding.look()
    rig.life.enter(SLEEPING)
    rig.ask("c")
    await rig.settle()
    assert (rig.served, rig.holding.current) == ([], 3)
    rig.life.enter(READY)
    await rig.settle()
    assert rig.served == ["a", "b", "c"]
    assert [await rig.outcome(name) for name in "abc"] == ["OK"] * 3


async def test_each_is_told_that_it_is_held_and_where_it_stands(rig: Rig) -> None:
    for name in "ab":
        rig.ask(name)
    await rig.settle()
    assert rig.events == {"a": [Held("starting", 0)], "b": [Held("starting", 1)]}
    rig.life.enter(WAKING)
    await rig.settle()
    assert rig.events["b"] == [Held("starting", 1), Held("waking", 1)]
    rig.tasks["a"].cancel()
    await rig.settle()
    rig.pass_time(1)
    assert rig.events["b"][-1] == Held("waking", 0)
    # Without a change there is no event.
    rig.pass_time(1)
    assert len(rig.events["b"]) == 3


async def test_a_wait_ends_at_its_deadline_with_the_code_of_the_state(rig: Rig) -> None:
    rig.cold_requests = ColdRequests(hold_timeout_seconds=10.0)
    rig.ask("a")
    await rig.settle()
    rig.pass_time(4)
    rig.ask("b")
    await rig.settle()
    rig.life.enter(WAKING)
    rig.pass_time(6)
    assert await rig.outcome("a") == "Busy"
    assert not rig.tasks["b"].done() and rig.holding.document().oldest_age_seconds == 6.0
    rig.pass_time(4)
    assert await rig.outcome("b") == "Busy"
    assert rig.holding.outcomes == {HeldOutcome.TIMED_OUT: 2}
    assert rig.holding.waited.total_s == 20.0


async def test_the_time_of_one_request_is_counted_over_all_its_waits(rig: Rig) -> None:
    rig.cold_requests = ColdRequests(hold_timeout_seconds=10.0)
    turn = HoldBudget()
    rig.ask("first", turn)
    await rig.settle()
    rig.pass_time(7)
    rig.life.enter(READY)
    await rig.settle()
    rig.life.enter(WAKING)
    rig.ask("again", turn)
    await rig.settle()
    rig.pass_time(2.9)
    assert not rig.tasks["again"].done()
    rig.pass_time(0.2)
    assert await rig.outcome("again") == "Busy"


async def test_who_goes_away_leaves_its_place_at_once(rig: Rig) -> None:
    rig.cold_requests = ColdRequests(max_held=2)
    for name in "ab":
        rig.ask(name)
    await rig.settle()
    rig.ask("c")
    assert await rig.outcome("c") == "Overloaded"
    rig.tasks["a"].cancel()
    await rig.settle()
    rig.ask("d")
    await rig.settle()
    assert rig.holding.current == 2
    rig.life.enter(READY)
    await rig.settle()
    assert rig.served == ["b", "d"]
    assert rig.holding.outcomes == {HeldOutcome.SERVED: 2, HeldOutcome.GONE: 1, HeldOutcome.OVERLOADED: 1}


async def test_who_goes_away_in_the_moment_of_its_turn_hands_it_on(rig: Rig) -> None:
    for name in "ab":
        rig.ask(name)
    await rig.settle()
    rig.life.enter(READY)
    rig.holding.look()
    rig.tasks["a"].cancel()
    await rig.settle()
    assert rig.served == ["b"]


@pytest.mark.parametrize(("end", "code"), [("terminate", "Terminating"), ("fail", "EngineFailed")])
async def test_the_end_of_the_worker_ends_all_that_wait(rig: Rig, end: str, code: str) -> None:
    for name in "ab":
        rig.ask(name)
    await rig.settle()
    if end == "fail":
        rig.life.fail("the model's folder is empty")
    else:
        rig.life.enter(EngineState.TERMINATING)
    assert {await rig.outcome(name) for name in "ab"} == {code}
    assert (rig.holding.current, rig.holding.outcomes) == (0, {HeldOutcome.REFUSED: 2})


async def test_a_policy_that_changes_to_asleep_ends_those_that_would_have_woken_the_model(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding_module, "LOOK_S", 0.01)
    rig.policy = ON_IDLE
    rig.life.enter(ASLEEP)
    rig.ask("a")
    await rig.settle()
    assert rig.wakes >= 1
    rig.policy = SLEEP
    assert await rig.outcome("a") == "Asleep"


@pytest.mark.parametrize(("state", "wakes"), [(ASLEEP, True), (DRAINING, True), (SLEEPING, True), (WAKING, False), (STARTING, False)])
async def test_a_request_asks_for_a_wake_where_the_model_sleeps_until_one_comes(rig: Rig, state: EngineState, wakes: bool) -> None:
    rig.policy = ON_IDLE
    rig.life.enter(state)
    rig.ask("a")
    await rig.settle()
    assert (rig.wakes > 0) is wakes
    asked = rig.wakes
    rig.holding.look()
    assert (rig.wakes > asked) is wakes


@pytest.mark.parametrize("cold", [ColdRequests(mode=ColdMode.REJECT), ColdRequests(max_held=0)])
async def test_a_request_that_may_not_wait_wakes_the_model_for_those_that_come_back(rig: Rig, cold: ColdRequests) -> None:
    rig.policy, rig.cold_requests = ON_IDLE, cold
    rig.life.enter(ASLEEP)
    rig.ask("a")
    assert await rig.outcome("a") in ("Asleep", "Overloaded")
    assert rig.wakes == 1


async def test_a_listener_that_breaks_ends_its_own_request_only(rig: Rig) -> None:
    def broken(_: RequestEvent) -> None:
        raise ZeroDivisionError

    rig.ask("a", HoldBudget(broken))
    rig.ask("b")
    with pytest.raises(ZeroDivisionError):
        await rig.outcome("a")
    rig.life.enter(READY)
    assert await rig.outcome("b") == "OK"


async def test_a_defect_while_looking_ends_those_that_wait_instead_of_forgetting_them(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.ask("a")
    await rig.settle()
    del rig.cold_requests
    rig.life.enter(WAKING)
    with pytest.raises(AttributeError):
        await rig.outcome("a")
    assert "the task that watches held requests failed" in caplog.text
    rig.cold_requests = ColdRequests()
    rig.ask("b")
    await rig.settle()
    rig.life.enter(READY)
    assert await rig.outcome("b") == "OK"


async def test_nothing_runs_when_nobody_waits(rig: Rig) -> None:
    before = asyncio.all_tasks()
    rig.ask("a")
    await rig.settle()
    rig.life.enter(READY)
    await rig.outcome("a")
    await rig.settle()
    assert asyncio.all_tasks() == before


# Any order of events

COLD_STATES = (STARTING, WAKING, DRAINING, SLEEPING, ASLEEP)


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_comes_nobody_is_lost_the_order_is_kept_and_so_are_the_bounds(rig: Rig, seed: int) -> None:
    rng = random.Random(seed)
    most, timeout_s = rng.choice([1, 3, 8]), 20.0
    rig.cold_requests = ColdRequests(max_held=most, hold_timeout_seconds=timeout_s)
    rig.policy = ON_IDLE
    came_s: dict[str, float] = {}
    for number in range(300):
        match rng.choice(["ask", "ask", "ask", "leave", "state", "state", "ready", "time", "lose"]):
            case "ask":
                name = f"{number:03}"
                came_s[name] = rig.now_s
                rig.ask(name)
            case "leave" if waiting := [task for task in rig.tasks.values() if not task.done()]:
                rng.choice(waiting).cancel()
            case "state":
                rig.life.enter(rng.choice(COLD_STATES))
            case "ready":
                rig.life.enter(READY)
            case "lose":
                rig.life.lose_group(Loss("rank 0 is gone", Fault.DIED), 1)
                await asyncio.sleep(0)
                rig.life.group_is_back()
            case "time":
                rig.pass_time(rng.uniform(0.0, timeout_s / 2))
        if rng.random() < 0.7:
            await rig.settle()
        assert rig.life.state is READY or rig.holding.current <= most
    await rig.settle()
    assert all(rig.now_s - came_s[name] < timeout_s for name, task in rig.tasks.items() if not task.done())
    rig.life.enter(READY)
    await rig.settle()
    assert rig.served == sorted(rig.served)
    ends = Counter("Gone" if task.cancelled() else task.result() for task in rig.tasks.values())
    assert ends.total() == len(came_s) and set(ends) <= {"OK", "Gone", "Overloaded", "Asleep", "Busy", "Starting"}
    assert rig.holding.document().current == 0 and rig.holding.document().oldest_age_seconds is None
    # Requests that are served without a wait are not counted; all others are counted once.
    assert rig.holding.outcomes[HeldOutcome.OVERLOADED] == ends["Overloaded"]
    assert rig.holding.outcomes[HeldOutcome.TIMED_OUT] == ends["Asleep"] + ends["Busy"] + ends["Starting"]
