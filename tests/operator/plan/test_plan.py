# SPDX-License-Identifier: Apache-2.0
"""The pure plan by tables: what is observed on the left, what is decided on the right."""

from datetime import timedelta
from typing import Any

import pytest

from diffusion_operator.api.deployment_status import ReplicaState
from diffusion_operator.api.meta import Condition, ConditionStatus, settle_conditions, verdict
from diffusion_operator.api.worker_state import WireError, WorkerPhase, WorkerState
from diffusion_operator.errors import ControlRefused, ControlUnreachable
from diffusion_operator.plan.adapters.load_attempts import next_attempt
from diffusion_operator.plan.deployment import plan_deployment
from diffusion_operator.plan.observed.observed import Attempt, Observed, Poll
from diffusion_operator.plan.observed.pods import Container, Exit, Pod, pod_numbers
from diffusion_operator.plan.observed.replica_state import Problem, observe_groups, read_group
from diffusion_operator.plan.replicas.revision import restart_of, template_of
from diffusion_operator.plan.results.actions import CreatePod, DeletePod, SetRoutable
from support.operator.fake_cluster import EPOCH
from support.operator.plan_builders import NOW, READY, REVISION, leaving, made, planned, pod, says


def waits(reason: str) -> Container:
    return Container(waiting_reason=reason)


RESTARTING = says(WorkerPhase.RESTARTING, generation=2, failure=WireError(code="RankFailed", message="rank 1 was ended by SIGKILL"))
STARTING, DRAINING = says(WorkerPhase.STARTING), says(WorkerPhase.DRAINING)
ASLEEP, WAKING = says(WorkerPhase.ASLEEP), says(WorkerPhase.WAKING)
DEATH = Exit(code=70)
UNSCHEDULED = {"scheduled": False, "container": Container()}


GROUP_STATES = [
    ("not scheduled", {"scheduled": False, "container": Container()}, Poll(), ReplicaState.PENDING, None),
    ("image is pulled", {"container": waits("ContainerCreating")}, Poll(), ReplicaState.STARTING, None),
    ("image is missing", {"container": waits("ErrImagePull")}, Poll(), ReplicaState.STARTING, Problem.IMAGE_PULL),
    ("bad image name", {"container": waits("InvalidImageName")}, Poll(), ReplicaState.STARTING, Problem.IMAGE_PULL),
    ("no such volume", {"container": waits("CreateContainerConfigError")}, Poll(), ReplicaState.STARTING, Problem.CONTAINER),
    ("started, silent", {"ready": False}, Poll(), ReplicaState.STARTING, None),
    ("loads", {"ready": False}, Poll(state=STARTING), ReplicaState.STARTING, None),
    ("ready", {}, Poll(state=READY), ReplicaState.AWAKE, None),
    ("drains", {}, Poll(state=DRAINING), ReplicaState.DRAINING, None),
    ("goes to sleep", {}, Poll(state=says(WorkerPhase.SLEEPING)), ReplicaState.SLEEPING, None),
    ("asleep", {}, Poll(state=ASLEEP), ReplicaState.ASLEEP, None),
    ("wakes", {}, Poll(state=WAKING), ReplicaState.WAKING, None),
    ("starts its ranks again", {}, Poll(state=RESTARTING), ReplicaState.STARTING, Problem.RANK_LOST),
    ("terminates by a call", {}, Poll(state=says(WorkerPhase.TERMINATING, draining=True)), ReplicaState.TERMINATING, None),
    ("terminates for its node's sake", {"disrupted": True}, Poll(state=says(WorkerPhase.TERMINATING)), ReplicaState.TERMINATING, None),
    ("terminates, and nobody asked", {}, Poll(state=says(WorkerPhase.TERMINATING)), ReplicaState.FAILED, None),
    ("is deleted", {"terminating": True}, Poll(state=READY), ReplicaState.TERMINATING, None),
    ("evicted", {"finished": True, "finished_message": "Evicted"}, Poll(), ReplicaState.FAILED, Problem.POD_FAILED),
    (
        "start-up error",
        {"container": Container(restarts=1, waiting_reason="CrashLoopBackOff", last_exit=Exit(code=1, message="no model"))},
        Poll(),
        ReplicaState.FAILED,
        Problem.MODEL_ERROR,
    ),
    (
        "dies again and again",
        {"container": Container(restarts=4, waiting_reason="CrashLoopBackOff", last_exit=Exit(code=137))},
        Poll(),
        ReplicaState.FAILED,
        Problem.CRASH_LOOPING,
    ),
    (
        "starts again after one death",
        {"ready": False, "container": Container(running=True, restarts=1, last_exit=Exit(code=70))},
        Poll(state=STARTING),
        ReplicaState.STARTING,
        None,
    ),
    ("is back after a death", {"container": Container(running=True, restarts=4, last_exit=DEATH)}, Poll(READY), ReplicaState.AWAKE, None),
    ("two failed polls", {}, Poll(state=READY, failures=2, failing_for=timedelta(minutes=1)), ReplicaState.AWAKE, None),
    ("three in a second", {}, Poll(state=READY, failures=3, failing_for=timedelta(seconds=1)), ReplicaState.AWAKE, None),
    ("three over 15 s", {}, Poll(state=READY, failures=3, failing_for=timedelta(seconds=15)), ReplicaState.AWAKE, Problem.UNREACHABLE),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "poll", "state", "problem"), [row[1:] for row in GROUP_STATES], ids=[row[0] for row in GROUP_STATES])
def test_the_state_of_a_replica(facts: dict[str, Any], poll: Poll, state: ReplicaState, problem: Problem | None) -> None:
    group = read_group(pod(**facts), poll, None, made())
    assert (group.state, group.problem) == (state, problem)


def test_after_an_operators_restart_a_silent_replica_keeps_its_recorded_state() -> None:
    status = {"replicaStates": [{"index": 0, "state": "Asleep", "leaderPod": "d-0-0", "restarts": 0}]}
    (group,) = observe_groups(Observed(deployment=made(status), default_image="i", pods=(pod(),)))
    assert group.state is ReplicaState.ASLEEP


@pytest.mark.parametrize("status", [{}, {"replicaStates": [{"index": 0, "state": "Awake", "leaderPod": "d-0-0", "restarts": 0}]}])
@pytest.mark.parametrize("failing_s", [1, 60])
@pytest.mark.parametrize("routable", [True, False])
def test_after_an_operators_restart_a_silent_replica_stays_in_service_or_out_of_it(
    status: dict[str, Any], failing_s: int, routable: bool
) -> None:
    """Check that the routable label of a silent replica stays as it is. The status is of this version, or of one before without names of
    replicas."""
    pods = (pod(0, routable=routable), pod(1, routable=True))
    polls = {"uid-0-0": Poll(failures=3, failing_for=timedelta(seconds=failing_s)), "uid-1-0": Poll(READY)}
    plan = plan_deployment(Observed(deployment=made(status, replicas=2), default_image="worker:1", pods=pods, polls=polls), NOW)
    assert [one for one in plan.pods if isinstance(one, SetRoutable)] == []


def test_an_index_is_its_newest_pod() -> None:
    pods = (pod(0, 1), pod(0, 2, terminating=True), pod(1, 0, terminating=True))
    groups = observe_groups(Observed(deployment=made(), default_image="i", pods=pods))
    assert [(group.pod.name, group.state) for group in groups] == [("d-0-1", ReplicaState.STARTING), ("d-1-0", ReplicaState.TERMINATING)]


@pytest.mark.parametrize(
    ("name", "numbers"),
    [("d-0-0", (0, 0)), ("d-12-345", (12, 345)), ("d-0", None), ("d-a-0", None), ("dd-0-0", None), ("d-0-0-0", None)],
)
def test_index_and_incarnation_come_from_the_name(name: str, numbers: tuple[int, int] | None) -> None:
    assert pod_numbers("d", name) == numbers


def test_missing_replicas_are_made_at_free_indices_above_every_known_incarnation() -> None:
    status = {"replicaStates": [{"index": 2, "state": "Awake", "incarnation": 7}]}
    plan = planned(pod(1), pod(0, 4, terminating=True), status=status, replicas=3)
    assert [one for one in plan.pods if isinstance(one, CreatePod)] == [CreatePod(0, 5), CreatePod(2, 8)]


def test_of_two_pods_of_one_replica_the_older_goes_and_none_is_made() -> None:
    plan = planned(pod(0, 0), pod(0, 1), pod(1, 3, terminating=True), pod(1, 4), states={0: ASLEEP}, replicas=2)
    assert [(one.name, one.why) for one in plan.pods if isinstance(one, DeletePod)] == [
        ("d-0-0", "there is a newer pod of the same replica")
    ]
    assert [one for one in plan.pods if isinstance(one, CreatePod)] == []


VICTIMS = [
    ("the failed one", [pod(0), pod(1, finished=True), pod(2)], {}, "d-1-0"),
    ("the pending one", [pod(0), pod(1), pod(2, **UNSCHEDULED)], {}, "d-2-0"),
    ("the sleeping one", [pod(0), pod(1), pod(2)], {1: ASLEEP}, "d-1-0"),
    ("the idle one", [pod(0), pod(1)], {0: says(WorkerPhase.READY, in_flight=2)}, "d-1-0"),
    ("the newest", [pod(0), pod(1), pod(2)], {}, "d-2-0"),
    ("the one chosen before", [pod(0), pod(1, routable=True)], {}, "d-0-0"),
]


@pytest.mark.parametrize(("pods", "states", "victim"), [row[1:] for row in VICTIMS], ids=[row[0] for row in VICTIMS])
def test_scaling_down_takes(pods: list[Pod], states: dict[int, WorkerState], victim: str) -> None:
    plan = planned(*pods, states=states, replicas=len(pods) - 1)
    assert leaving(plan) == [victim]


REPLACEMENTS = [
    ("one of two that serve", [pod(0, revision="old"), pod(1, revision="old")], {}, ["d-1-0"]),
    ("none while another one starts", [pod(0, revision="old"), pod(1, ready=False)], {1: STARTING}, []),
    ("none while another one's probe fails", [pod(0, revision="old"), pod(1, ready=False)], {}, []),
    ("none before another one is routed to", [pod(0, revision="old"), pod(1)], {}, []),
    ("the next when the new one is routed to", [pod(0, revision="old"), pod(1, routable=True)], {}, ["d-0-0"]),
    ("none while one is missing", [pod(0, revision="old")], {}, []),
    ("at once what does not serve", [pod(0, revision="old"), pod(1, revision="old", **UNSCHEDULED)], {}, ["d-1-0"]),
    ("none when all are new", [pod(0), pod(1)], {}, []),
    ("a sleeping one first", [pod(0, revision="old"), pod(1, revision="old")], {0: ASLEEP}, ["d-0-0"]),
]  # fmt: skip


@pytest.mark.parametrize(("pods", "states", "deleted"), [row[1:] for row in REPLACEMENTS], ids=[row[0] for row in REPLACEMENTS])
def test_replacing_takes(pods: list[Pod], states: dict[int, WorkerState], deleted: list[str]) -> None:
    plan = planned(*pods, states=states, replicas=2)
    assert leaving(plan) == deleted


ROUTES = [
    ("all that are awake", {}, {0: True, 1: True}),
    ("only the awake one", {1: ASLEEP}, {0: True}),
    ("all while none is awake", {0: ASLEEP, 1: WAKING}, {0: True, 1: True}),
    ("none that loads for the first time", {0: STARTING, 1: ASLEEP}, {1: True}),
]


@pytest.mark.parametrize(("states", "routed"), [row[1:] for row in ROUTES], ids=[row[0] for row in ROUTES])
def test_routed_to_are(states: dict[int, WorkerState], routed: dict[int, bool]) -> None:
    plan = planned(pod(0), pod(1), states=states, replicas=2, sleep={"policy": "Asleep"} if states else {})
    assert {one.name for one in plan.pods if isinstance(one, SetRoutable) and one.routable} == {f"d-{index}-0" for index in routed}


REVISIONS = [
    ("model", {"model": {"source": {"path": "/other"}}}, True),
    ("dtype", {"model": {"source": {"path": "/m"}, "dtype": "Float32"}}, True),
    ("image", {"engine": {"image": "i"}}, True),
    ("environment", {"engine": {"env": [{"name": "A"}]}}, True),
    ("ranks", {"parallelism": {"ranksPerReplica": 2}}, True),
    ("resources", {"resources": {"limits": {"cpu": 1}}}, True),
    ("slots", {"lora": {"maxLoaded": 5}}, True),
    ("startup", {"startup": {"timeoutSeconds": 60}}, True),
    ("replicas", {"replicas": 5}, False),
    ("sleep", {"sleep": {"policy": "Asleep", "drainTimeoutSeconds": 1}}, False),
    ("service", {"service": {"port": 81}}, False),
    ("adapters' drain", {"lora": {"drainTimeoutSeconds": 9}}, False),
]


@pytest.mark.parametrize(("spec", "changes"), [row[1:] for row in REVISIONS], ids=[row[0] for row in REVISIONS])
def test_the_revision_changes_with_what_a_pod_is_made_of(spec: dict[str, Any], changes: bool) -> None:
    assert (template_of(made(**spec), default_image="worker:1").revision != REVISION) is changes


KEPT = {"defaultEngineImage": "kept:1", "defaultEngineImageFor": restart_of(made())}
OTHER = template_of(made(), default_image="other:1").revision
IMAGES = [
    ("the operator's default where nothing runs and none is kept", [], {}, "worker:2"),
    ("the one that is kept", [], KEPT, "kept:1"),
    ("the one that is kept, whatever runs", [pod(revision=OTHER, image="other:1")], KEPT, "kept:1"),
    ("not one that was kept for another restart", [], KEPT | {"defaultEngineImageFor": "other"}, "worker:2"),
    ("that of a pod", [pod(revision=OTHER, image="other:1")], {}, "other:1"),
    ("that of the oldest pod", [pod(0, image="worker:1", created_at=NOW), pod(1, revision=OTHER, image="other:1")], {}, "other:1"),
    ("not that of a pod of another spec", [pod(revision="old-1", image="other:1")], {}, "worker:2"),
    ("not that of a pod that goes", [pod(revision=OTHER, image="other:1", terminating=True)], {}, "worker:2"),
    ("not one that somebody gave a pod", [pod(revision=OTHER, image="mine:1")], {}, "worker:2"),
]


@pytest.mark.parametrize(("pods", "status", "image"), [row[1:] for row in IMAGES], ids=[row[0] for row in IMAGES])
def test_the_image_where_the_spec_names_none_is(pods: list[Pod], status: dict[str, Any], image: str) -> None:
    assert template_of(made(status), default_image="worker:2", pods=pods).image == image


def test_two_operators_with_different_defaults_agree_on_the_pods_that_either_made() -> None:
    pods = [pod(0, image="worker:1"), pod(1, revision=OTHER, image="other:1", created_at=NOW)]
    templates = {template_of(made(), default_image=default, pods=pods) for default in ("worker:1", "other:1")}
    assert {template.image for template in templates} == {"worker:1"} and len(templates) == 1


def test_a_revision_is_a_label_value() -> None:
    assert len(REVISION) <= 63
    assert REVISION.replace("-", "").isalnum()


ATTEMPTS = [
    ("taken", None, 1, 5.0, None),
    ("no answer: the worker may still be at it", ControlUnreachable("no answer"), 1, 5.0, None),
    ("a race", ControlRefused(WireError(code="Asleep", retryable=True), status=409), 0, 1.0, None),
    ("busy, with a time", ControlRefused(WireError(code="Busy", retryable=True, retry_after_seconds=4), status=503), 0, 4.0, None),
    ("a passing error", ControlRefused(WireError(code="RankFailed", retryable=True), status=500), 1, 10.0, "RankFailed"),
    ("a lasting error", ControlRefused(WireError(code="InvalidAdapter"), status=400), 1, 600.0, "InvalidAdapter"),
]


@pytest.mark.parametrize(("error", "count", "delay_s", "code"), [row[1:] for row in ATTEMPTS], ids=[row[0] for row in ATTEMPTS])
def test_after_a_push(error: Any, count: int, delay_s: float, code: str | None) -> None:
    attempt = next_attempt(None, error, now=EPOCH)
    assert (attempt.count, (attempt.next_retry - EPOCH).total_seconds()) == (count, delay_s)
    assert (attempt.error.code if attempt.error else None) == code


def test_pauses_between_pushes_grow_to_ten_minutes() -> None:
    error = ControlRefused(WireError(code="RankFailed", retryable=True), status=500)
    attempt: Attempt | None = None
    pauses = []
    for _ in range(8):
        attempt = next_attempt(attempt, error, now=EPOCH)
        pauses.append((attempt.next_retry - EPOCH).total_seconds())
    assert pauses == [10, 20, 40, 80, 160, 320, 600, 600]


def test_a_condition_keeps_its_time_until_its_status_changes() -> None:
    before = Condition(type="Ready", status=ConditionStatus.FALSE, last_transition_time=EPOCH, reason="Starting", message="")
    later = EPOCH + timedelta(hours=1)
    same, other = (
        settle_conditions((verdict("Ready", value, "Reason", ""),), previous=(before,), generation=2, now=later)[0]
        for value in (False, True)
    )
    assert (same.last_transition_time, same.reason, same.observed_generation) == (EPOCH, "Reason", 2)
    assert other.last_transition_time == later
