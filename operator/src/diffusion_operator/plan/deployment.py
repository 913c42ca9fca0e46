# SPDX-License-Identifier: Apache-2.0
"""The plan of one pass over a DiffusionDeployment: a table of contents."""

from collections.abc import Mapping, Sequence, Set
from datetime import datetime, timedelta

import msgspec

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.deployment_status import AvoidedNode, DeploymentStatus, ReplicaState
from diffusion_operator.plan.adapter_removals import AdapterEvent, plan_removals
from diffusion_operator.plan.adapters.plan import AdapterPlan, plan_adapters
from diffusion_operator.plan.adapters.slices import Slices, finish
from diffusion_operator.plan.observed.children import ChildState, pods_wait_for
from diffusion_operator.plan.observed.observed import Departures, Observed
from diffusion_operator.plan.observed.replica_state import Group, observe_groups
from diffusion_operator.plan.observed.waiting import late, with_words
from diffusion_operator.plan.replicas.check_pod import with_check
from diffusion_operator.plan.replicas.departure import plan_departure
from diffusion_operator.plan.replicas.model_pinning import resolve_model, unpinned
from diffusion_operator.plan.replicas.orphans import judge_orphans
from diffusion_operator.plan.replicas.recovery import with_failures
from diffusion_operator.plan.replicas.revision import Template, default_image, template_of
from diffusion_operator.plan.replicas.rollout import count_paused, progress_of
from diffusion_operator.plan.replicas.scaling import plan_replicas
from diffusion_operator.plan.replicas.template_trial import Trial, plan_trial
from diffusion_operator.plan.results.actions import CreatePod, PodAction, SetRoutable, WorkerAction
from diffusion_operator.plan.sleep.next_look import SOON_S, next_look_s
from diffusion_operator.plan.sleep.policy import plan_sleep
from diffusion_operator.plan.status.deployment import deployment_status
from diffusion_operator.plan.status.inputs import Situation

AVOIDED_FOR = timedelta(minutes=10)
MOST_AVOIDED = 32  # the schema's bound


class DeploymentPlan(msgspec.Struct, frozen=True):
    template: Template
    pods: tuple[PodAction, ...]
    calls: tuple[WorkerAction, ...]
    trial: Trial
    situation: Situation
    groups: tuple[Group, ...]
    """With those on their way out."""
    created: tuple[CreatePod, ...]
    status: DeploymentStatus
    """With the children and the refusal of the pass before."""
    adapters: AdapterPlan
    """To be remembered."""
    departures: Departures
    """To be remembered."""
    told: tuple[AdapterEvent, ...]
    """Events about adapters that leave."""
    look_again_s: float | None
    """None: time alone changes nothing."""


def plan_deployment(observed: Observed, now: datetime, before: AdapterPlan | None = None) -> DeploymentPlan:
    """Plan a pass over a deployment in one go; nothing is called or written.

    `before` is the plan of adapters of the pass before, if there was one.
    """
    return finish(plan_in_slices(observed, now, before or AdapterPlan()))


def plan_in_slices(observed: Observed, now: datetime, before: AdapterPlan) -> Slices[DeploymentPlan]:
    deployment = observed.deployment
    template = template_of(deployment, default_image=observed.default_image, pods=observed.pods)
    observed, adopted = judge_orphans(observed, revision=template.revision)
    found = with_words(observed, observe_groups(observed))
    nodes = avoided_nodes(deployment.status.avoided_nodes, found, now)
    seen = with_failures(found, deployment.spec, now, faults=faults_of(nodes))
    adapters = yield from plan_adapters(observed, seen, now, revision=template.revision, before=before)
    groups = adapters.groups
    departures, told = plan_removals(observed.departures, adapters)
    present = tuple(group for group in groups if group.state is not ReplicaState.TERMINATING)
    trial = plan_trial(observed, present, revision=template.revision, now=now)
    paused = count_paused(observed)
    trial = with_check(trial, observed, present, revision=template.revision, now=now)
    checks = trial.stays and not trial.refusal
    progress = progress_of(
        deployment.spec,
        deployment.status,
        present,
        revision=template.revision,
        paused=paused + checks,
        refused=bool(trial.refusal),
        now=now,
    )
    resolution = resolve_model(deployment, template, present, now)
    replicas = plan_replicas(
        observed,
        groups,
        revision=template.revision,
        progress=progress,
        held=trial.holds or bool(pods_wait_for(observed.children)),
        kept_back=trial.stays,
        raced=unpinned(resolution),
        avoided_nodes=tuple(node.name for node in nodes),
        now=now,
    )
    retiring = {action.uid: action.why for action in replicas.retire}
    routing = plan_routing(groups, retiring=retiring)
    departure = plan_departure(observed, replicas.retire, unrouted_now={action.uid for action in routing}, now=now)
    staying = [group for group in groups if group.pod.uid not in retiring]
    busy = {call.worker.pod_uid for call in adapters.calls}
    situation = Situation(
        spec=deployment.spec,
        groups=present,
        adapters=adapters,
        outdated=replicas.outdated,
        progress=progress,
        resolution=resolution,
        refusal=observed.refusal,
        template_refusal=trial.refusal,
        checks=checks,
        default_image=default_image(deployment, template, observed.default_image),
        policy_possible=observed.policy_possible,
        children=observed.children,
        late=late(present, now, deployment.spec.rollout) if progress.done and not paused else None,
        avoided_nodes=nodes,
    )
    sleep = plan_sleep(observed, staying, now, rolling=situation.rolling, busy=busy)
    calls = _calls(observed, departure.drain, sleep, adapters.calls, retiring=retiring.keys())
    pods: tuple[PodAction, ...] = (*adopted, *replicas.create, *trial.check_pods, *routing, *departure.delete)
    acting = bool(calls or pods or retiring or trial.pod)  # the end of a drain is heard from the worker
    return DeploymentPlan(
        template=template,
        pods=pods,
        calls=calls,
        trial=trial,
        situation=situation,
        groups=groups,
        created=replicas.create,
        status=deployment_status(deployment, situation, groups=groups, template=template, made=replicas.create, now=now),
        adapters=adapters,
        departures=departures,
        told=told,
        look_again_s=_sooner(next_look_s(observed, adapters, progress, acting=acting, now=now), trial, now),
    )


def _calls(
    observed: Observed,
    drains: Sequence[WorkerAction],
    sleeps: Sequence[WorkerAction],
    loads: Sequence[WorkerAction],
    *,
    retiring: Set[str],
) -> tuple[WorkerAction, ...]:
    """Select the calls to make: of each worker its drain, or else its sleep or wake, or else its loads and removals of adapters.

    A worker whose last call is unanswered gets none, and one whose pod is still another object's is only drained.
    """
    none_to = observed.calling
    no_sleep_to = none_to | {pod.uid for pod in observed.pods if pod.orphan}
    no_load_to = no_sleep_to | retiring | {call.worker.pod_uid for call in sleeps}
    barred = ((drains, none_to), (sleeps, no_sleep_to), (loads, no_load_to))
    return tuple(call for calls, those in barred for call in calls if call.worker.pod_uid not in those)


def _sooner(look_again_s: float | None, trial: Trial, now: datetime) -> float | None:
    """Return the earlier of the next look and the next trial of a template."""
    if trial.again_at is None:
        return look_again_s
    trial_s = max(SOON_S, (trial.again_at - now).total_seconds())
    return trial_s if look_again_s is None else min(look_again_s, trial_s)


def status_after(
    deployment: DiffusionDeployment, plan: DeploymentPlan, *, children: tuple[ChildState, ...], refusal: str, now: datetime
) -> DeploymentStatus:
    """Return the status at the end of the pass: the plan's, with what became of its children and its pods."""
    before = plan.situation
    if (before.children, before.refusal) == (children, refusal):
        return plan.status
    situation = msgspec.structs.replace(before, children=children, refusal=refusal)
    return deployment_status(deployment, situation, groups=plan.groups, template=plan.template, made=plan.created, now=now)


def avoided_nodes(before: Sequence[AvoidedNode], groups: Sequence[Group], now: datetime) -> tuple[AvoidedNode, ...]:
    """Return the nodes to avoid, by name: those of the last status whose time is not over, and those with a new fault.

    A new fault counts up and sets ten minutes from now. Only the 32 newest are kept. A fault is a device that is gone, memory that is
    short, or a shutdown: it is no failure of the replica. Its next pod comes after a pause that doubles with each fault, and prefers other
    nodes. It may come back to this one, because its claim or its volume may be nowhere else.
    """
    nodes = {node.name: node for node in before if node.until > now}
    for group in groups:
        if group.pod.node_fault and group.pod.node and not _counted(group):
            known = nodes.get(group.pod.node)
            faults = known.faults + 1 if known is not None else 1
            nodes[group.pod.node] = AvoidedNode(name=group.pod.node, faults=faults, until=now + AVOIDED_FOR)
    newest = sorted(nodes.values(), key=lambda node: node.until, reverse=True)[:MOST_AVOIDED]
    return tuple(sorted(newest, key=lambda node: node.name))


def faults_of(nodes: Sequence[AvoidedNode]) -> Mapping[str, int]:
    """Map the names of nodes to their numbers of faults."""
    return {node.name: node.faults for node in nodes}


def _counted(group: Group) -> bool:
    """Return whether the status has counted this pod's failure, which it shows by the time of the successor."""
    before = group.previous
    return before is not None and before.leader_pod == group.pod.name and before.next_restart_time is not None


def plan_routing(groups: Sequence[Group], *, retiring: Mapping[str, str]) -> tuple[SetRoutable, ...]:
    """Plan the changes of the label by which the Service selects pods: awake replicas get it, or all live ones while none is awake.

    While none is awake a live server answers by policy, which is better than a refused connection. A pod whose UID is in `retiring`, which
    has the reason, loses the label. Terminating pods are left unchanged. So are ready ones that have not answered this process yet: a
    replica may serve that the operator cannot ask.
    """
    candidates = [group for group in groups if group.pod.uid not in retiring]
    awake = {group.pod.uid for group in candidates if group.state is ReplicaState.AWAKE}
    wanted = awake or {group.pod.uid for group in candidates if group.live}
    kept = {group.pod.uid for group in candidates if group.pod.ready and group.document is None}
    return tuple(
        SetRoutable(name=group.pod.name, uid=group.pod.uid, routable=group.pod.uid in wanted, why=retiring.get(group.pod.uid, ""))
        for group in groups
        if group.pod.routable is not (group.pod.uid in wanted) and group.pod.uid not in kept and not group.pod.terminating
    )
