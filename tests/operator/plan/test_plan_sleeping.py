# SPDX-License-Identifier: Apache-2.0
"""Choice of sleeping and waking replicas, by tables: reports of the replicas on the left, calls on the right."""

from datetime import timedelta
from typing import Any

import msgspec
import pytest

from diffusion_operator.api.deployment_spec import DrainMode, SleepLevel, SleepPolicy
from diffusion_operator.api.worker_state import (
    AdapterRecord,
    HeldReport,
    MemoryReport,
    Operation,
    RankReport,
    RecordState,
    WireError,
    WorkerPhase,
    WorkerState,
)
from diffusion_operator.plan.deployment import DeploymentPlan, plan_deployment
from diffusion_operator.plan.observed.observed import Observed, Poll
from diffusion_operator.plan.results.actions import CreatePod, RemoveAdapter, SetRoutable, SleepWorker, WakeWorker
from diffusion_operator.plan.sleep.policy import retry_key
from support.operator.plan_builders import NOW, leaving, made, planned, pod, says

IDLE_S, MIN_AWAKE_S = 300, 60
DECIDING = {"policy": "OnIdle"}
"""The spec's sleep with its defaults: 300 s without a request, 60 s awake at least."""


def op(kind: str, identity: str, code: str | None = None) -> Operation:
    return Operation(operation_id=identity, kind=kind, error=WireError(code=code) if code else None)


def calls(plan: DeploymentPlan) -> list[str]:
    """Write the plan's sleeps and wakes as words such as `sleep 0` or `wake 1`, in their order. The number is the replica's index."""
    found = [call for call in plan.calls if isinstance(call, SleepWorker | WakeWorker)]
    return [f"{'sleep' if isinstance(call, SleepWorker) else 'wake'} {call.worker.pod_uid.split('-')[1]}" for call in found]


READY, DRAINING, ASLEEP = says(WorkerPhase.READY), says(WorkerPhase.DRAINING), says(WorkerPhase.ASLEEP)
CANCELLED = op("sleep", "sleep-3-1-aa", "Cancelled")
FAILED_SLEEP = op("sleep", "sleep-3-1-aa", "Timeout")


def told(state: WorkerState, policy: SleepPolicy = SleepPolicy.ASLEEP) -> WorkerState:
    """Return a state document as after a call that has taught the worker how it may sleep, so that none is due for this."""
    return msgspec.structs.replace(state, policy=policy)


def sleeping_at(level: SleepLevel) -> WorkerState:
    return says(WorkerPhase.ASLEEP, ranks=(RankReport(rank=0, state="asleep", memory=MemoryReport(level=level)),))


LIGHT, DEEP = sleeping_at(SleepLevel.HOST_MEMORY), sleeping_at(SleepLevel.DISCARD)

DECLARED = [
    ("a ready one is put to sleep", "Asleep", READY, ["sleep 0"]),
    ("a sleeping one is left", "Asleep", told(ASLEEP), []),
    ("one that drains is left", "Asleep", told(DRAINING), []),
    ("one that starts is left", "Asleep", says(WorkerPhase.STARTING), []),
    ("one that wakes by itself is left until it has", "Asleep", says(WorkerPhase.WAKING), []),
    ("one that is busy with an operation is left", "Asleep", says(WorkerPhase.READY, operation=op("wake", "w")), []),
    ("a failed sleep is tried again", "Asleep", says(WorkerPhase.READY, last_operation=FAILED_SLEEP), ["sleep 0"]),
    ("one that slept for idleness is told that it was asked to", "Asleep", told(ASLEEP, SleepPolicy.ON_IDLE), ["sleep 0"]),
    ("one that drains for idleness is told", "Asleep", told(DRAINING, SleepPolicy.ON_IDLE), ["sleep 0"]),
    ("one that keeps what it is not to keep any more is told", "Asleep Discard", told(LIGHT), ["sleep 0"]),
    ("one that keeps it no more is left", "Asleep Discard", told(DEEP), []),
    ("one that keeps less than it may is left", "Asleep", told(DEEP), []),
    ("one that just wakes is not told to keep less", "Asleep Discard", told(msgspec.structs.replace(LIGHT, state=WorkerPhase.WAKING)), []),
    ("a sleeping one is woken", "AlwaysAwake", ASLEEP, ["wake 0"]),
    ("a ready one is left", "AlwaysAwake", READY, []),
    ("one that drains is called back", "AlwaysAwake", says(WorkerPhase.DRAINING, operation=op("sleep", "s")), ["wake 0"]),
    ("one that frees its memory is let finish", "AlwaysAwake", says(WorkerPhase.SLEEPING, operation=op("sleep", "s")), []),
    ("one that slept by itself is woken", "AlwaysAwake", says(WorkerPhase.ASLEEP, last_operation=op("sleep", "policy-b")), ["wake 0"]),
    ("one that slept by request is told that requests may wake it", "OnIdle", told(ASLEEP), ["sleep 0"]),
    ("one that knows is left", "OnIdle", told(ASLEEP, SleepPolicy.ON_IDLE), []),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "state", "wanted"), [row[1:] for row in DECLARED], ids=[row[0] for row in DECLARED])
def test_by_the_declared_policy(policy: str, state: WorkerState, wanted: list[str]) -> None:
    policy, _, level = policy.partition(" ")
    assert calls(planned(pod(), states={0: state}, sleep={"policy": policy, "level": level or "HostMemory"})) == wanted


def awake(idle_s: float | None = 1000.0, *, awake_s: float = 1000.0, **more: Any) -> WorkerState:
    return says(WorkerPhase.READY, last_request_age_seconds=idle_s, state_age_seconds=awake_s, **more)


def asleep(*, asleep_s: float = 100.0, held: int = 0, **more: Any) -> WorkerState:
    age_s = 0.0 if held else 5000.0
    more = {"policy": SleepPolicy.ON_IDLE, "last_request_age_seconds": age_s, "held": HeldReport(current=held)} | more
    return says(WorkerPhase.ASLEEP, state_age_seconds=asleep_s, **more)


def adapters(*states: RecordState) -> tuple[AdapterRecord, ...]:
    return tuple(AdapterRecord(name=f"a{number}", state=state) for number, state in enumerate(states))


LOADED, FETCHING, DEFERRED = RecordState.LOADED, RecordState.FETCHING, RecordState.DEFERRED
NO_WAKE = op("wake", "wake-3-1-aa", "InsufficientMemory")

IDLE = [
    # subject, reports of the replicas, the spec's sleep beside the policy, calls
    ("one that had no request for long enough sleeps", [awake(300)], {}, ["sleep 0"]),
    ("one that had one since does not", [awake(299)], {}, []),
    ("one that was never asked sleeps when it was ready for as long", [awake(None, awake_s=300)], {}, ["sleep 0"]),
    ("one that was never asked and is new does not", [awake(None, awake_s=299)], {}, []),
    ("one that woke a moment ago does not", [awake(500, awake_s=59)], {}, []),
    ("one that was awake for long enough does", [awake(500, awake_s=60)], {}, ["sleep 0"]),
    ("minAwakeSeconds may be longer than idleSeconds", [awake(500, awake_s=500)], {"minAwakeSeconds": 501}, []),
    ("one with a running request does not", [awake(500, in_flight=1)], {}, []),
    ("one with a queued request does not", [awake(500, queued=1)], {}, []),
    ("one that loads an adapter does not", [awake(adapters=adapters(FETCHING))], {}, []),
    ("one from which an adapter drains does not", [awake(adapters=adapters(RecordState.DRAINING))], {}, []),
    ("one whose ranks start again does not", [says(WorkerPhase.RESTARTING, last_request_age_seconds=1000.0)], {}, []),
    ("one that is busy with an operation does not", [awake(operation=op("wake", "w"))], {}, []),
    ("all that are idle sleep at once", [awake(), awake()], {}, ["sleep 0", "sleep 1"]),
    ("a request anywhere keeps one awake", [awake(), awake(), awake(10)], {}, ["sleep 0", "sleep 1"]),
    ("and it need not be the one that had it", [awake(400), awake(10, awake_s=20)], {}, ["sleep 0"]),
    ("the last one stays while a request was served a moment ago", [awake(400), asleep(last_request_age_seconds=10.0)], {}, []),
    ("minAwake stay, idle the longest goes first", [awake(400), awake(900), awake(500)], {"minAwake": 2}, ["sleep 1"]),
    ("minAwake above replicas is all of them", [awake(), awake()], {"minAwake": 9}, []),
    ("those that wake do not count as awake yet", [awake(), says(WorkerPhase.WAKING)], {"minAwake": 1}, []),
    ("as many as the requests need stay", [awake(in_flight=9), awake(), awake()], {}, ["sleep 1"]),
    ("one that would not sleep last time comes last", [awake(900, last_operation=FAILED_SLEEP), awake(400)], {"minAwake": 1}, ["sleep 1"]),
    ("a cancelled sleep is no failure", [awake(900, last_operation=CANCELLED), awake(400)], {"minAwake": 1}, ["sleep 0"]),
]  # fmt: skip


@pytest.mark.parametrize(("states", "sleep", "wanted"), [row[1:] for row in IDLE], ids=[row[0] for row in IDLE])
def test_for_idleness(states: list[WorkerState], sleep: dict[str, Any], wanted: list[str]) -> None:
    pods = [pod(index) for index in range(len(states))]
    assert calls(planned(*pods, states=dict(enumerate(states)), replicas=len(states), sleep=DECIDING | sleep)) == wanted


NEED = [
    ("requests wake nobody that wakes by itself for them", [asleep(held=1)], {}, []),
    ("a request that was served wakes nobody", [asleep(last_request_age_seconds=10.0)], {}, []),
    ("minAwake wakes", [asleep(), asleep()], {"minAwake": 1}, ["wake 0"]),
    ("asleep the shortest wakes first", [asleep(asleep_s=900), asleep(asleep_s=30)], {"minAwake": 1}, ["wake 1"]),
    (
        "one that has the adapters wakes before",
        [asleep(asleep_s=30, adapters=adapters(DEFERRED)), asleep(asleep_s=900, adapters=adapters(LOADED))],
        {"minAwake": 1},
        ["wake 1"],
    ),
    ("one whose wake failed last time comes last", [asleep(asleep_s=1, last_operation=NO_WAKE), asleep()], {"minAwake": 1}, ["wake 1"]),
    ("one that wakes already is enough", [says(WorkerPhase.WAKING), asleep()], {"minAwake": 1}, []),
    ("one that wakes for its requests is enough", [asleep(held=2), asleep()], {"minAwake": 1}, []),
    ("more requests than fit wake more", [awake(0, in_flight=8, queued=1), asleep(), asleep()], {}, ["wake 1"]),
    ("no more than there are", [awake(0, in_flight=8, queued=99), asleep()], {}, ["wake 1"]),
    ("requests that fit wake nobody", [awake(0, in_flight=8), asleep()], {}, []),
    ("a minAwake above replicas is all of them", [asleep(), asleep()], {"minAwake": 9}, ["wake 0", "wake 1"]),
]  # fmt: skip


@pytest.mark.parametrize(("states", "sleep", "wanted"), [row[1:] for row in NEED], ids=[row[0] for row in NEED])
def test_for_need(states: list[WorkerState], sleep: dict[str, Any], wanted: list[str]) -> None:
    pods = [pod(index) for index in range(len(states))]
    plan = planned(*pods, states=dict(enumerate(states)), replicas=len(states), sleep=DECIDING | sleep)
    assert calls(plan) == wanted


def test_what_is_not_known_counts_as_a_request() -> None:
    states = {0: awake(), 1: awake()}
    both = (pod(0), pod(1))
    assert calls(planned(*both, states=states, stale=(1,), replicas=2, sleep=DECIDING)) == ["sleep 0"], "one stays"
    hidden = {0: awake(), 1: asleep()}
    assert calls(planned(*both, states=hidden, stale=(1,), replicas=2, sleep=DECIDING)) == [], "who knows what the other one does"
    oldest = {0: awake(9000), 1: awake()}
    assert calls(planned(*both, states=oldest, stale=(0,), replicas=2, sleep=DECIDING | {"minAwake": 1})) == ["sleep 1"]
    assert calls(planned(pod(0), states=states, stale=(0,), sleep=DECIDING)) == [], "and nobody is called that does not answer"


def test_none_sleeps_while_replicas_are_replaced() -> None:
    old = pod(0, revision="old")
    assert calls(planned(old, pod(1, ready=False), states={0: awake(), 1: awake()}, replicas=2, sleep=DECIDING)) == []


def test_one_that_is_told_of_adapters_in_this_pass_does_not_sleep() -> None:
    stray = awake(adapters=adapters(LOADED))
    status = {"replicaStates": [{"index": 0, "state": "Awake", "bootId": "b"}]}
    plan = planned(pod(), states={0: stray}, status=status, sleep=DECIDING)
    assert [type(call) for call in plan.calls] == [RemoveAdapter]
    assert [type(call) for call in planned(pod(), states={0: stray}, sleep=DECIDING).calls] == [RemoveAdapter], "nor before it is verified"


def test_a_call_for_idleness_says_how_idle_and_one_that_was_asked_for_does_not() -> None:
    sleep = {"idleSeconds": 40, "level": "Discard", "drain": "Abort", "drainTimeoutSeconds": 7}
    (idle,) = planned(pod(), states={0: awake()}, sleep=sleep | DECIDING).calls
    (asked,) = planned(pod(), sleep=sleep | {"policy": "Asleep"}).calls
    assert isinstance(idle, SleepWorker)
    assert isinstance(asked, SleepWorker)
    assert (idle.if_idle_since_s, idle.policy, idle.level) == (40, SleepPolicy.ON_IDLE, SleepLevel.DISCARD)
    assert (asked.if_idle_since_s, asked.policy, asked.mode, asked.deadline_s) == (None, SleepPolicy.ASLEEP, DrainMode.ABORT, 7)


def test_no_time_to_drain_is_abort() -> None:
    (call,) = planned(pod(), sleep={"policy": "Asleep", "drain": "Wait", "drainTimeoutSeconds": 0}).calls
    assert isinstance(call, SleepWorker)
    assert (call.mode, call.deadline_s) == (DrainMode.ABORT, 1)


def identity(last: Operation | None, *, boot_id: str = "b") -> tuple[str, int]:
    state = msgspec.structs.replace(awake(last_operation=last), boot_id=boot_id)
    (call,) = planned(pod(), states={0: state}, sleep=DECIDING).calls
    assert isinstance(call, SleepWorker)
    return call.operation_id, call.attempt


def test_the_same_look_gives_the_same_operation_and_each_cycle_another_one() -> None:
    first, _ = identity(None)
    assert identity(None) == (first, 1), "an operator that starts again, or whose answer was lost, asks for the same"
    seen = {first}
    for number in range(1, 50):
        seen |= {identity(op("wake", f"demand-{number}"))[0], identity(op("wake", f"wake-3-1-{number}"))[0]}
    assert len(seen) == 99
    assert identity(None, boot_id="c")[0] != first


def test_a_failure_counts_an_attempt_and_a_sleep_that_something_came_before_does_not() -> None:
    first, _ = identity(None)
    second, attempt = identity(op("sleep", first, "Timeout"))
    assert (attempt, second.startswith("sleep-3-2-")) == (2, True)
    assert identity(op("sleep", second, "Timeout"))[1] == 3
    assert identity(op("sleep", second, "Cancelled"))[1] == 1
    assert identity(op("sleep", "sleep-2-4-aa", "Timeout"))[1] == 1, "another generation of the spec"
    assert identity(op("sleep", "sleep-3-x", "Timeout"))[1] == 1, "an id of somebody else's"


def test_a_call_waits_for_its_own_backoff_and_not_for_another_kinds() -> None:
    one = pod()
    (call,) = planned(one, sleep={"policy": "Asleep"}).calls
    assert isinstance(call, SleepWorker)
    not_before = {retry_key(call): NOW + timedelta(seconds=1)}

    def again(policy: str, state: WorkerState) -> list[str]:
        observed = Observed(
            deployment=made(sleep={"policy": policy}),
            default_image="worker:1",
            pods=(one,),
            polls={one.uid: Poll(state=state)},
            operation_not_before=not_before,
        )
        return calls(plan_deployment(observed, NOW))

    assert again("Asleep", READY) == []
    assert again("AlwaysAwake", ASLEEP) == ["wake 0"]


ELIGIBLE = [
    ("idle", [awake(100)], {}, 200),
    ("awake for too short", [awake(290, awake_s=5)], {}, 55),
    ("the first of two", [awake(100), awake(200)], {}, 100),
    ("the second of two, while the first one's request counts", [awake(100), asleep()], {}, 200),
    ("kept awake", [awake(100)], {"minAwake": 1}, None),
    ("busy", [awake(0, in_flight=1)], {}, None),
    ("asleep", [asleep()], {}, None),
]


@pytest.mark.parametrize(("states", "sleep", "seconds"), [row[1:] for row in ELIGIBLE], ids=[row[0] for row in ELIGIBLE])
def test_the_time_at_which_the_next_one_may_sleep(states: list[WorkerState], sleep: dict[str, Any], seconds: int | None) -> None:
    pods = [pod(index, routable=True) for index in range(len(states))]
    plan = planned(*pods, states=dict(enumerate(states)), replicas=len(states), sleep=DECIDING | sleep)
    assert plan.status.sleep_eligible_time == (None if seconds is None else NOW + timedelta(seconds=seconds))


def test_it_looks_again_when_one_may_sleep() -> None:
    routed = pod(routable=True)
    assert planned(routed, states={0: awake(100)}, sleep=DECIDING).look_again_s == 200
    assert planned(routed, states={0: asleep()}, sleep=DECIDING).look_again_s is None
    assert planned(routed, states={0: told(ASLEEP)}, sleep={"policy": "Asleep"}).look_again_s is None
    assert planned(routed, states={0: awake(100)}).look_again_s is None


def test_there_is_no_such_time_where_nothing_sleeps_for_idleness() -> None:
    assert planned(pod(), states={0: awake(100)}).status.sleep_eligible_time is None


ROUTES = [
    ("only those that are awake", [awake(10), asleep()], ["d-0-0"]),
    ("all while none is", [asleep(), asleep()], ["d-0-0", "d-1-0"]),
    ("all while one wakes for its request", [says(WorkerPhase.WAKING), asleep()], ["d-0-0", "d-1-0"]),
    ("all while the last one drains", [says(WorkerPhase.DRAINING), asleep()], ["d-0-0", "d-1-0"]),
    ("only the one that woke", [awake(0, in_flight=1), says(WorkerPhase.WAKING)], ["d-0-0"]),
]


@pytest.mark.parametrize(("states", "routed"), [row[1:] for row in ROUTES], ids=[row[0] for row in ROUTES])
def test_routed_to_with_on_idle_are(states: list[WorkerState], routed: list[str]) -> None:
    pods = [pod(index) for index in range(len(states))]
    plan = planned(*pods, states=dict(enumerate(states)), replicas=len(states), sleep=DECIDING)
    assert [one.name for one in plan.pods if isinstance(one, SetRoutable) and one.routable] == routed


SCALES = [
    ("scaling down takes the sleeping one first", [awake(10), asleep(), awake(10)], 2, ["d-1-0"]),
    ("scaling down takes several sleeping ones", [asleep(), awake(10), asleep()], 1, ["d-0-0", "d-2-0"]),
    ("scaling down spares the one that holds requests", [asleep(), asleep(held=2)], 1, ["d-0-0"]),
    ("scaling down spares the one that holds requests even if the other one is awake", [awake(10), asleep(held=2)], 1, ["d-0-0"]),
    ("one that is about to sleep goes before one that serves", [says(WorkerPhase.SLEEPING), awake(10)], 1, ["d-0-0"]),
]


@pytest.mark.parametrize(("states", "replicas", "victims"), [row[1:] for row in SCALES], ids=[row[0] for row in SCALES])
def test_scaling_during_sleep(states: list[WorkerState], replicas: int, victims: list[str]) -> None:
    pods = [pod(index) for index in range(len(states))]
    plan = planned(*pods, states=dict(enumerate(states)), replicas=replicas, sleep=DECIDING)
    assert leaving(plan) == victims


@pytest.mark.parametrize("policy", ["Asleep", "OnIdle"])
def test_scaling_up_during_sleep_makes_pods_and_wakes_nobody(policy: str) -> None:
    state = told(asleep(), SleepPolicy(policy))
    plan = planned(pod(), states={0: state}, replicas=3, sleep={"policy": policy})
    assert [one.index for one in plan.pods if isinstance(one, CreatePod)] == [1, 2]
    assert calls(plan) == []
