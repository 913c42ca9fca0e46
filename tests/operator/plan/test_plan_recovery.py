# SPDX-License-Identifier: Apache-2.0
"""Handling of failing replicas, by tables."""

from datetime import timedelta
from typing import Any

import pytest

from diffusion_operator.api.deployment_status import ReplicaState
from diffusion_operator.api.meta import condition_of
from diffusion_operator.api.worker_state import WireError, WorkerPhase, WorkerState
from diffusion_operator.plan.deployment import DeploymentPlan, plan_deployment
from diffusion_operator.plan.observed.observed import Observed, Poll
from diffusion_operator.plan.observed.pods import Container, Exit, Pod, read_pod
from diffusion_operator.plan.observed.replica_state import Problem, read_group
from diffusion_operator.plan.replicas.recovery import backoff
from diffusion_operator.plan.results.actions import CreatePod, DeletePod, SetRoutable
from diffusion_operator.plan.results.events import deployment_events
from support.operator.fake_cluster import EPOCH
from support.operator.plan_builders import NOW, READY, REVISION, made, planned, pod, says

DIED, REFUSED = Exit(code=70, message="rank 1 died"), Exit(code=1, message="no such model")
EVICTED = {
    "finished": True,
    "finished_message": "Evicted: Usage of EmptyDir volume exceeds the limit",
    "ready": False,
    "container": Container(),
}
REJECTED = EVICTED | {"finished_message": "UnexpectedAdmissionError: no healthy devices", "node_fault": True}


def down(restarts: int, ended: Exit = DIED) -> dict[str, Any]:
    """Return the facts of a pod whose container waits for the kubelet's next restart."""
    return {"ready": False, "container": Container(restarts=restarts, waiting_reason="CrashLoopBackOff", last_exit=ended)}


def up(restarts: int, ended: Exit = DIED) -> dict[str, Any]:
    return {"ready": False, "container": Container(running=True, restarts=restarts, last_exit=ended)}


def recorded(
    failures: int = 0, *, pod: str = "d-0-0", restarts: int = 0, age_s: float = 60.0, next_in_s: float | None = None, **more: Any
) -> dict[str, Any]:
    """Build a `replicaStates` entry for replica 0 in the state Failed.

    It has been failing for `age_s` seconds, and its restart is `next_in_s` seconds ahead; `more` overrides fields.
    """
    group: dict[str, Any] = {"index": 0, "state": "Failed", "leaderPod": pod, "incarnation": 0, "restarts": restarts, "revision": REVISION}
    if failures:
        group |= {"failures": failures, "failingSince": (NOW - timedelta(seconds=age_s)).isoformat()}
    if next_in_s is not None:
        group["nextRestartTime"] = (NOW + timedelta(seconds=next_in_s)).isoformat()
    return group | more


def seen(found: Pod, before: dict[str, Any] | None, poll: Poll | None = None, others: tuple[Pod, ...] = (), **spec: Any) -> DeploymentPlan:
    status = {"replicaStates": [before], "currentRevision": REVISION} if before else {}
    polls = {found.uid: poll} if poll is not None else {}
    polls |= {one.uid: Poll(state=READY) for one in others}
    deployment = made(status, replicas=1 + len(others), **spec)
    return plan_deployment(Observed(deployment=deployment, default_image="worker:1", pods=(found, *others), polls=polls), NOW)


# name, the pod, the record, failures, seconds to the new pod or None, whether it is deleted now
LIVES: list[tuple[str, Pod, dict[str, Any] | None, int | None, float | None, bool]] = [
    ("the kubelet restarts a container that ends, and nothing is counted yet", pod(**down(0)), recorded(), None, None, False),
    ("a restart in place is counted when the container runs again", pod(**up(1)), recorded(), 1, None, False),
    ("a restart in place is counted once", pod(**up(1)), recorded(1, restarts=1), 1, None, False),
    ("three restarts in place are no loop yet", pod(**up(3)), recorded(2, restarts=2), 3, None, False),
    ("the fourth end is a loop", pod(**down(3)), recorded(3, restarts=3), 3, 40, False),
    ("the fourth end is counted once", pod(**down(3)), recorded(3, restarts=3, next_in_s=30), 3, 30, False),
    ("a pod in a loop is deleted after the pause", pod(**down(3)), recorded(3, restarts=3, next_in_s=0), 3, 0, True),
    ("a pod in a loop stays while its container starts once more", pod(**up(4)), recorded(4, restarts=4, next_in_s=-9), 4, -9, False),
    ("a pod in a loop stays when it is ready", pod(**(up(4) | {"ready": True})), recorded(4, restarts=4, next_in_s=-9), 4, None, False),
    ("the count outlives the pod", pod(0, 1), recorded(4, restarts=3, next_in_s=0), 4, None, False),
    ("the next pod adds to the count", pod(0, 1, **up(1)), recorded(4, pod="d-0-1", restarts=0), 5, None, False),
    ("at the threshold the pace slows", pod(0, 1, **down(9)), recorded(5, pod="d-0-1", restarts=9), 5, 600, False),
    ("above the threshold a pod is still made", pod(0, 1, **down(9)), recorded(5, pod="d-0-1", restarts=9, next_in_s=0), 5, 0, True),
    ("the pace stays slow when the window is over", pod(0, 1, **down(9)), recorded(5, pod="d-0-1", restarts=9, age_s=9999), 5, 600, False),
    ("restarts of long ago are no loop", pod(**down(9)), recorded(restarts=9), None, None, False),
    ("a replica that was given up and starts in place is counted once", pod(**up(4)), recorded(3, restarts=3, next_in_s=9), 4, 9, False),
    ("the count begins again after the window", pod(0, 1, **down(10)), recorded(5, pod="d-0-1", restarts=9, age_s=9999), 1, None, False),
    ("another template ends the count", pod(0, 1), recorded(5, revision="old"), None, None, False),
    ("the count of a live replica ends with the window", pod(), recorded(5, age_s=3600), None, None, False),
    ("the count of a live replica does not end before the window", pod(), recorded(5, age_s=3599), 5, None, False),
    ("a failure after the window is the first", pod(**up(3)), recorded(2, restarts=2, age_s=3600), 1, None, False),
    ("a pod whose container cannot start stays where it is", pod(**down(9, REFUSED)), recorded(3, restarts=9), 3, None, False),
    ("evicted", pod(**EVICTED), recorded(), 1, 10, False),
    ("evicted, after the pause", pod(**EVICTED), recorded(1, next_in_s=0), 1, 0, True),
    ("evicted once more", pod(0, 1, **EVICTED), recorded(1), 2, 20, False),
    ("evicted without end", pod(0, 5, **EVICTED), recorded(4), 5, 600, False),
    ("evicted without end, after the window", pod(0, 5, **EVICTED), recorded(5, age_s=9999), 1, 10, False),
    ("rejected by its node", pod(**REJECTED), recorded(), None, 10, False),
    ("rejected by its node, after the pause", pod(**REJECTED), recorded(next_in_s=0), None, 0, True),
    ("a node's fault leaves the failures alone", pod(**REJECTED), recorded(5), 5, 10, False),
]  # fmt: skip


@pytest.mark.parametrize(("found", "before", "failures", "pause_s", "goes"), [row[1:] for row in LIVES], ids=[row[0] for row in LIVES])
def test_failures_are_counted_and_waited_for(
    found: Pod, before: dict[str, Any] | None, failures: int | None, pause_s: float | None, goes: bool
) -> None:
    poll = Poll(state=READY) if found.ready else None
    plan = seen(found, before, poll)
    [group] = plan.status.replica_states
    due = (group.next_restart_time - NOW).total_seconds() if group.next_restart_time else None
    assert (group.failures, due) == (failures, pause_s)
    assert (group.failing_since is None) is (failures is None)
    assert [one.name for one in plan.pods if isinstance(one, DeletePod)] == ([found.name] if goes else [])


def test_pauses_double_up_to_a_limit() -> None:
    recovery = made(replicaRecovery={"backoffSeconds": 10, "backoffMaxSeconds": 100}).spec.replica_recovery
    assert [backoff(recovery, count).total_seconds() for count in (1, 2, 3, 4, 5, 99)] == [10, 20, 40, 80, 100, 100]


def test_a_spent_replica_says_so_and_what_to_do() -> None:
    plan = seen(pod(**down(9)), recorded(5, restarts=9))
    ready, degraded = condition_of(plan.status.conditions, "Ready"), condition_of(plan.status.conditions, "Degraded")
    assert ready is not None
    assert degraded is not None
    assert (ready.status.value, ready.reason) == ("False", "CrashLooping")
    assert (degraded.status.value, degraded.reason) == ("True", "CrashLooping")
    text = "5 failures within 3600 s, so a new pod is made every ten minutes at most, the next at 00:15:00 UTC (spec.replicaRecovery): "
    assert text in ready.message
    assert "rank 1 died" in ready.message
    [event] = [one for one in deployment_events(made().status, plan.status) if one.reason == "CrashLooping"]
    assert "a new pod is made every ten minutes at most" in event.message


def node(name: str = "node", *, faults: int = 1, for_s: float = 60) -> dict[str, Any]:
    return {"name": name, "faults": faults, "until": (NOW + timedelta(seconds=for_s)).isoformat()}


# name, nodes in the status of the last pass, the record of the replica, faults of each node, seconds to the new pod
NODES: list[tuple[str, list[dict[str, Any]], dict[str, Any], dict[str, int], float]] = [
    ("the first fault", [], recorded(), {"node": 1}, 10),
    ("the third, with the pause of a third", [node(faults=2)], recorded(), {"node": 3}, 40),
    ("counted once", [node(faults=2)], recorded(next_in_s=7), {"node": 2}, 7),
    ("after ten minutes none is left", [node(faults=9, for_s=0)], recorded(), {"node": 1}, 10),
    ("each node has faults of its own", [node("other", faults=4)], recorded(), {"node": 1, "other": 4}, 10),
]


@pytest.mark.parametrize(("before", "record", "faults", "pause_s"), [row[1:] for row in NODES], ids=[row[0] for row in NODES])
def test_faults_of_nodes_are_counted_and_waited_for(
    before: list[dict[str, Any]], record: dict[str, Any], faults: dict[str, int], pause_s: float
) -> None:
    deployment = made({"replicaStates": [record], "currentRevision": REVISION, "avoidedNodes": before})
    plan = plan_deployment(Observed(deployment=deployment, default_image="worker:1", pods=(pod(**REJECTED),)), NOW)
    assert {one.name: one.faults for one in plan.status.avoided_nodes} == faults
    [replica] = plan.status.replica_states
    assert (replica.failures, replica.next_restart_time) == (None, NOW + timedelta(seconds=pause_s))
    assert "node node is at fault; a new pod, which prefers other nodes, is made at" in (replica.message or "")


def test_a_new_pod_prefers_nodes_without_faults_of_their_own() -> None:
    deployment = made({"avoidedNodes": [node("a"), node("b"), node("over", for_s=0)]})
    plan = plan_deployment(Observed(deployment=deployment, default_image="worker:1", pods=()), NOW)
    assert plan.created == (CreatePod(0, 0, avoided_nodes=("a", "b")),)


DISRUPTED = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
ENDS = [
    ("pressure on the node", {"reason": "Evicted", "conditions": [DISRUPTED]}, True),
    ("too much of its own disk", {"reason": "Evicted"}, False),
    ("a shutdown", {"reason": "Terminated", "message": "Pod was terminated in response to imminent node shutdown."}, True),
    ("a device that is gone", {"reason": "UnexpectedAdmissionError"}, True),
    ("devices on two sockets", {"reason": "TopologyAffinityError"}, True),
    ("a label of the node was taken away", {"reason": "NodeAffinity"}, True),
    ("others came first", {"reason": "OutOfcpu"}, True),
    ("others have the GPUs", {"reason": "OutOfnvidia.com/gpu"}, True),
    ("past its deadline", {"reason": "DeadlineExceeded"}, False),
    ("no reason", {}, False),
]


@pytest.mark.parametrize(("status", "fault"), [row[1:] for row in ENDS], ids=[row[0] for row in ENDS])
@pytest.mark.parametrize("phase", ["Failed", "Running"])
def test_what_ended_a_pod_is_the_fault_of_its_node_or_its_own(status: dict[str, Any], fault: bool, phase: str) -> None:
    metadata = {"name": "d-0-0", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
    assert read_pod({"metadata": metadata, "status": {"phase": phase} | status}, index=0, incarnation=0).node_fault is (
        fault and phase == "Failed"
    )


def test_a_waiting_replica_says_when_its_next_pod_comes() -> None:
    plan = seen(pod(**down(3)), recorded(4, restarts=3, next_in_s=30))
    assert "a new pod is made at 00:05:30 UTC" in (plan.status.replica_states[0].message or "")


KILLED, ON_DEVICE = Exit(code=137, reason="OOMKilled"), Exit(code=70, message="CUDA out of memory. Tried to allocate 2 GiB")
OOM = [
    ("host memory with a limit", KILLED, {"memory": "2Gi"}, "its limit of 2Gi (spec.resources.limits.memory)", "OOMKilled"),
    ("host memory without a limit", KILLED, {}, "it has no limit (spec.resources.limits.memory), so its node has too little", "OOMKilled"),
    ("memory of a device", ON_DEVICE, {}, "Tried to allocate 2 GiB", "OutOfMemory"),
]


@pytest.mark.parametrize(("ended", "limits", "words", "code"), [row[1:] for row in OOM], ids=[row[0] for row in OOM])
def test_a_lack_of_memory_says_of_which(ended: Exit, limits: dict[str, str], words: str, code: str) -> None:
    plan = planned(pod(**down(1, ended)), resources={"limits": limits})
    ready = condition_of(plan.status.conditions, "Ready")
    assert ready is not None
    assert words in ready.message
    failure = plan.status.replica_states[0].last_failure
    assert failure is not None
    assert failure.code == code


UNUSABLE = "rank 0 (pid 9) exited with code 70: DeviceUnavailable: cuda:0 cannot be used: CUDA error: uncorrectable ECC error encountered"
FULL = "rank 0 (pid 9) exited with code 70: InsufficientMemory: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
ABSENT = "DeviceUnavailable: --device cuda: expected a GPU that torch can use, found none: Found no NVIDIA driver on your system."


@pytest.mark.parametrize("restarts", [1, 3])
@pytest.mark.parametrize(
    ("code", "words", "reason"),
    [(70, UNUSABLE, "GPUUnavailable"), (1, ABSENT, "GPUUnavailable"), (70, FULL, "InsufficientGPUMemory")],
    ids=["refused", "absent", "full"],
)
def test_a_device_at_which_a_worker_ends_is_the_reason_in_its_own_words(code: int, words: str, reason: str, restarts: int) -> None:
    plan = seen(pod(**down(restarts, Exit(code=code, message=words))), recorded(5, restarts=restarts))
    for type_, status in (("Ready", "False"), ("Degraded", "True")):
        found = condition_of(plan.status.conditions, type_)
        assert found is not None
        assert (found.status, found.reason) == (status, reason)
        assert words in found.message


@pytest.mark.parametrize(("words", "reason"), [(UNUSABLE, "GPUUnavailable"), (FULL, "InsufficientGPUMemory")], ids=["refused", "full"])
def test_a_device_at_which_the_ranks_of_a_live_worker_end_is_the_reason(words: str, reason: str) -> None:
    error = WireError(code="EngineFailed", message=f"the rank group was lost too often: {words}")
    ready = condition_of(seen(pod(ready=False), None, Poll(state=says(WorkerPhase.FAILED, failure=error))).status.conditions, "Ready")
    assert ready is not None
    assert (ready.reason, words in ready.message) == (reason, True)


def restarting(age_s: float) -> WorkerState:
    error = WireError(code="RankFailed", message="rank 0 stopped")
    return says(WorkerPhase.RESTARTING, state_age_seconds=age_s, failure=error)


SILENT = Poll(state=READY, failures=99, failing_for=timedelta(minutes=5), error="no answer")
SHORT = Poll(state=READY, failures=99, failing_for=timedelta(seconds=299), error="no answer")
OTHER = (pod(1, routable=True),)
LOST = {"ready": False, "lost": True, "routable": True}
# name, the pod, its worker's report, other pods, whether the pod is replaced
GIVEN_UP: list[tuple[str, Pod, Poll, tuple[Pod, ...], bool]] = [
    ("ranks start again", pod(), Poll(state=restarting(119)), (), False),
    ("ranks do not come up", pod(), Poll(state=restarting(120)), (), True),
    ("unreachable for less than five minutes", pod(), SHORT, OTHER, False),
    ("unreachable for five minutes", pod(), SILENT, OTHER, True),
    ("the only replica, unreachable for five minutes", pod(), SILENT, (), True),
    ("its node is lost", pod(**LOST), SILENT, OTHER, False),
]


@pytest.mark.parametrize(("found", "poll", "others", "gone"), [row[1:] for row in GIVEN_UP], ids=[row[0] for row in GIVEN_UP])
def test_a_replica_is_given_up(found: Pod, poll: Poll, others: tuple[Pod, ...], gone: bool) -> None:
    plan = seen(found, recorded(state="Awake"), poll, others, startup={"timeoutSeconds": 60})
    assert (plan.status.replica_states[0].next_restart_time is not None) is gone
    assert plan.status.replica_states[0].failures == (1 if gone else None)


@pytest.mark.parametrize("poll", [SILENT, Poll(state=restarting(999))], ids=["unreachable", "ranks do not come up"])
def test_what_is_given_up_while_it_lives_is_counted_once(poll: Poll) -> None:
    before = recorded(1, state="Awake", next_in_s=5, age_s=5)
    plan = seen(pod(), before, poll, OTHER, startup={"timeoutSeconds": 60})
    assert (plan.status.replica_states[0].failures, plan.status.replica_states[0].next_restart_time) == (1, NOW + timedelta(seconds=5))
    answers = seen(pod(), before, Poll(state=READY), OTHER)
    assert (answers.status.replica_states[0].failures, answers.status.replica_states[0].next_restart_time) == (1, None)


def test_while_no_replica_answers_all_are_left_alone() -> None:
    pods = (pod(0, routable=True), pod(1, routable=True))
    observed = Observed(deployment=made(replicas=2), default_image="worker:1", pods=pods, polls={one.uid: SILENT for one in pods})
    plan = plan_deployment(observed, NOW)
    assert plan.pods == ()
    assert [group.next_restart_time for group in plan.status.replica_states] == [None, None]


def test_an_unreachable_replica_is_routed_to_while_its_probe_passes() -> None:
    plan = seen(pod(routable=True), recorded(state="Awake"), SHORT, OTHER)
    assert not [one for one in plan.pods if isinstance(one, SetRoutable)]
    degraded = condition_of(plan.status.conditions, "Degraded")
    assert degraded is not None
    assert degraded.reason == "ControlUnreachable"


def test_a_replica_on_a_lost_node_is_unrouted_and_named_and_waits_for_the_cluster() -> None:
    plan = seen(pod(**LOST), recorded(state="Awake"), Poll(state=READY, failures=1), OTHER)
    assert plan.pods == (SetRoutable("d-0-0", "uid-0-0", routable=False),)
    assert (plan.status.replica_states[0].state, plan.status.available_replicas) == (ReplicaState.FAILED, 1)
    degraded = condition_of(plan.status.conditions, "Degraded")
    assert degraded is not None
    assert (degraded.reason, "node node does not answer" in degraded.message) == ("NodeLost", True)


def test_a_sleeper_is_routed_to_at_once_when_the_awake_ones_node_is_lost() -> None:
    states = {0: READY, 1: says(WorkerPhase.ASLEEP)}
    plan = planned(pod(**LOST), pod(1), states=states, replicas=2, sleep={"policy": "OnIdle"})
    assert SetRoutable("d-1-0", "uid-1-0", routable=True) in plan.pods


def test_what_the_cluster_removes_is_replaced_at_once_and_counts_no_more() -> None:
    plan = seen(pod(**(LOST | {"terminating": True})), recorded(state="Failed"), None)
    assert [one.incarnation for one in plan.pods if not isinstance(one, SetRoutable | DeletePod)] == [1]
    back = planned(pod(0, 0, terminating=True), pod(0, 1), replicas=1)
    assert (back.status.replicas, [group.incarnation for group in back.status.replica_states], back.pods) == (
        1,
        [1],
        (SetRoutable("d-0-1", "uid-0-1", routable=True),),
    )


def test_recreate_does_not_wait_for_a_pod_that_nobody_can_end() -> None:
    gone = {"terminating": True, "revision": "old"}
    assert planned(pod(**gone), rollout={"type": "Recreate"}).pods == ()
    assert len(planned(pod(**(gone | LOST)), rollout={"type": "Recreate"}).pods) == 1


CONDITIONS = [
    ("serves", [("Ready", "True", ""), ("ContainersReady", "True", "")], False),
    ("probe fails", [("Ready", "False", "ContainersNotReady"), ("ContainersReady", "False", "ContainersNotReady")], False),
    ("a gate of the user", [("Ready", "False", "ReadinessGatesNotReady"), ("ContainersReady", "True", "")], False),
    ("not ready by the node controller", [("Ready", "False", ""), ("ContainersReady", "True", "")], True),
    ("no word yet", [], False),
]


@pytest.mark.parametrize(("conditions", "lost"), [row[1:] for row in CONDITIONS], ids=[row[0] for row in CONDITIONS])
def test_a_lost_node_is_seen_without_rights_on_nodes(conditions: list[tuple[str, str, str]], lost: bool) -> None:
    listed = [{"type": type_, "status": status} | ({"reason": reason} if reason else {}) for type_, status, reason in conditions]
    metadata = {"name": "d-0-0", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
    assert read_pod({"metadata": metadata, "status": {"conditions": listed}}, index=0, incarnation=0).lost is lost


NO_IMAGE = {"ready": False, "container": Container(waiting_reason="ErrImagePull", waiting_message="pull access denied")}


def unscheduled(words: str) -> dict[str, Any]:
    return {"scheduled": False, "container": Container(), "unschedulable": words}


NO_GPU, TAINTED = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.", "0/1 nodes are available: 1 had untolerated taint {a: b}."
SHOWN = [
    ("an image", NO_IMAGE, "Progressing", "ImagePullError", "ErrImagePull: pull access denied"),
    ("a GPU", unscheduled(NO_GPU), "Scheduled", "InsufficientGPU", NO_GPU),
    ("a queue", unscheduled("") | {"gated": True}, "Scheduled", "WaitingForQuota", "1 of 1 replicas wait behind a scheduling gate"),
    ("a taint", unscheduled(TAINTED), "Scheduled", "Unschedulable", TAINTED),
]


@pytest.mark.parametrize(("facts", "type_", "reason", "words"), [row[1:] for row in SHOWN], ids=[row[0] for row in SHOWN])
def test_what_others_say_of_a_pod_is_told_in_their_words(facts: dict[str, Any], type_: str, reason: str, words: str) -> None:
    said = condition_of(planned(pod(**facts)).status.conditions, type_)
    assert said is not None
    assert (said.status.value, said.reason, words in said.message) == ("False", reason, True)


@pytest.mark.parametrize("skew", [timedelta(days=-3), timedelta(0), timedelta(days=3)])
def test_clocks_of_other_machines_decide_nothing(skew: timedelta) -> None:
    ended = Exit(code=70, finished_at=NOW + skew)
    plans = [seen(pod(created_at=EPOCH + skew, **facts), recorded(3, restarts=3)) for facts in (down(3, ended), up(3, ended), EVICTED)]
    due = [plan.status.replica_states[0].next_restart_time for plan in plans]
    assert due == [NOW + timedelta(seconds=40), None, NOW + timedelta(seconds=80)]
    assert not [one for plan in plans for one in plan.pods]


def test_an_operator_that_sees_a_failing_replica_for_the_first_time_counts_what_the_kubelet_did() -> None:
    assert seen(pod(**up(2)), None).status.replica_states[0].failures == 2


def test_a_lost_pod_has_failed_whatever_it_said_last() -> None:
    group = read_group(pod(**LOST), Poll(state=READY), None, made())
    assert (group.state, group.problem) == (ReplicaState.FAILED, Problem.NODE_LOST)
