# SPDX-License-Identifier: Apache-2.0
"""The plan of one pass over a DiffusionDeployment, in the order of reconcile.md 3: a table of contents."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.deployment_status import DeploymentStatus, ReplicaState
from diffusion_operator.plan.adapter_removals import AdapterEvent, plan_removals
from diffusion_operator.plan.adapters.acceptance import DesiredAdapter
from diffusion_operator.plan.adapters.plan import AdapterView, plan_adapters
from diffusion_operator.plan.observed.children import ChildState
from diffusion_operator.plan.observed.observed import Attempt, AttemptKey, Departures, Observed
from diffusion_operator.plan.observed.replica_state import Group, observe_groups
from diffusion_operator.plan.replicas.model_pinning import resolve_model, unpinned
from diffusion_operator.plan.replicas.node_faults import avoided_nodes, faults_of
from diffusion_operator.plan.replicas.recovery import with_failures
from diffusion_operator.plan.replicas.revision import Template, template_of
from diffusion_operator.plan.replicas.rollout import count_paused, progress_of
from diffusion_operator.plan.replicas.routing import plan_routing
from diffusion_operator.plan.replicas.scaling import ReplicaPlan, plan_replicas
from diffusion_operator.plan.replicas.template_trial import Trial, plan_trial
from diffusion_operator.plan.results.actions import CreatePod, DeletePod, PodAction, SetRoutable, WorkerAction
from diffusion_operator.plan.sleep.next_look import MOVING_POLL_S, next_look_s
from diffusion_operator.plan.sleep.policy import plan_sleep
from diffusion_operator.plan.status.deployment import deployment_status
from diffusion_operator.plan.status.inputs import Situation

UNROUTE_BEFORE_DELETE = timedelta(seconds=2)


class DeploymentPlan(msgspec.Struct, frozen=True):
    template: Template
    desired: tuple[DesiredAdapter, ...]
    """For the mounted file."""
    pods: tuple[PodAction, ...]
    calls: tuple[WorkerAction, ...]
    trial: CreatePod | None
    """To be tried, and not to be made."""
    situation: Situation
    groups: tuple[Group, ...]
    """With those on their way out."""
    created: tuple[CreatePod, ...]
    status: DeploymentStatus
    """With the children and the refusal of the pass before."""
    views: tuple[AdapterView, ...]
    attempts: Mapping[AttemptKey, Attempt]
    """To be remembered."""
    departures: Departures
    """To be remembered."""
    told: tuple[AdapterEvent, ...]
    """Events about adapters that leave."""
    look_again_s: float | None
    """None: nothing moves, the steady poll is soon enough."""


def plan_deployment(observed: Observed, now: datetime) -> DeploymentPlan:
    deployment = observed.deployment
    template = template_of(deployment, default_image=observed.default_image, pods=observed.pods)
    found = observe_groups(observed)
    nodes = avoided_nodes(deployment.status.avoided_nodes, found, now)
    seen = with_failures(found, deployment.spec, now, faults=faults_of(nodes))
    adapters = plan_adapters(observed, seen, now, revision=template.revision)
    groups = adapters.groups
    departures, told = plan_removals(observed.departures, groups, views=adapters.views, removals=adapters.removals)
    present = tuple(group for group in groups if group.state is not ReplicaState.TERMINATING)
    trial = plan_trial(observed, present, revision=template.revision, now=now)
    progress = progress_of(
        deployment.spec,
        deployment.status,
        present,
        revision=template.revision,
        paused=count_paused(observed.pods),
        refused=bool(trial.refusal),
        now=now,
    )
    resolution = resolve_model(deployment, template, present, now)
    replicas = plan_replicas(
        observed,
        groups,
        revision=template.revision,
        progress=progress,
        held=trial.holds,
        raced=unpinned(resolution),
        avoided_nodes=tuple(node.name for node in nodes),
        now=now,
    )
    retiring = frozenset(action.uid for action in replicas.retire)
    routing = plan_routing(groups, retiring=retiring)
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
        policy_possible=observed.policy_possible,
        children=observed.children,
        avoided_nodes=nodes,
    )
    sleep = plan_sleep(observed, staying, now, rolling=situation.rolling, busy=busy)
    left_alone = retiring | {call.worker.pod_uid for call in sleep}
    calls: tuple[WorkerAction, ...] = (*sleep, *(call for call in adapters.calls if call.worker.pod_uid not in left_alone))
    pods: tuple[PodAction, ...] = (*replicas.create, *routing, *_deletions(replicas, routing, observed, now))
    return DeploymentPlan(
        template=template,
        desired=tuple(decision.desired for decision in adapters.decisions if decision.desired is not None),
        pods=pods,
        calls=calls,
        trial=trial.pod,
        situation=situation,
        groups=groups,
        created=replicas.create,
        status=deployment_status(deployment, situation, groups=groups, template=template, made=replicas.create, now=now),
        views=adapters.views,
        attempts=adapters.attempts,
        departures=departures,
        told=told,
        look_again_s=_sooner(next_look_s(observed, adapters, acting=bool(calls or pods or retiring or trial.pod), now=now), trial, now),
    )


def _sooner(look_again_s: float | None, trial: Trial, now: datetime) -> float | None:
    """The time of the next look, or of the next trial of a template."""
    if trial.again_at is None:
        return look_again_s
    trial_s = max(MOVING_POLL_S, (trial.again_at - now).total_seconds())
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


def _deletions(replicas: ReplicaPlan, routing: Sequence[SetRoutable], observed: Observed, now: datetime) -> list[DeletePod]:
    """A pod that was routed to is deleted a moment after it was unrouted: every node must have heard of it."""
    unrouted_now = {action.uid for action in routing}
    recently = {uid for uid, when in observed.unrouted_at.items() if now - when < UNROUTE_BEFORE_DELETE}
    return [action for action in replicas.retire if action.uid not in unrouted_now | recently]
