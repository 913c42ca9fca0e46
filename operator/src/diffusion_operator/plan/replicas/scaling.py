# SPDX-License-Identifier: Apache-2.0
"""Pods to create and delete: scale, replacement of failed pods, and rollout of a changed template.

A pod that carries the routable label is unrouted first and deleted a moment later, so that no new connection meets a closing server.
"""

from collections.abc import Collection, Sequence
from datetime import datetime

import msgspec

from diffusion_operator.api.deployment_spec import DeploymentSpec
from diffusion_operator.api.deployment_status import ReplicaState
from diffusion_operator.plan.observed.observed import Observed
from diffusion_operator.plan.observed.replica_state import Group
from diffusion_operator.plan.replicas.recovery import due
from diffusion_operator.plan.replicas.rollout import RolloutProgress, allowed, by_removal_priority, missing, to_replace, usable
from diffusion_operator.plan.results.actions import CreatePod, DeletePod


class ReplicaPlan(msgspec.Struct, frozen=True):
    create: tuple[CreatePod, ...] = ()
    retire: tuple[DeletePod, ...] = ()
    """To be deleted, once they are not routable any more."""
    outdated: int = 0
    """Replicas that still have an older revision."""


def plan_replicas(
    observed: Observed,
    groups: Sequence[Group],
    *,
    revision: str,
    progress: RolloutProgress,
    held: bool,
    kept_back: bool,
    raced: Collection[str],
    avoided_nodes: tuple[str, ...] = (),
    now: datetime,
) -> ReplicaPlan:
    """Plan which pods to create and which to retire: for scale, failures and rollouts, and for wrong models and duplicate pods.

    `held` means that no pod can be created now, so none is retired to be replaced. With `kept_back` none is for its template's sake.
    `raced` has the UIDs of pods that serve another model than the pinned one. New pods are scheduled away from `avoided_nodes` if possible.
    """
    spec = observed.deployment.spec
    rollout, replicas = spec.rollout, spec.wanted_replicas
    present = [group for group in groups if group.state is not ReplicaState.TERMINATING]
    many = len(present) - allowed(rollout, present, replicas=replicas, revision=revision)
    surplus = by_removal_priority(present, revision=revision)[: max(0, many)]
    kept = [group for group in present if group not in surplus]
    why_pod_is_deleted = "spec.suspend of the deployment is true" if spec.suspend else "there are more replicas than the spec asks for"
    retire = [_retire(group, why_pod_is_deleted) for group in surplus]
    if not held:
        stays = progress.stalled or kept_back
        retire += _replaced(kept, spec, revision=revision, stalled=stays, raced=raced, now=now, quiet=bool(retire))
    retire += _twins(observed, groups)
    count = missing(rollout, present, observed.pods, replicas=replicas, revision=revision, stalled=progress.stalled or held)
    create = pods_to_make({group.index for group in present}, count, observed)
    return ReplicaPlan(
        create=tuple(msgspec.structs.replace(one, avoided_nodes=avoided_nodes) for one in create),
        retire=tuple(retire),
        outdated=sum(group.pod.revision != revision for group in present),
    )


def _replaced(
    kept: Sequence[Group], spec: DeploymentSpec, *, revision: str, stalled: bool, raced: Collection[str], now: datetime, quiet: bool
) -> list[DeletePod]:
    """Return the pods that go because another one is to come: those given up, else old ones, else those with another model.

    `stalled`: none goes for its template's sake. `quiet`: others go already, so only those that are given up do.
    """
    worn_out = due(kept, spec, now)
    retire = [_retire(group, worn_out[group.index]) for group in kept if group.index in worn_out]
    if retire or quiet:
        return retire
    old = to_replace(spec.rollout, kept, replicas=spec.wanted_replicas, revision=revision) if not stalled else ()
    losers = _wrongly_pinned(kept, raced, revision=revision) if not old else ()
    wrong_model = "it has another version of the model than the one that is pinned for all replicas"
    why_pod_is_replaced = "the template changed" if old else wrong_model
    return [_retire(group, why_pod_is_replaced) for group in old or losers]


def _twins(observed: Observed, groups: Sequence[Group]) -> list[DeletePod]:
    """Plan the deletion of every pod that a newer pod of its replica supersedes, except for pods on their way out.

    Two operators that overlap can create such duplicates.
    """
    newest = {group.pod.uid for group in groups}
    older = [pod for pod in observed.pods if not observed.leaves(pod) and pod.uid not in newest]
    why_pod_is_deleted = "there is a newer pod of the same replica"
    return [DeletePod(name=pod.name, uid=pod.uid, why=why_pod_is_deleted, orphan=pod.orphan) for pod in older]


def _wrongly_pinned(kept: Sequence[Group], raced: Collection[str], *, revision: str) -> Sequence[Group]:
    """Return the replica with another model that goes now, as a list of one.

    Empty while another one is starting or ending, so that they go one after the other.
    """
    first = by_removal_priority([group for group in kept if group.pod.uid in raced], revision=revision)[:1]
    settled = all(usable(group, revision) or group.state is ReplicaState.FAILED for group in kept if group not in first)
    return first if settled else ()


def _retire(group: Group, why: str) -> DeletePod:
    return DeletePod(name=group.pod.name, uid=group.pod.uid, why=group.pod.left or why, orphan=group.pod.orphan)


def pods_to_make(used: Collection[int], count: int, observed: Observed) -> tuple[CreatePod, ...]:
    """Choose indices and incarnations for `count` new pods.

    Indices are the lowest that are not in `used`. Each incarnation is one more than the highest known at the index.
    """
    free = (index for index in range(len(used) + count) if index not in used)
    highest = dict(observed.foreign_incarnations)
    recorded = [(one.index, one.incarnation or 0) for one in observed.deployment.status.replica_states]
    for index, incarnation in [(pod.index, pod.incarnation) for pod in observed.pods] + recorded:
        highest[index] = max(highest.get(index, -1), incarnation)
    return tuple(CreatePod(index=index, incarnation=highest.get(index, -1) + 1) for index, _ in zip(free, range(count), strict=False))
