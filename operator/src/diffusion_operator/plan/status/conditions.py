# SPDX-License-Identifier: Apache-2.0
"""The conditions of a DiffusionDeployment. Only what is computed from observation is claimed; a message names the replica it is about."""

from collections.abc import Iterator, Sequence

import msgspec

from diffusion_operator.api.deployment_spec import ColdMode, DeploymentSpec, SleepLevel, SleepPolicy
from diffusion_operator.api.deployment_status import ReplicaState
from diffusion_operator.api.meta import ConditionStatus, Verdict, verdict
from diffusion_operator.plan.adapters.view import BROKEN, CROWDED, EVICTED, READY, REFUSED, WAKEABLE, WANTED
from diffusion_operator.plan.observed.children import children_ready
from diffusion_operator.plan.observed.control_security import control_secured
from diffusion_operator.plan.observed.replica_state import Group, Problem
from diffusion_operator.plan.observed.states import RESTING_STATES
from diffusion_operator.plan.replicas.model_pinning import model_resolved
from diffusion_operator.plan.replicas.rollout import max_unavailable
from diffusion_operator.plan.replicas.template_trial import TEMPLATE_INVALID
from diffusion_operator.plan.status.inputs import Situation

_READY_PROBLEMS = (
    Problem.MODEL_ERROR, Problem.DEVICE, Problem.INSUFFICIENT_MEMORY, Problem.CRASH_LOOPING, Problem.IMAGE_PULL, Problem.CONTAINER,
    Problem.WAITING_FOR_GPU, Problem.UNSCHEDULABLE, Problem.POD_FAILED, Problem.NODE_LOST, Problem.VERIFICATION_FAILED,
    Problem.MEMORY_NOT_RELEASED, Problem.RANK_LOST,
)  # fmt: skip
"""Problems that keep a replica from ever being ready, the most informative first."""

_WAKE_PROBLEMS = (Problem.WAKE_FAILED, Problem.INSUFFICIENT_MEMORY)

_DEGRADED_REASONS = {
    Problem.VERIFICATION_FAILED: "VerificationFailed",
    Problem.MEMORY_NOT_RELEASED: "MemoryNotReleased",
    Problem.DEVICE: "GPUUnavailable",
    Problem.INSUFFICIENT_MEMORY: "InsufficientGPUMemory",
    Problem.CRASH_LOOPING: "CrashLooping",
    Problem.RANK_LOST: "RankLost",
    Problem.WAKE_FAILED: "WakeFailing",
    Problem.SLEEP_FAILED: "SleepFailing",
    Problem.UNREACHABLE: "ControlUnreachable",
    Problem.MODEL_ERROR: "ReplicaFailed",
    Problem.NODE_LOST: "NodeLost",
    Problem.POD_FAILED: "ReplicaFailed",
    Problem.CONTAINER: "ReplicaFailed",
    Problem.IMAGE_PULL: "ReplicaFailed",
}
_MESSAGE_LIMIT = 1500


def deployment_verdicts(now: Situation) -> tuple[Verdict, ...]:
    return (
        ready(now),
        available(now),
        progressing(now),
        scheduled(now),
        awake(now),
        model_resolved(now.resolution),
        adapters_ready(now),
        degraded(now),
        control_secured(now.spec, now.policy),
        children_ready(now.children),
        *now.default_image,
    )


def pass_failed(failure: str) -> tuple[Verdict, ...]:
    """Return Ready=Unknown and Degraded=True with reason PassFailed, for a pass that failed before the state was known."""
    return verdict("Ready", None, "PassFailed", failure), verdict("Degraded", True, "PassFailed", failure)


def ready(now: Situation) -> Verdict:
    found = _ready(now)
    if found.status is ConditionStatus.TRUE or any(group.pod.ready and group.pod.routable for group in now.groups):
        return found
    text = f"{found.message[:_MESSAGE_LIMIT]}; no pod is behind the Service, so clients get no answer from it"
    return msgspec.structs.replace(found, message=text)


def _ready(now: Situation) -> Verdict:
    if now.spec.suspend:
        return verdict("Ready", False, "Suspended", _suspended(now))
    if now.wanted == 0:
        return verdict("Ready", False, "NoReplicas", "spec.replicas is 0")
    problem = next((group for kind in _READY_PROBLEMS for group in now.groups if _has(group, kind)), None)
    live = any(group.live for group in now.groups)
    if problem is not None and problem.problem is not None and not live:
        return verdict("Ready", False, problem.problem.value, _replica_message(problem))
    if now.asleep_wanted and live:
        return verdict("Ready", False, "SleepRequested", f"spec.sleep.policy is Asleep; {_tally(now)}")
    if now.no_service and (now.serving or now.wakeable):
        return verdict("Ready", False, "NoService", f"{_tally(now)}, and clients reach none through the Service: {now.no_service}")
    if now.serving:
        whole = now.serving + now.wakeable >= now.wanted and not any(group.problem for group in now.groups)
        text = f"{now.serving} of {now.wanted} replicas serve{_idle(now)}{_others(now)}"
        return verdict("Ready", True, "Serving" if whole else "ServingDegraded", text)
    return _not_serving(now)


def _not_serving(now: Situation) -> Verdict:
    if now.wakeable:
        return verdict("Ready", True, "AsleepWakeable", _wakes(now) + _others(now))
    given_up = (Problem.VERIFICATION_FAILED, Problem.MEMORY_NOT_RELEASED, Problem.RANK_LOST, *(_WAKE_PROBLEMS if now.on_idle else ()))
    lost = next((group for group in now.groups if group.problem in given_up), None)
    if lost is not None and lost.problem is not None:
        return verdict("Ready", False, lost.problem.value, _replica_message(lost))
    unreachable = next((group for group in now.groups if group.problem is Problem.UNREACHABLE), None)
    if unreachable is not None:
        known = None if unreachable.pod.ready else False  # the data path may be fine: the kubelet's probe answers for the data port only
        return verdict("Ready", known, "ControlUnreachable", _replica_message(unreachable))
    if now.count(*RESTING_STATES):
        return verdict("Ready", False, "Waking", _tally(now) + _others(now))
    if now.pods_wait_for:
        return verdict("Ready", False, "ChildrenNotReady", f"no pod is made: {now.pods_wait_for}")
    if now.refusal:
        return verdict("Ready", False, "PodsRefused", now.refusal)
    return verdict("Ready", False, "Starting", _tally(now) + _unprobed(now) + _others(now))


def available(now: Situation) -> Verdict:
    if now.spec.suspend:
        return verdict("Available", False, "Suspended", _suspended(now))
    enough = max(1, now.wanted - max_unavailable(now.spec.rollout, now.wanted))  # so many may be missing, as while they are replaced
    needed = f"Available needs {enough} that serve or can wake (spec.rollout.maxUnavailable), and 1 of them serving"
    text = f"{now.serving} of {now.wanted} replicas serve{_idle(now)}. {needed}"
    if now.serving and now.serving + now.wakeable >= enough:
        return verdict("Available", True, "MinimumAvailable", text)
    return verdict("Available", False, "Sleeping" if now.count(*RESTING_STATES) else "MinimumUnavailable", text)


def progressing(now: Situation) -> Verdict:
    if now.spec.suspend:
        return verdict("Progressing", False, "Paused", _suspended(now))
    if now.template_refusal:
        return verdict("Progressing", False, TEMPLATE_INVALID, now.template_refusal)
    missing = now.wanted - len(now.groups)
    if now.progress.stalled:
        return verdict("Progressing", False, "DeadlineExceeded", _overdue(now))
    # A group that starts its ranks again gets on by itself.
    stuck = next((group for kind in _READY_PROBLEMS for group in now.groups if _has(group, kind) and not group.restarting), None)
    if stuck is not None and stuck.problem is not None:
        return verdict("Progressing", False, stuck.problem.value, _replica_message(stuck))
    if now.late is not None:
        return verdict("Progressing", False, "DeadlineExceeded", _overdue(now))
    if now.outdated:
        held = f"; no pod is made: {now.pods_wait_for}" if now.pods_wait_for else ""
        # A new one that loads beside an old one has replaced nothing yet.
        served = f"{now.progress.served} of {now.wanted} replicas serve with the new template, {now.outdated} have an older one"
        checks = "; before the last one that serves goes, a check pod tries the new template" if now.checks else ""
        return verdict("Progressing", True, "RolloutProgressing", f"{served}{checks}{held}{_others(now)}")
    if missing:
        cause = now.pods_wait_for or now.refusal
        exist = f"{len(now.groups)} of {now.wanted} replicas exist" + (f"; {cause}" if cause else "")
        return verdict("Progressing", True, "RolloutProgressing", exist)
    if now.count(ReplicaState.PENDING, ReplicaState.STARTING, ReplicaState.VERIFYING, ReplicaState.FAILED):
        return verdict("Progressing", True, "LoadingModel", _tally(now) + _others(now))
    if now.arrived < now.wanted:
        arrived = f"{now.arrived} of {now.wanted} replicas can take requests"
        return verdict("Progressing", True, "RolloutProgressing", f"{arrived}: {_tally(now)}{_unprobed(now)}{_others(now)}")
    return verdict("Progressing", True, "RolloutComplete", f"all {now.wanted} replicas have the template of the spec")


def scheduled(now: Situation) -> Verdict:
    if now.spec.suspend:
        return verdict("Scheduled", None, "Suspended", _suspended(now))
    waiting = [group for group in now.groups if group.pod.unschedulable and not group.pod.scheduled]
    if waiting:
        gpu = any(group.problem is Problem.WAITING_FOR_GPU for group in waiting)
        return verdict("Scheduled", False, "InsufficientGPU" if gpu else "Unschedulable", _replica_message(waiting[0]))
    gated = sum(group.pod.gated for group in now.groups)
    if gated:
        text = f"{gated} of {now.wanted} replicas wait behind a scheduling gate, such as Kueue's, which goes when the queue has quota"
        return verdict("Scheduled", False, "WaitingForQuota", text)
    if now.refusal:
        return verdict("Scheduled", False, "QuotaExceeded" if now.over_quota else "PodsRefused", now.refusal)
    if len(now.groups) < now.wanted or not all(group.pod.scheduled for group in now.groups):
        return verdict("Scheduled", None, "Scheduling", "not every replica has a pod with a node yet")
    return verdict("Scheduled", True, "AllScheduled", f"{len(now.groups)} of {now.wanted} replicas have a node")


def awake(now: Situation) -> Verdict:
    value, reason, message = _awake(now)
    return verdict("Awake", value, reason, message + "".join(f"; {advice}" for advice in _sleep_advice(now.spec)))


def _awake(now: Situation) -> tuple[bool, str, str]:
    count, tally = now.count(ReplicaState.AWAKE), _tally(now)
    if now.spec.suspend:
        return False, "Suspended", _suspended(now)
    if count:
        return True, "AllAwake" if count == now.wanted else "SomeAwake", tally
    failed = next((group for kind in _WAKE_PROBLEMS for group in now.groups if group.problem is kind), None)
    if failed is not None and failed.problem is not None:
        return False, failed.problem.value, _replica_message(failed)
    if now.groups and now.count(ReplicaState.ASLEEP) == len(now.groups) and (now.asleep_wanted or now.on_idle):
        return False, "AllAsleep", tally
    if now.count(ReplicaState.WAKING) or (now.count(ReplicaState.ASLEEP) and not (now.asleep_wanted or now.on_idle)):
        return False, "Waking", tally
    if now.count(*RESTING_STATES):
        return False, "GoingToSleep", tally
    return False, "Starting" if now.wanted else "NoReplicas", tally


def _sleep_advice(spec: DeploymentSpec) -> Iterator[str]:
    """Yield advice on sleep settings that are valid but unwise."""
    sleep = spec.sleep
    if sleep.policy is SleepPolicy.ON_IDLE and sleep.min_awake > spec.replicas:
        yield f"spec.sleep.minAwake is {sleep.min_awake} and spec.replicas {spec.replicas}, so no replica sleeps"
    if sleep.policy is not SleepPolicy.ALWAYS_AWAKE and sleep.level is SleepLevel.HOST_MEMORY and "memory" not in spec.resources.limits:
        unlimited = "spec.sleep.level is HostMemory and spec.resources.limits has no memory"
        yield f"warning: {unlimited}, so nothing limits the host memory of replicas that sleep"


def adapters_ready(now: Situation) -> Verdict:
    tally = now.adapters.tally
    if not tally.views:
        return verdict("AdaptersReady", True, "NoAdapters", "no LoRAAdapter refers to this object")
    crowded = tally.first(CROWDED)
    if crowded is not None:
        refusal = _named(crowded.decision.adapter.metadata.name, crowded.decision.message)
        return verdict("AdaptersReady", False, "CapacityExceeded", refusal)
    if now.spec.suspend:
        return verdict("AdaptersReady", False, "Deferred", _suspended(now))
    if tally.count(REFUSED | BROKEN):
        return verdict("AdaptersReady", False, "SomeFailed", f"see the status of LoRAAdapter {tally.names(REFUSED | BROKEN)}")
    if tally.count(EVICTED):
        evicted = (
            "not in memory on every awake replica, so a request for one of them can get 503 AdapterNotLoaded. "
            f"Only {now.spec.lora.cached} adapters fit: raise spec.lora.maxCached, or set spec.lora.onMissing to Load"
        )
        return verdict("AdaptersReady", False, "CapacityExceeded", f"{tally.names(EVICTED)}: {evicted}")
    if not tally.count(WANTED, none_of=READY | WAKEABLE):
        who = "every awake replica serves" if tally.count(READY) else "each replica will serve once a request wakes it"
        return verdict("AdaptersReady", True, "AllReady", f"{who} {tally.count(WANTED)} adapters")
    names = tally.names(WANTED, none_of=READY | WAKEABLE)
    if now.groups and not now.count(ReplicaState.AWAKE, ReplicaState.VERIFYING):
        return verdict("AdaptersReady", False, "Deferred", f"{names}: a replica that wakes loads them before it serves")
    return verdict("AdaptersReady", False, "Loading", f"{names}: not yet loaded on every awake replica")


def degraded(now: Situation) -> Verdict:
    for problem, reason in _DEGRADED_REASONS.items():
        found = next((group for group in now.groups if _has(group, problem)), None)
        if found is not None:
            return verdict("Degraded", True, reason, _replica_message(found))
    if now.refusal:
        return verdict("Degraded", True, "QuotaExceeded" if now.over_quota else "PodsRefused", now.refusal)
    if now.template_refusal:
        return verdict("Degraded", True, TEMPLATE_INVALID, now.template_refusal)
    if overdue := _overdue(now):
        return verdict("Degraded", True, "DeadlineExceeded", overdue)
    model, children = model_resolved(now.resolution), children_ready(now.children)
    if model.status is ConditionStatus.FALSE:
        return verdict("Degraded", True, "ModelNotResolved", model.message)
    if children.status is ConditionStatus.FALSE:
        return verdict("Degraded", True, "ChildrenNotReady", children.message)
    return verdict("Degraded", False, "AsExpected", "")


def _overdue(now: Situation) -> str:
    """Return the message about a rollout that stopped, or a replica that does not come up, for longer than the deadline; else empty."""
    limit = f"for {now.spec.rollout.progress_deadline_seconds} s (spec.rollout.progressDeadlineSeconds)"
    if now.progress.stalled:
        served = f"{now.progress.served} of {now.wanted} replicas serve with the new template, and no further one came up {limit}"
        return f"{served}; replicas that serve are left alone until the spec changes{_others(now)}"
    if now.late is not None:
        return _named(f"replica {now.late.index}", f"it did not come up {limit}: {now.late.message or now.late.state.value}")
    return ""


def _has(group: Group, problem: Problem) -> bool:
    """Return whether a replica has a problem. Too little memory for a wake is none, as it sleeps on; too little for a start is."""
    return group.problem is problem and not (group.live and problem is Problem.INSUFFICIENT_MEMORY)


def _replica_message(group: Group) -> str:
    return _named(f"replica {group.index}", group.message or group.state.value)


def _named(name: str, message: str) -> str:
    return f"{name}: {message}"[:_MESSAGE_LIMIT]


def _tally(now: Situation) -> str:
    """Format the counts of replicas by state for a message, such as `1 Awake, 2 Asleep of 3 replicas` or `none of 3 replicas`."""
    counts = {state: now.count(state) for state in ReplicaState if now.count(state)}
    return (", ".join(f"{count} {state.value}" for state, count in counts.items()) or "none") + f" of {now.wanted} replicas"


def _suspended(now: Situation) -> str:
    ending = f"; {len(now.groups)} replicas have not ended yet" if now.groups else ""
    return f"spec.suspend is true, so there are no replicas; when it is false, spec.replicas ({now.spec.replicas}) are made{ending}"


def _idle(now: Situation) -> str:
    return f", {now.wakeable} sleep until they are needed" if now.wakeable else ""


def _wakes(now: Situation) -> str:
    within = f"within {now.spec.sleep.wake_timeout_seconds} s (spec.sleep.wakeTimeoutSeconds)"
    if now.spec.cold_requests.mode is ColdMode.HOLD:
        return f"{_tally(now)}; a request would wake a replica and be served {within}"
    return f"{_tally(now)}; a request would wake a replica and get 503 (spec.coldRequests.mode is Reject); a later one is served {within}"


def _unprobed(now: Situation) -> str:
    """Return the end of a message about awake replicas whose readiness probe does not pass; empty without any."""
    indices = [str(group.index) for group in now.groups if group.state is ReplicaState.AWAKE and not group.pod.ready]
    return f"; the readiness probe of replica {', '.join(indices)} does not pass" if indices else ""


def _others(now: Situation) -> str:
    """Return a tail for a message: the replicas that have a problem of their own."""
    about = _talkative(now.groups)
    return f"; {about}"[:_MESSAGE_LIMIT] if about else ""


def _talkative(groups: Sequence[Group]) -> str:
    return "; ".join(_replica_message(group) for group in groups if group.message)
