# SPDX-License-Identifier: Apache-2.0
"""Conditions about sleep, by tables: reports of the replicas on the left, conditions on the right."""

from typing import Any

import pytest

from diffusion_operator.api.deployment_spec import SleepLevel
from diffusion_operator.api.deployment_status import DeploymentStatus
from diffusion_operator.api.worker_state import Operation, WireError, WorkerPhase, WorkerState
from support.operator.plan_builders import made, planned, pod, says

ON_IDLE, ASLEEP_POLICY, AWAKE_POLICY = {"policy": "OnIdle"}, {"policy": "Asleep"}, {"policy": "AlwaysAwake"}
READY, DRAINING, SLEEPING = says(WorkerPhase.READY), says(WorkerPhase.DRAINING), says(WorkerPhase.SLEEPING)
ASLEEP, WAKING = says(WorkerPhase.ASLEEP), says(WorkerPhase.WAKING)


def ended(kind: str, code: str, phase: WorkerPhase) -> WorkerState:
    """Return the state of a worker whose last operation failed with this code."""
    return says(phase, last_operation=Operation(operation_id="o", kind=kind, error=WireError(code=code, message="why")))


def given_up(kind: str, code: str) -> WorkerState:
    """Return the state of a worker whose ranks restart after a failed operation; the operation is still under way."""
    return says(WorkerPhase.RESTARTING, operation=Operation(operation_id="o", kind=kind), failure=WireError(code=code, message="why"))


def told(*states: WorkerState, ready: bool = True, **spec: Any) -> dict[str, str]:
    """Return each condition's status and reason, by its type, after a plan for replicas in these states."""
    plan = planned(*(pod(index, ready=ready, routable=True) for index in range(len(states))), states=dict(enumerate(states)), **spec)
    return {one.type: f"{one.status.value} {one.reason}" for one in plan.status.conditions}


TOLD = [
    # subject, the replicas, the policy, Ready, Awake, Available, Degraded
    ("awake", [READY], ON_IDLE, "True Serving", "True AllAwake", "True MinimumAvailable", "False AsExpected"),
    ("asleep and wakeable", [ASLEEP], ON_IDLE, "True AsleepWakeable", "False AllAsleep", "False Sleeping", "False AsExpected"),
    ("going to sleep for idleness", [DRAINING], ON_IDLE, "True AsleepWakeable", "False GoingToSleep", "False Sleeping", "False AsExpected"),
    ("waking for a request", [WAKING], ON_IDLE, "True AsleepWakeable", "False Waking", "False Sleeping", "False AsExpected"),
    ("some sleep", [READY, ASLEEP], ON_IDLE, "True Serving", "True SomeAwake", "True MinimumAvailable", "False AsExpected"),
    ("most sleep", [READY, ASLEEP, ASLEEP], ON_IDLE, "True Serving", "True SomeAwake", "True MinimumAvailable", "False AsExpected"),
    ("asked to sleep", [ASLEEP], ASLEEP_POLICY, "False SleepRequested", "False AllAsleep", "False Sleeping", "False AsExpected"),
    (
        "asked to, and on its way",
        [SLEEPING], ASLEEP_POLICY,
        "False SleepRequested", "False GoingToSleep", "False Sleeping", "False AsExpected",
    ),
    ("asked to wake", [ASLEEP], AWAKE_POLICY, "False Waking", "False Waking", "False Sleeping", "False AsExpected"),
    (
        "no memory for a wake on demand",
        [ended("wake", "InsufficientMemory", WorkerPhase.ASLEEP)], ON_IDLE,
        "False InsufficientGPUMemory", "False InsufficientGPUMemory", "False Sleeping", "False AsExpected",
    ),
    (
        "no memory for a wake, and the next try runs",
        [ended("wake", "InsufficientMemory", WorkerPhase.WAKING)], ON_IDLE,
        "False InsufficientGPUMemory", "False InsufficientGPUMemory", "False Sleeping", "False AsExpected",
    ),
    (
        "no memory for a wake, and it is put back to sleep",
        [ended("wake", "InsufficientMemory", WorkerPhase.SLEEPING)], ON_IDLE,
        "False InsufficientGPUMemory", "False InsufficientGPUMemory", "False Sleeping", "False AsExpected",
    ),
    (
        "no memory for a wake that the policy asks for",
        [ended("wake", "InsufficientMemory", WorkerPhase.ASLEEP)], AWAKE_POLICY,
        "False Waking", "False InsufficientGPUMemory", "False Sleeping", "False AsExpected",
    ),
    (
        "a wake failed",
        [ended("wake", "RankFailed", WorkerPhase.ASLEEP)], ON_IDLE,
        "False WakeFailed", "False WakeFailed", "False Sleeping", "True WakeFailing",
    ),
    (
        "a wake hung, and the ranks start again",
        [given_up("wake", "Timeout")], ON_IDLE,
        "False WakeFailed", "False WakeFailed", "False MinimumUnavailable", "True WakeFailing",
    ),
    (
        "a wake of one of two failed",
        [READY, ended("wake", "RankFailed", WorkerPhase.ASLEEP)], ON_IDLE,
        "True ServingDegraded", "True SomeAwake", "True MinimumAvailable", "True WakeFailing",
    ),
    ("a wake failed, and nobody wants it awake any more", [ended("wake", "RankFailed", WorkerPhase.ASLEEP)], ASLEEP_POLICY,
     "False SleepRequested", "False AllAsleep", "False Sleeping", "False AsExpected"),
    (
        "a sleep failed",
        [ended("sleep", "RankFailed", WorkerPhase.READY)], ON_IDLE,
        "True ServingDegraded", "True AllAwake", "True MinimumAvailable", "True SleepFailing",
    ),
    (
        "a sleep hung, and the ranks start again",
        [given_up("sleep", "Timeout")], ON_IDLE,
        "False Starting", "False Starting", "False MinimumUnavailable", "True SleepFailing",
    ),
    ("a sleep failed, and nobody wants it asleep any more", [ended("sleep", "RankFailed", WorkerPhase.READY)], AWAKE_POLICY,
     "True Serving", "True AllAwake", "True MinimumAvailable", "False AsExpected"),
    (
        "memory not released",
        [given_up("sleep", "MemoryNotReleased")], ON_IDLE,
        "False MemoryNotReleased", "False Starting", "False MinimumUnavailable", "True MemoryNotReleased",
    ),
    (
        "other weights after a wake",
        [given_up("wake", "VerificationFailed")], ON_IDLE,
        "False VerificationFailed", "False Starting", "False MinimumUnavailable", "True VerificationFailed",
    ),
    (
        "a rank dies while it wakes",
        [given_up("wake", "RankFailed")], ON_IDLE,
        "False RankLost", "False Starting", "False MinimumUnavailable", "True RankLost",
    ),
    ("a sleep that a request cancelled", [ended("sleep", "Cancelled", WorkerPhase.READY)], ON_IDLE,
     "True Serving", "True AllAwake", "True MinimumAvailable", "False AsExpected"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("states", "sleep", "ready", "awake", "available", "degraded"), [row[1:] for row in TOLD], ids=[row[0] for row in TOLD]
)
def test_the_conditions_of(states: list[WorkerState], sleep: dict[str, Any], ready: str, awake: str, available: str, degraded: str) -> None:
    found = told(*states, replicas=len(states), sleep=sleep)
    assert [found[name] for name in ("Ready", "Awake", "Available", "Degraded")] == [ready, awake, available, degraded]
    assert found["Progressing"] in ("True RolloutComplete", "True LoadingModel", "True RolloutProgressing")


def test_a_sleeper_whose_server_does_not_answer_requests_is_not_wakeable() -> None:
    assert told(ASLEEP, ready=False, sleep=ON_IDLE)["Ready"] == "False Waking"


def message(type_: str, status: DeploymentStatus) -> str:
    return next(one.message for one in status.conditions if one.type == type_)


def test_the_message_says_when_a_request_would_be_served() -> None:
    status = planned(pod(), states={0: ASLEEP}, sleep=ON_IDLE | {"wakeTimeoutSeconds": 45}).status
    assert "a request would wake a replica and be served within 45 s" in message("Ready", status)
    rejecting = planned(pod(), states={0: ASLEEP}, sleep=ON_IDLE, coldRequests={"mode": "Reject"}).status
    assert "get 503 (spec.coldRequests.mode is Reject); a later one is served within 120 s" in message("Ready", rejecting)


def test_what_the_schema_cannot_refuse_is_told() -> None:
    text = message("Awake", planned(pod(), sleep=ON_IDLE | {"minAwake": 3}).status)
    assert "spec.sleep.minAwake is 3 and spec.replicas 1, so no replica sleeps" in text
    assert "spec.resources.limits has no memory" in text
    bounded = {"resources": {"limits": {"memory": "8Gi"}}}
    assert "warning" not in message("Awake", planned(pod(), sleep=ON_IDLE, **bounded).status)
    assert "warning" not in message("Awake", planned(pod(), sleep=ON_IDLE | {"level": "Discard"}).status)
    assert "warning" not in message("Awake", planned(pod()).status), "it never sleeps"


STEPS = [
    (DRAINING, {}, "it is going to sleep, and running requests have up to 300 s to finish"),
    (DRAINING, {"drain": "Abort"}, "it is going to sleep, and running requests are aborted"),
    (DRAINING, {"drainTimeoutSeconds": 0}, "it is going to sleep, and running requests are aborted"),
    (SLEEPING, {}, "it is going to sleep and frees its memory"),
    (WAKING, {"wakeTimeoutSeconds": 9}, "it is waking, and has up to 9 s for that (spec.sleep.wakeTimeoutSeconds)"),
    (ASLEEP, {}, None),
]


@pytest.mark.parametrize(("state", "sleep", "text"), STEPS)
def test_a_replica_on_its_way_says_so_without_figures_that_move(state: WorkerState, sleep: dict[str, Any], text: str | None) -> None:
    (group,) = planned(pod(), states={0: state}, sleep=ON_IDLE | sleep).status.replica_states
    assert group.message == text


def test_a_replica_shows_how_its_last_sleep_or_wake_ended() -> None:
    sleep = Operation(operation_id="s", kind="sleep", seconds=0.0421, freed_bytes=7, level=SleepLevel.DISCARD)
    (group,) = planned(pod(), states={0: says(WorkerPhase.ASLEEP, last_operation=sleep)}, sleep=ON_IDLE).status.replica_states
    shown = group.last_operation
    assert shown is not None
    assert (shown.id, shown.kind, shown.level, shown.code) == ("s", "sleep", SleepLevel.DISCARD, None)
    assert (shown.seconds, shown.bytes) == ("0.042", 7)
    (failed,) = planned(pod(), states={0: ended("wake", "Timeout", WorkerPhase.ASLEEP)}, sleep=ON_IDLE).status.replica_states
    assert failed.last_operation is not None
    assert (failed.last_operation.code, failed.last_operation.message, failed.last_operation.bytes) == ("Timeout", "why", None)


def test_the_template_of_a_replica_does_not_depend_on_sleep() -> None:
    plans = [planned(pod(), sleep=sleep, coldRequests=cold) for sleep in ({}, ON_IDLE) for cold in ({}, {"maxHeld": 1})]
    assert len({plan.template.revision for plan in plans}) == 1
    assert made(sleep=ON_IDLE).spec.sleep.idle_seconds == 300
