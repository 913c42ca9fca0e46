# SPDX-License-Identifier: Apache-2.0
"""The state of each replica: its pod, what its server process said last, and what we recorded before.

Truth order: state document, then the pod's status, then our own record. A document that could not be refreshed still counts until
the container restarts, because a failed poll says nothing about the engine.
"""

from datetime import datetime
from enum import StrEnum

import msgspec

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.deployment_spec import DrainMode, Quantity, Sleep, SleepPolicy
from diffusion_operator.api.deployment_status import FailureStatus, ReplicaState, ReplicaStatus
from diffusion_operator.api.worker_state import WireError, WorkerPhase, WorkerState
from diffusion_operator.plan.observed.observed import Observed, Poll
from diffusion_operator.plan.observed.pods import Exit, Pod
from diffusion_operator.plan.observed.states import LIVE_STATES, SETTLED_STATES
from diffusion_operator.plan.observed.worker_exit_codes import code_in, device_code_in

STARTUP_ERROR_EXIT = 1  # the worker's contract: a configuration or model it cannot start with
CRASH_LOOP_RESTARTS = 3
IMAGE_REASONS = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"})
QUIET_REASONS = frozenset({"", "ContainerCreating", "PodInitializing"})

_PHASES = {
    WorkerPhase.STARTING: ReplicaState.STARTING,
    WorkerPhase.RESTARTING: ReplicaState.STARTING,
    WorkerPhase.READY: ReplicaState.AWAKE,
    WorkerPhase.DRAINING: ReplicaState.DRAINING,
    WorkerPhase.SLEEPING: ReplicaState.SLEEPING,
    WorkerPhase.ASLEEP: ReplicaState.ASLEEP,
    WorkerPhase.WAKING: ReplicaState.WAKING,
    WorkerPhase.FAILED: ReplicaState.FAILED,
    WorkerPhase.TERMINATING: ReplicaState.TERMINATING,
}
ENDED = "the pod ended, and the kubelet does not start it again"


class Problem(StrEnum):
    """Reasons why a replica is not in its desired state; the reasons of Ready come from here."""

    MODEL_ERROR = "ModelError"
    CRASH_LOOPING = "CrashLooping"
    IMAGE_PULL = "ImagePullError"
    CONTAINER = "ContainerError"
    WAITING_FOR_GPU = "WaitingForGPU"
    UNSCHEDULABLE = "Unschedulable"
    POD_FAILED = "PodFailed"
    RANK_LOST = "RankLost"
    WAKE_FAILED = "WakeFailed"
    INSUFFICIENT_MEMORY = "InsufficientGPUMemory"
    DEVICE = "GPUUnavailable"
    SLEEP_FAILED = "SleepFailed"
    VERIFICATION_FAILED = "VerificationFailed"
    MEMORY_NOT_RELEASED = "MemoryNotReleased"
    UNREACHABLE = "ControlUnreachable"
    NODE_LOST = "NodeLost"


_DEVICE = {"DeviceUnavailable": Problem.DEVICE, "InsufficientMemory": Problem.INSUFFICIENT_MEMORY}
"""Reasons for which a worker cannot start or go on, by the code of its device."""

_FAULTS = {
    "VerificationFailed": Problem.VERIFICATION_FAILED,
    "MemoryNotReleased": Problem.MEMORY_NOT_RELEASED,
    "RankFailed": Problem.RANK_LOST,
    "EngineFailed": Problem.RANK_LOST,
}
"""Reasons for a restart of the ranks, by the worker's code; any other code belongs to a failed sleep or wake."""


class Failures(msgspec.Struct, frozen=True):
    """History of a replica's failures, kept in the status because each restart makes a new pod; recovery.py has the rules."""

    count: int = 0
    since: datetime | None = None
    next_restart: datetime | None = None
    """When its pod is made again."""
    spent: bool = False
    """It failed so often that a pod is made every ten minutes at most."""


class Group(msgspec.Struct, frozen=True):
    """A replica as observed now."""

    index: int
    pod: Pod
    poll: Poll
    state: ReplicaState
    previous: ReplicaStatus | None = None
    problem: Problem | None = None
    message: str = ""
    failures: Failures = Failures()

    @property
    def document(self) -> WorkerState | None:
        return self.poll.state

    @property
    def boot_id(self) -> str | None:
        return self.poll.state.boot_id if self.poll.state else None

    @property
    def restarting(self) -> bool:
        """Return whether the server lives, keeps its requests, and restarts its ranks."""
        return self.state is ReplicaState.STARTING and self.document is not None and self.document.state is WorkerPhase.RESTARTING

    @property
    def live(self) -> bool:
        return self.state in LIVE_STATES or self.restarting

    @property
    def settled(self) -> bool:
        """Return whether the replica is in its desired state and the kubelet reports it too."""
        return self.state in SETTLED_STATES and self.pod.ready and self.problem is not Problem.UNREACHABLE

    @property
    def held(self) -> int:
        return self.document.held.current if self.document else 0

    @property
    def in_flight(self) -> int:
        return self.document.in_flight if self.document else 0


def observe_groups(observed: Observed) -> tuple[Group, ...]:
    """Choose a pod to represent each replica index, and return the replicas in the order of their indices.

    Pods that stay are preferred to those on their way out, and then the highest incarnation is taken.
    """
    by_index: dict[int, Pod] = {}
    for pod in sorted(observed.pods, key=lambda pod: (not observed.leaves(pod), pod.incarnation)):
        by_index[pod.index] = pod
    previous = {group.index: group for group in observed.deployment.status.replica_states}
    return tuple(
        read_group(pod, observed.polls.get(pod.uid, Poll()), previous.get(index), observed.deployment)
        for index, pod in sorted(by_index.items())
    )


def read_group(pod: Pod, poll: Poll, previous: ReplicaStatus | None, deployment: DiffusionDeployment) -> Group:
    state = _state(pod, poll, previous)
    problem, message = _problem(pod, poll, state, deployment)
    if poll.state is not None and not poll.state.state.known:
        state_name = poll.state.state.value
        unknown = f"the worker reports the state {state_name!r}, which this operator does not know: the worker is newer than the operator"
        message = _joined(message, unknown)
    if pod.left:
        message = _joined(pod.left, message)
    return Group(index=pod.index, pod=pod, poll=poll, state=state, previous=previous, problem=problem, message=message)


def _state(pod: Pod, poll: Poll, previous: ReplicaStatus | None) -> ReplicaState:
    if pod.terminating:
        return ReplicaState.TERMINATING
    if pod.finished or pod.lost:
        return ReplicaState.FAILED
    if not pod.scheduled:
        return ReplicaState.PENDING
    container = pod.container
    if not container.running:
        return ReplicaState.FAILED if container.restarts or container.last_exit else ReplicaState.STARTING
    if _ends_unasked(pod, poll):
        return ReplicaState.FAILED
    if poll.state is not None:
        return _PHASES.get(poll.state.state, ReplicaState.AWAKE if pod.ready else ReplicaState.STARTING)
    if pod.ready and pod.orphan:  # the worker may take another token, and no status tells of it
        return ReplicaState.AWAKE
    same_pod = previous is not None and previous.leader_pod == pod.name and previous.restarts == container.restarts
    if pod.ready and previous is not None and same_pod:
        return previous.state
    return ReplicaState.STARTING


def _ends_unasked(pod: Pod, poll: Poll) -> bool:
    """Return whether the worker was sent SIGTERM though neither the operator nor the cluster asked for its end.

    So ends an eviction for the pod's own use of a disk. The pod shows its cause when it has ended, and is replaced then.
    """
    return poll.state is not None and poll.state.state is WorkerPhase.TERMINATING and not poll.draining and not pod.disrupted


def _problem(pod: Pod, poll: Poll, state: ReplicaState, deployment: DiffusionDeployment) -> tuple[Problem | None, str]:
    if state is ReplicaState.TERMINATING:
        disrupted = f"the pod is being disrupted: {pod.disruption}"
        return None, disrupted if pod.disruption else _last_requests(poll, deployment.spec.drain.timeout_seconds)
    if pod.finished:
        return Problem.POD_FAILED, pod.finished_message or ENDED
    if pod.lost:
        node_lost = (
            f"its node {pod.node} does not answer; the replica is replaced when the cluster removes the pod, by default after five minutes"
        )
        return Problem.NODE_LOST, node_lost
    if pod.unschedulable:
        devices = (f"Insufficient {deployment.spec.resources.gpu_resource}", "cannot allocate all claims")
        waits = any(words in pod.unschedulable for words in devices)
        return (Problem.WAITING_FOR_GPU if waits else Problem.UNSCHEDULABLE), pod.unschedulable
    container = pod.container
    if container.waiting_reason in IMAGE_REASONS:
        return Problem.IMAGE_PULL, _sentence(container.waiting_reason, container.waiting_message)
    if container.waiting_reason not in QUIET_REASONS and container.waiting_reason != "CrashLoopBackOff":
        return Problem.CONTAINER, _sentence(container.waiting_reason, container.waiting_message)
    if state in (ReplicaState.FAILED, ReplicaState.STARTING):
        return _failure(pod, poll, memory=deployment.spec.resources.limits.get("memory"))
    if poll.unreachable:
        return Problem.UNREACHABLE, _unreachable(poll)
    sleep = deployment.spec.sleep
    problem, message = _operation_problem(poll.state, state, sleep.policy) if poll.state is not None else (None, "")
    return problem, message or _on_its_way(state, sleep)


def _failure(pod: Pod, poll: Poll, *, memory: Quantity | None) -> tuple[Problem | None, str]:
    """Return the problem and the text of a replica that is not up: its engine failed, its container ended, or it ends again and again.

    A first start has neither, unless its worker cannot be reached: then it has a text, and a problem once the pod is ready. `memory` is
    the container's limit, for the advice where memory ran out.
    """
    if _ends_unasked(pod, poll):
        return None, "its worker got SIGTERM, and not by the operator; the pod shows the cause when it has ended"
    if poll.state is not None and poll.state.failure is not None:
        return _fault(poll.state, poll.state.failure)
    ended = pod.container.last_exit
    if ended is None:
        unreachable = Problem.UNREACHABLE if pod.ready else None  # a start may take its time: the message says it, and the reason does not
        return (unreachable, _unreachable(poll)) if poll.unreachable else (None, "")
    restarted = f"its container was started again {pod.container.restarts} times so far"
    end = f"the worker ended with {exit_text(ended)}{_memory_advice(ended, memory)}; {restarted}"
    if (code := device_code_in(ended.message)) is not None:
        return _DEVICE[code], end
    if ended.code == STARTUP_ERROR_EXIT:
        return Problem.MODEL_ERROR, exit_message(ended)
    if pod.container.restarts >= CRASH_LOOP_RESTARTS or pod.container.waiting_reason == "CrashLoopBackOff":
        return Problem.CRASH_LOOPING, end
    return None, end


def _last_requests(poll: Poll, seconds: int) -> str:
    if not poll.draining:
        return ""
    return f"its pod ends when its requests are finished, after {seconds} s at the latest (spec.drain.timeoutSeconds)"


def _unreachable(poll: Poll) -> str:
    return f"the operator's last calls to its control port failed: {poll.error}"


def _fault(document: WorkerState, failure: WireError) -> tuple[Problem, str]:
    """Classify an engine's failure: an unusable device, a model that cannot be had, lost ranks, or a failed sleep or wake.

    The text has the worker's code and message.
    """
    if document.state is WorkerPhase.FAILED and (device := device_code_in(failure.message)) is not None:
        return _DEVICE[device], _sentence(failure.code, failure.message)
    if document.state is WorkerPhase.STARTING or (document.state is WorkerPhase.FAILED and code_in(failure.message) is not None):
        return Problem.MODEL_ERROR, _sentence(failure.code, failure.message)
    operation = document.operation or document.last_operation
    of_operation = Problem.WAKE_FAILED if operation is not None and operation.kind == "wake" else Problem.SLEEP_FAILED
    problem = _FAULTS.get(failure.code, of_operation if operation is not None else Problem.RANK_LOST)
    return problem, _sentence(failure.code, failure.message)


def _operation_problem(document: WorkerState, state: ReplicaState, policy: SleepPolicy) -> tuple[Problem | None, str]:
    """Return problem and text of the last sleep or wake if it failed; else None and an empty text.

    It counts until another operation ends, the replica gets there by itself, or the goal changes.
    """
    last = document.last_operation
    if last is None or last.error is None or not last.failed:
        return None, ""
    text = _sentence(last.error.code, last.error.message)
    # It sleeps again, or is put back to sleep, or tries again: with every try the state moves, and the fault is the same.
    resting = (ReplicaState.SLEEPING, ReplicaState.ASLEEP, ReplicaState.WAKING)
    if last.kind == "wake" and state in resting and policy is not SleepPolicy.ASLEEP:
        return (Problem.INSUFFICIENT_MEMORY if last.error.code == "InsufficientMemory" else Problem.WAKE_FAILED), text
    awake = (ReplicaState.AWAKE, ReplicaState.DRAINING, ReplicaState.SLEEPING)
    if last.kind == "sleep" and state in awake and policy is not SleepPolicy.ALWAYS_AWAKE:
        return Problem.SLEEP_FAILED, text
    return None, ""


def _on_its_way(state: ReplicaState, sleep: Sleep) -> str:
    """Describe a drain, sleep or wake that goes on, without figures that change between looks; empty in any other state."""
    if state is ReplicaState.DRAINING:
        patient = sleep.drain is DrainMode.WAIT and sleep.drain_timeout_seconds
        time = f"running requests have up to {sleep.drain_timeout_seconds} s to finish" if patient else "running requests are aborted"
        return f"it is going to sleep, and {time}"
    if state is ReplicaState.SLEEPING:
        return "it is going to sleep and frees its memory"
    if state is ReplicaState.WAKING:
        return f"it is waking, and has up to {sleep.wake_timeout_seconds} s for that (spec.sleep.wakeTimeoutSeconds)"
    return ""


def _memory_advice(ended: Exit, memory: Quantity | None) -> str:
    """Return the end of a message about a container that was killed for host memory (OOMKilled); empty for any other end."""
    if ended.reason != "OOMKilled":
        return ""
    cause = (
        f"it used more than its limit of {memory} (spec.resources.limits.memory)"
        if memory is not None
        else "it has no limit (spec.resources.limits.memory), so its node has too little"
    )
    return f", because it ran out of host memory: {cause}"


def exit_text(ended: Exit) -> str:
    """Describe how a container ended, with the end of its own words: `exit code 70 (Error): rank 1 died`."""
    return _sentence(f"exit code {ended.code}" + (f" ({ended.reason})" if ended.reason else ""), ended.message[-900:])


def exit_message(ended: Exit) -> str:
    """Return the last 900 characters of the worker's termination message; without one, the exit code in words."""
    return ended.message[-900:] or exit_text(ended)


def failure_of(group: Group) -> FailureStatus | None:
    """Return the last failure: the end of a finished pod or the container's exit, whatever its code, else the recorded one.

    None without any. A pod that is deleted or evicted by an order has not failed, though it ends as any other does.
    """
    known, ended = group.previous.last_failure if group.previous else None, group.pod.container.last_exit
    if group.pod.terminating or group.pod.disruption:
        return known
    if group.pod.finished and (ended is None or group.pod.finished_message):
        message = (group.pod.finished_message or ENDED)[:1024]
        return FailureStatus(code="PodFailed", message=message, time=ended.finished_at if ended is not None else None)
    if ended is None:
        return known
    return FailureStatus(code=_failure_code(ended), message=exit_message(ended)[:1024], time=ended.finished_at, exit_code=ended.code)


def _failure_code(ended: Exit) -> str:
    if ended.reason == "OOMKilled":
        return "OOMKilled"
    if "out of memory" in ended.message.lower():
        return "OutOfMemory"
    return {STARTUP_ERROR_EXIT: "StartupFailed", 70: "RankFailed"}.get(ended.code, "ContainerEnded")


def _sentence(*parts: str) -> str:
    return ": ".join(part for part in parts if part)


def _joined(*sentences: str) -> str:
    return "; ".join(sentence for sentence in sentences if sentence)
