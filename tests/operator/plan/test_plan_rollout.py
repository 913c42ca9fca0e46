# SPDX-License-Identifier: Apache-2.0
"""Replicas that a rollout replaces and makes, by tables."""

from datetime import timedelta
from typing import Any

import msgspec
import pytest

from diffusion_operator.api.deployment_spec import Rollout, SleepPolicy
from diffusion_operator.api.meta import condition_of
from diffusion_operator.api.worker_state import HeldReport, WorkerPhase, WorkerState
from diffusion_operator.plan.deployment import DeploymentPlan
from diffusion_operator.plan.observed.pods import Container, Exit, Pod
from diffusion_operator.plan.replicas.rollout import max_surge, max_unavailable
from diffusion_operator.plan.results.actions import CreatePod, SetRoutable, SleepWorker, WakeWorker
from diffusion_operator.plan.results.events import condition_events
from support.operator.fake_cluster import EPOCH
from support.operator.plan_builders import NOW, READY, REVISION, leaving, made, planned, pod, says

ASLEEP, STARTING, WAKING = says(WorkerPhase.ASLEEP), says(WorkerPhase.STARTING), says(WorkerPhase.WAKING)
HOLDS = says(WorkerPhase.ASLEEP, held=HeldReport(current=1))
RANKS_START = says(WorkerPhase.RESTARTING, generation=2)
ONE_DEATH: dict[str, Any] = {"ready": False, "container": Container(running=True, restarts=1, last_exit=Exit(code=70))}
NO_IMAGE: dict[str, Any] = {"ready": False, "container": Container(waiting_reason="ImagePullBackOff")}
SURGE = {"maxSurge": 1, "maxUnavailable": 0}


def old(index: int, revision: str = "old", **facts: Any) -> Pod:
    return pod(index, **({"revision": revision, "routable": True} | facts))


def new(index: int, **facts: Any) -> Pod:
    return pod(index, 1, **({"routable": True} | facts))


def coming(index: int, **facts: Any) -> Pod:
    return pod(index, 1, **({"ready": False} | facts))


def stuck_since(minutes: float, *, served: int = 0, remaining: int = 1, revision: str = REVISION) -> dict[str, Any]:
    since = (NOW - timedelta(minutes=minutes)).isoformat()
    return {"rollout": {"revision": revision, "served": served, "remaining": remaining, "progressTime": since}, "currentRevision": "old"}


def gone(plan: DeploymentPlan) -> list[int]:
    """Return the sorted indices of the replicas whose pod the plan takes out of the Service or deletes."""
    names = {*leaving(plan), *(one.name for one in plan.pods if getattr(one, "routable", True) is False)}
    return sorted(int(name.split("-")[1]) for name in names)


def come(plan: DeploymentPlan) -> list[int]:
    return sorted(one.index for one in plan.pods if isinstance(one, CreatePod))


ALL_OLD = [old(0), old(1), old(2), old(3)]
# name, pods, the workers' reports, spec.rollout, indices that are removed, indices that are made; four replicas
STEPS: list[tuple[str, list[Pod], dict[int, WorkerState], dict[str, Any], list[int], list[int]]] = [
    ("one goes by default", ALL_OLD, {}, {}, [3], []),
    ("two may be missing", ALL_OLD, {}, {"maxUnavailable": 2}, [2, 3], []),
    ("all may be missing", ALL_OLD, {}, {"maxUnavailable": 9}, [0, 1, 2, 3], []),
    ("surge makes one first", ALL_OLD, {}, SURGE, [], [4]),
    ("surge makes no more than the whole", ALL_OLD, {}, {"maxSurge": 9, "maxUnavailable": 0}, [], [4, 5, 6, 7]),
    ("both at once", ALL_OLD, {}, {"maxSurge": 2, "maxUnavailable": 1}, [3], [4, 5]),
    ("none goes before the surge serves", [*ALL_OLD, coming(4)], {4: STARTING}, SURGE, [], []),
    ("none goes before the surge is routed to", [*ALL_OLD, new(4, routable=False)], {}, SURGE, [], []),
    ("one goes for one that serves", [*ALL_OLD, new(4)], {}, SURGE, [3], []),
    ("the surge goes on", [old(0), old(1), old(2), new(4)], {}, SURGE, [], [3]),
    ("the last surge is not made", [old(0), new(1), new(2), new(3), new(4)], {}, SURGE, [0], []),
    ("what is missing is made new", [old(0), old(1), old(2)], {}, {}, [], [3]),
    ("nothing while one is away by itself", [old(0), old(1), old(2), old(3, **ONE_DEATH)], {3: STARTING}, {"maxUnavailable": 1}, [3], []),
    ("no second one while the first comes", [old(0), old(1), old(2), coming(3)], {3: STARTING}, {}, [], []),
    ("what comes back waits for a new one", [old(0), old(1), old(2, **ONE_DEATH), coming(3)], {2: STARTING, 3: STARTING}, {}, [], []),
    ("what cannot start goes at once", [old(0), old(1), old(2, **NO_IMAGE), coming(3)], {3: STARTING}, {}, [2], []),
    ("what never served goes at once", [old(0), old(1), old(2, ready=False), coming(3)], {2: STARTING, 3: STARTING}, {}, [2], []),
    ("a failed one before a sleeping one", [old(0, finished=True), old(1), old(2), old(3)], {2: ASLEEP}, {}, [0], []),
    ("a sleeping one before an awake one", ALL_OLD, {1: ASLEEP}, {}, [1], []),
    ("one that wakes is waited for", ALL_OLD, {1: WAKING}, {}, [], []),
    ("ranks that start again go first", ALL_OLD, {0: RANKS_START}, {}, [0], []),
    ("none that holds requests", [old(0), old(1), old(2), old(3)], dict.fromkeys(range(3), HOLDS) | {3: ASLEEP}, {}, [3], []),
    ("the oldest revision first", [old(0), old(1, "older", created_at=EPOCH - timedelta(1)), old(2), old(3)], {}, {}, [1], []),
    ("none at the target", [new(0), new(1), new(2), old(3)], {}, {}, [3], []),
    ("a reverted edit: the surge goes at once", [*(new(index) for index in range(4)), old(4, ready=False)], {4: STARTING}, SURGE, [4], []),
    ("a reverted edit: the serving surge goes too", [*(new(index) for index in range(4)), old(4)], {}, SURGE, [4], []),
    ("Recreate ends all", ALL_OLD, {}, {"type": "Recreate"}, [0, 1, 2, 3], []),
    ("Recreate waits for the last", [old(3, terminating=True)], {}, {"type": "Recreate"}, [], []),
    ("Recreate makes all", [], {}, {"type": "Recreate"}, [], [0, 1, 2, 3]),
    ("Recreate scales when nothing changes", [new(0), new(1)], {}, {"type": "Recreate"}, [], [2, 3]),
]  # fmt: skip


@pytest.mark.parametrize(("pods", "states", "rollout", "go", "made_anew"), [row[1:] for row in STEPS], ids=[row[0] for row in STEPS])
def test_a_step_of_a_rollout(
    pods: list[Pod], states: dict[int, WorkerState], rollout: dict[str, Any], go: list[int], made_anew: list[int]
) -> None:
    resting = [msgspec.structs.replace(one, routable=False) if one.index in states else one for one in pods]
    plan = planned(*resting, states=states, replicas=4, rollout=rollout, sleep={"policy": "OnIdle"})
    assert (gone(plan), come(plan)) == (go, made_anew)


FULL = says(WorkerPhase.READY, in_flight=3)
SCALES: list[tuple[str, dict[int, WorkerState], list[int]]] = [
    ("none that holds requests", {0: HOLDS, 1: HOLDS, 2: ASLEEP, 3: HOLDS}, [2]),
    ("not the busiest", {0: FULL, 2: FULL, 3: FULL}, [1]),
    ("one that sleeps before one that is awake", {0: ASLEEP}, [0]),
    ("all asleep: the highest index", dict.fromkeys(range(4), ASLEEP), [3]),
]


@pytest.mark.parametrize(("states", "go"), [row[1:] for row in SCALES], ids=[row[0] for row in SCALES])
def test_scaling_down_takes_the_one_that_is_missed_least(states: dict[int, WorkerState], go: list[int]) -> None:
    pods = [new(index, routable=states.get(index, FULL).state is WorkerPhase.READY) for index in range(4)]
    plan = planned(*pods, states=states, replicas=3, sleep={"policy": "OnIdle"})
    assert gone(plan) == go


def test_replicas_are_added_while_all_others_sleep() -> None:
    plan = planned(new(0), new(1), states={0: ASLEEP, 1: ASLEEP}, replicas=3, sleep={"policy": "Asleep"})
    assert (come(plan), gone(plan)) == ([2], [])


def test_a_surge_gets_an_incarnation_above_every_known_one() -> None:
    status = {"replicaStates": [{"index": 2, "state": "Terminating", "incarnation": 6}]}
    plan = planned(old(0), old(1), status=status, replicas=2, rollout=SURGE)
    assert [one for one in plan.pods if isinstance(one, CreatePod)] == [CreatePod(2, 7)]


DEADLINES: list[tuple[str, list[Pod], dict[str, Any], bool, list[int]]] = [
    ("in time", [old(0), coming(1)], stuck_since(29), False, []),
    ("too late", [old(0), coming(1)], stuck_since(30), True, []),
    ("too late, and no old replica goes any more", [old(0), new(1)], stuck_since(31, served=1), True, []),
    ("a step forward restarts the clock", [old(0), new(1)], stuck_since(31, served=0), False, [0]),
    ("one old replica less restarts the clock", [old(0), coming(1)], stuck_since(31, remaining=2), False, []),
    ("another template restarts the clock", [old(0), coming(1)], stuck_since(31, revision="other"), False, []),
    ("coming and going is no step forward", [old(0), coming(1)], stuck_since(31, served=1), True, []),
    ("a first start has a deadline too", [coming(0), coming(1)], stuck_since(31, remaining=0), True, []),
]


@pytest.mark.parametrize(("pods", "status", "stuck", "go"), [row[1:] for row in DEADLINES], ids=[row[0] for row in DEADLINES])
def test_a_rollout_that_gets_no_further_stops(pods: list[Pod], status: dict[str, Any], stuck: bool, go: list[int]) -> None:
    plan = planned(*pods, states={one.index: STARTING for one in pods if not one.ready}, status=status, replicas=2)
    progressing = condition_of(plan.status.conditions, "Progressing")
    assert progressing is not None
    assert (progressing.reason == "DeadlineExceeded") is stuck
    assert gone(plan) == go
    events = [one.reason for one in condition_events(made(status).status, plan.status)]
    assert ("DeadlineExceeded" in events) is stuck


def test_a_stuck_rollout_makes_no_surge_but_what_is_missing() -> None:
    assert come(planned(old(0), old(1), coming(2, **NO_IMAGE), status=stuck_since(31, remaining=2), replicas=2, rollout=SURGE)) == []
    assert come(planned(old(0), status=stuck_since(31), replicas=2, rollout=SURGE)) == [1]


@pytest.mark.parametrize(
    ("pods", "paused", "stalled", "again"),
    [
        ([old(0), old(1, terminating=True), coming(1)], 1, False, False),
        ([old(0), coming(1)], 1, False, True),
        ([old(0), coming(1)], 0, True, False),
        ([old(0), old(1, terminating=True, lost=True), coming(1)], 0, True, False),
        ([old(0), old(1, terminating=True, finished=True), coming(1)], 0, True, False),
        ([old(0), pod(1, 1, ready=False, scheduled=False, node="", gated=True)], 0, False, False),
    ],
    ids=["one drains", "it has drained", "none drained", "its node is lost", "it has ended", "one waits for quota"],
)
def test_a_rollouts_clock_stands_while_a_replica_drains_or_waits_for_quota_and_begins_again_afterwards(
    pods: list[Pod], paused: int, stalled: bool, again: bool
) -> None:
    status = stuck_since(31, remaining=1)
    status["rollout"]["paused"] = paused
    plan = planned(*pods, states={1: STARTING}, status=status, replicas=2)
    progressing, record = condition_of(plan.status.conditions, "Progressing"), plan.status.rollout
    assert progressing is not None and record is not None
    assert (progressing.reason == "DeadlineExceeded") is stalled
    assert (record.progress_time == NOW) is again


def test_a_new_replica_that_serves_again_is_no_progress_and_is_not_counted_while_it_does_not_serve() -> None:
    status, pods = stuck_since(31, served=1, remaining=2), [old(0), coming(1), coming(2)]
    removed = planned(*pods, states={1: STARTING, 2: STARTING}, status=status, replicas=3).status.rollout
    assert removed is not None
    assert (removed.served, removed.remaining, removed.progress_time) == (1, 1, NOW)

    stuck = planned(*pods, states={1: STARTING, 2: STARTING}, status=stuck_since(31, served=1, remaining=1), replicas=3)
    progressing = condition_of(stuck.status.conditions, "Progressing")
    assert progressing is not None
    assert progressing.reason == "DeadlineExceeded"
    assert progressing.message.startswith("0 of 3 replicas serve with the new template")

    again = planned(old(0), new(1), coming(2), states={2: STARTING}, status=stuck_since(31, served=1), replicas=3).status.rollout
    assert again is not None
    assert again.progress_time < NOW


def test_a_stuck_rollout_that_is_scaled_to_nothing_leaves_nothing() -> None:
    assert gone(planned(old(0), new(1), status=stuck_since(31, served=1), replicas=0, rollout=SURGE)) == [0, 1]


def test_a_stuck_rollout_says_what_it_waits_for_and_what_to_do() -> None:
    image = {"ready": False, "container": Container(waiting_reason="ImagePullBackOff", waiting_message='Back-off pulling image "x"')}
    plan = planned(old(0), pod(1, 1, **image), status=stuck_since(31), replicas=2)
    progressing = condition_of(plan.status.conditions, "Progressing")
    assert progressing is not None
    assert "0 of 2 replicas serve with the new template" in progressing.message
    assert 'replica 1: ImagePullBackOff: Back-off pulling image "x"' in progressing.message


def test_a_rollout_that_is_done_is_no_more_in_the_status() -> None:
    plan = planned(new(0), new(1), status=stuck_since(40), replicas=2)
    assert (plan.status.rollout, plan.status.current_revision) == (None, REVISION)


def test_what_fails_after_a_rollout_is_done_has_no_deadline() -> None:
    plan = planned(new(0), coming(1), status={"currentRevision": REVISION}, states={1: STARTING}, replicas=2)
    assert plan.status.rollout is None


def test_the_progress_counts_replicas_that_serve_and_not_templates() -> None:
    plan = planned(old(0), new(1), coming(2), states={2: STARTING}, replicas=3)
    progressing = condition_of(plan.status.conditions, "Progressing")
    assert progressing is not None
    assert progressing.message.startswith("1 of 3 replicas serve with the new template, 1 have an older one")


SLEEPS = [
    ("a sleeper is replaced by a sleeper, and none is woken", {"policy": "Asleep"}, {0: ASLEEP, 1: ASLEEP}, []),
    ("none sleeps for idleness meanwhile", {"policy": "OnIdle", "minAwakeSeconds": 0}, {}, []),
    ("a policy that wakes goes on meanwhile", {"policy": "AlwaysAwake"}, {0: ASLEEP, 1: ASLEEP}, [WakeWorker]),
    ("a policy that sleeps goes on meanwhile", {"policy": "Asleep"}, {}, [SleepWorker]),
]


@pytest.mark.parametrize(("sleep", "states", "calls"), [row[1:] for row in SLEEPS], ids=[row[0] for row in SLEEPS])
def test_the_policy_of_sleep_during_a_rollout(sleep: dict[str, Any], states: dict[int, WorkerState], calls: list[type]) -> None:
    policy = SleepPolicy(sleep["policy"])
    told = {index: says(state.state, policy=policy, state_age_seconds=999.0) for index, state in states.items()}
    awake = says(WorkerPhase.READY, policy=policy, state_age_seconds=999.0)
    plan = planned(old(0), old(1), states={0: awake, 1: awake} | told, replicas=2, sleep=sleep)
    assert len(gone(plan)) == 1
    assert [type(call) for call in plan.calls] == calls


@pytest.mark.parametrize(("minutes", "calls"), [(1, []), (31, [SleepWorker])], ids=["goes on", "stuck"])
def test_a_stuck_rollout_keeps_nobody_awake(minutes: float, calls: list[type]) -> None:
    idle = says(WorkerPhase.READY, policy=SleepPolicy.ON_IDLE, state_age_seconds=999.0)
    sleep = {"policy": "OnIdle", "idleSeconds": 10}
    plan = planned(old(0), coming(1), states={0: idle, 1: STARTING}, status=stuck_since(minutes), replicas=2, sleep=sleep)
    assert [type(call) for call in plan.calls] == calls


@pytest.mark.parametrize(
    ("surge", "missing", "replicas", "expected"),
    [
        (None, None, 4, (0, 1)),
        ("25%", "25%", 4, (1, 1)),
        ("25%", "25%", 10, (3, 2)),
        ("10%", "10%", 3, (1, 0)),
        (None, "10%", 3, (0, 1)),
        ("0%", "34%", 3, (0, 1)),
        ("100%", 0, 3, (3, 0)),
        (2, "50%", 1, (2, 0)),
        ("1%", "1%", 0, (0, 1)),
    ],
)
def test_a_share_of_the_replicas_is_rounded_as_kubernetes_does(
    surge: int | str | None, missing: int | str | None, replicas: int, expected: tuple[int, int]
) -> None:
    """Check the numbers of replicas for shares. Surge and unavailable replicas are never both 0, because then nothing could be replaced."""
    rollout = Rollout(max_surge=surge, max_unavailable=missing)
    assert (max_surge(rollout, replicas), max_unavailable(rollout, replicas)) == expected


def test_a_rollout_in_percent_replaces_as_many_as_the_number_that_it_stands_for() -> None:
    for share, number in (("50%", 2), ("25%", 1), ("100%", 4)):
        pods = [old(index) for index in range(4)]
        in_percent, as_number = (planned(*pods, replicas=4, rollout={"maxUnavailable": one}) for one in (share, number))
        assert in_percent.pods == as_number.pods
        assert in_percent.pods


@pytest.mark.parametrize(
    ("rollout", "serving", "enough"), [({}, 3, True), ({}, 2, False), (SURGE, 3, False), ({"maxUnavailable": 3}, 1, True)]
)
def test_available_means_that_no_more_are_missing_than_may_be(rollout: dict[str, Any], serving: int, enough: bool) -> None:
    pods = [new(index) if index < serving else coming(index) for index in range(4)]
    plan = planned(*pods, states=dict.fromkeys(range(serving, 4), STARTING), replicas=4, rollout=rollout)
    available = condition_of(plan.status.conditions, "Available")
    assert available is not None
    assert (available.status.value == "True") is enough


GATED: dict[str, Any] = {"gated": True, "scheduled": False, "ready": False, "ip": "", "container": Container()}


def test_with_a_surge_the_old_replica_serves_until_the_new_one_is_admitted_and_without_one_it_goes_first() -> None:
    """Check when an old replica goes. Without a surge it goes first, since it holds the quota that the new one waits for."""
    waits = planned(old(0), pod(1, 1, **GATED), replicas=1, rollout=SURGE)
    assert waits.pods == ()
    admitted = planned(old(0), new(1), replicas=1, rollout=SURGE)
    assert [action.name for action in admitted.pods if isinstance(action, SetRoutable) and not action.routable] == ["d-0-0"]
    first = planned(old(0), replicas=1)
    assert [type(action) for action in first.pods] == [SetRoutable]
    assert leaving(planned(old(0, routable=False), replicas=1)) == ["d-0-0"]


@pytest.mark.parametrize("rollout", [{}, SURGE, {"type": "Recreate"}], ids=str)
def test_a_pod_that_ended_and_that_a_finalizer_holds_counts_as_gone(rollout: dict[str, Any]) -> None:
    """Check that an ended pod is replaced though a finalizer holds it, as Kueue's does until Kueue has counted the end."""
    held = old(0, terminating=True, finished=True, ready=False, container=Container())
    assert planned(held, replicas=1, rollout=rollout).pods == (CreatePod(index=0, incarnation=1),)


ON_IDLE, ASLEEP_SPEC, AWAKE_SPEC = {"policy": "OnIdle"}, {"policy": "Asleep"}, {"policy": "AlwaysAwake"}
COMPLETE = [
    ("awake and routed to", {"routable": True}, READY, AWAKE_SPEC, True),
    ("awake, and not routed to yet", {}, READY, AWAKE_SPEC, False),
    ("awake, and its probe does not pass", {"routable": True, "ready": False}, READY, AWAKE_SPEC, False),
    ("asleep, and a request wakes it", {}, ASLEEP, ON_IDLE, True),
    ("asleep as the spec asks", {}, ASLEEP, ASLEEP_SPEC, True),
    ("asleep, though the spec asks for awake ones", {"routable": True}, ASLEEP, AWAKE_SPEC, False),
    ("it loads", {}, STARTING, AWAKE_SPEC, False),
]


@pytest.mark.parametrize(("facts", "state", "sleep", "complete"), [row[1:] for row in COMPLETE], ids=[row[0] for row in COMPLETE])
def test_a_rollout_is_complete_only_where_requests_reach_every_new_replica(
    facts: dict[str, Any], state: WorkerState, sleep: dict[str, Any], complete: bool
) -> None:
    plan = planned(pod(**facts), states={0: state}, sleep=sleep)
    progressing = condition_of(plan.status.conditions, "Progressing")
    assert progressing is not None
    assert (progressing.reason == "RolloutComplete") is complete, progressing
