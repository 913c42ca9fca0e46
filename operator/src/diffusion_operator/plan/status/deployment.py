# SPDX-License-Identifier: Apache-2.0
"""The status of a DiffusionDeployment, computed from its replicas as they are now.

Workers report ages; a time in a status is the operator's clock minus an age, and moves a little between looks. A time that only moved so is
kept as it was written, so that an idle deployment's status does not change.
"""

import math
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import TypeVar

import msgspec

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.deployment_spec import DeploymentSpec, SleepPolicy
from diffusion_operator.api.deployment_status import (
    DeploymentStatus,
    EndpointsStatus,
    FailureStatus,
    HeldStatus,
    LoadStatus,
    OperationStatus,
    ReplicaState,
    ReplicaStatus,
)
from diffusion_operator.api.meta import settle_conditions
from diffusion_operator.api.names import LABEL_DEPLOYMENT
from diffusion_operator.plan.observed.replica_state import IMAGE_REASONS, Group, failure_of
from diffusion_operator.plan.observed.states import READY_STATES
from diffusion_operator.plan.replicas.revision import Template, restart_of
from diffusion_operator.plan.results.actions import CreatePod
from diffusion_operator.plan.sleep.idleness import next_sleep_in_s
from diffusion_operator.plan.status.conditions import deployment_verdicts
from diffusion_operator.plan.status.inputs import Situation

GROUPS_SHOWN = 64  # the schema's bound
GROUPS_BYTES = 256 << 10
JITTER = timedelta(seconds=3)  # whole seconds here, and up to two that a poll takes
StatusWithMessage = TypeVar("StatusWithMessage", FailureStatus, OperationStatus)
_SHORTER = (512, 128, 32)  # characters, of up to four bytes; the last fits in any case


def deployment_status(
    deployment: DiffusionDeployment,
    situation: Situation,
    *,
    groups: Sequence[Group],
    template: Template,
    made: Sequence[CreatePod],
    now: datetime,
) -> DeploymentStatus:
    """Compute the status. `groups` includes terminating ones, `situation` only those that count; `made` are pods created in this pass."""
    name, before = deployment.metadata.name, deployment.status
    count = situation.count
    shown, truncated = truncate_groups((*(group_status(group) for group in groups), *_between_pods(before, groups, made)))
    updated = sum(group.pod.revision == template.revision for group in situation.groups)
    return DeploymentStatus(
        observed_generation=deployment.metadata.generation,
        served_name=deployment.served_name,
        engine_image=template.image,
        default_engine_image=template.default,
        default_engine_image_for=restart_of(deployment),
        replicas=len(situation.groups),
        updated_replicas=updated,
        ready_replicas=sum(group.state in READY_STATES and group.pod.ready for group in situation.groups),
        available_replicas=situation.serving,
        awake_replicas=count(ReplicaState.AWAKE),
        asleep_replicas=count(ReplicaState.ASLEEP),
        failed_replicas=count(ReplicaState.FAILED),
        selector=f"{LABEL_DEPLOYMENT}={name}",
        current_revision=template.revision if situation.progress.done else before.current_revision,
        update_revision=template.revision,
        rollout=situation.progress.record,
        model=situation.resolution.model,
        endpoints=EndpointsStatus(url=_url(deployment) if not situation.no_service else None),
        adapters=situation.adapters.tally.summary,
        held=held_requests(situation.groups),
        last_request_time=last_request_time(situation.groups, before=before.last_request_time, now=now),
        sleep_eligible_time=sleep_eligible_time(
            deployment.spec, situation.groups, rolling=situation.rolling, before=before.sleep_eligible_time, now=now
        ),
        avoided_nodes=situation.avoided_nodes,
        replica_states_truncated=truncated or None,
        replica_states=shown,
        conditions=settle_conditions(
            deployment_verdicts(situation), previous=before.conditions, generation=deployment.metadata.generation, now=now
        ),
    )


def _url(deployment: DiffusionDeployment) -> str:
    metadata = deployment.metadata
    return f"http://{metadata.name}.{metadata.namespace}.svc:{deployment.spec.service.port}/v1"


def _between_pods(before: DeploymentStatus, groups: Sequence[Group], made: Sequence[CreatePod]) -> Iterator[ReplicaStatus]:
    """Yield a status for each replica whose pod is gone and whose next one is made in this pass, if it has failures to keep.

    With another template they no longer count, but the last one is still shown.
    """
    present, coming = {group.index for group in groups}, {action.index for action in made}
    for known in before.replica_states:
        if known.index in coming - present and (known.failures or known.last_failure):
            yield ReplicaStatus(
                index=known.index,
                state=ReplicaState.PENDING,
                incarnation=known.incarnation,
                revision=known.revision,
                failures=known.failures,
                failing_since=known.failing_since,
                last_failure=known.last_failure,
            )


def group_status(group: Group) -> ReplicaStatus:
    return ReplicaStatus(
        index=group.index,
        state=group.state,
        incarnation=group.pod.incarnation,
        boot_id=group.boot_id or (group.previous.boot_id if group.previous and group.live else None),
        leader_pod=group.pod.name,
        node=group.pod.node or None,
        revision=group.pod.revision or None,
        message=group.message[:1024] or None,
        restarts=group.pod.container.restarts,
        failures=group.failures.count or None,
        failing_since=group.failures.since,
        next_restart_time=group.failures.next_restart,
        load=load_status(group),
        last_failure=failure_of(group),
        generation=group.document.generation if group.document else None,
        last_rank_loss=_last_rank_loss(group),
        last_operation=_last_operation(group),
    )


def _last_operation(group: Group) -> OperationStatus | None:
    """Return the last sleep or wake that the replica's worker reports.

    While a live replica does not answer, return the one in the status before.
    """
    last = group.document.last_operation if group.document is not None else None
    if group.document is None:
        return group.previous.last_operation if group.previous is not None and group.live else None
    if last is None:
        return None
    size = group.document.model.size_bytes if last.kind == "wake" and last.error is None else None
    return OperationStatus(
        id=last.operation_id[:128],
        kind=last.kind,
        level=last.level if last.level is not None and last.level.known else None,  # the schema takes no other word
        seconds=f"{last.seconds:.3f}",
        bytes=last.freed_bytes if last.kind == "sleep" else size,
        code=last.error.code if last.error is not None else None,
        message=last.error.message[:1024] if last.error is not None else None,
    )


def _last_rank_loss(group: Group) -> str | None:
    """Return the last loss that this server process reports; a new process reports none."""
    loss = group.document.last_loss if group.document else None
    return f"{loss.fault}: {loss.message}"[:1024] if loss else None


def load_status(group: Group) -> LoadStatus | None:
    """Return the progress of a replica that is pending or starting, as far as it is known; otherwise None.

    Times are the cluster's and the node's own.
    """
    if group.state is ReplicaState.PENDING:
        return LoadStatus(stage="Scheduling", started_at=group.pod.created_at)
    if group.state is not ReplicaState.STARTING:
        return None
    if not group.pod.container.running:
        return _pulling(group)
    if group.document is None or not group.document.load.stage:
        return None
    load = group.document.load
    return LoadStatus(
        stage=load.stage[:32],
        bytes_done=load.bytes_done,
        bytes_total=load.bytes_total,
        percent=min(100, 100 * load.bytes_done // load.bytes_total) if load.bytes_total else None,
        started_at=None if group.restarting else group.pod.container.started_at,
    )


def _pulling(group: Group) -> LoadStatus | None:
    """Return the stage ImagePull if a container waits for its image, which it does once its volumes are ready; else None."""
    pod = group.pod
    creating = pod.container.waiting_reason == "ContainerCreating" and pod.set_up_at is not None
    if creating or pod.container.waiting_reason in IMAGE_REASONS:
        return LoadStatus(stage="ImagePull", started_at=pod.set_up_at)
    return None


def truncate_groups(groups: Sequence[ReplicaStatus]) -> tuple[tuple[ReplicaStatus, ...], bool]:
    """Return the records to show, sorted by index, and whether any was left out or shortened. etcd takes at most 1.5 MiB of an object.

    At most 64 are shown, those with a message or with failures first. Their texts are shortened where all take more than 256 KiB.
    """
    shown = sorted(sorted(groups, key=_silent)[:GROUPS_SHOWN], key=lambda group: group.index)
    whole = len(shown) == len(groups)
    for limit in _SHORTER:
        if len(msgspec.json.encode(shown)) <= GROUPS_BYTES:
            break
        shown, whole = [_cut(group, limit) for group in shown], False
    return tuple(shown), not whole


def _silent(group: ReplicaStatus) -> bool:
    return group.message is None and not group.failures


def _cut(group: ReplicaStatus, limit: int) -> ReplicaStatus:
    return msgspec.structs.replace(
        group,
        message=_shorter(group.message, limit),
        last_rank_loss=_shorter(group.last_rank_loss, limit),
        last_failure=_with_shorter_message(group.last_failure, limit),
        last_operation=_with_shorter_message(group.last_operation, limit),
    )


def _with_shorter_message(told: StatusWithMessage | None, limit: int) -> StatusWithMessage | None:
    return None if told is None else msgspec.structs.replace(told, message=_shorter(told.message, limit))


def _shorter(text: str | None, limit: int) -> str | None:
    return text if text is None or len(text) <= limit else f"{text[: limit - 1]}…"


def held_requests(groups: Sequence[Group]) -> HeldStatus | None:
    """Sum up the held requests of all replicas, with the oldest one's age in whole seconds; None before any replica has answered."""
    held = [group.document.held for group in groups if group.document is not None]
    if not held:
        return None
    aged = [group.poll.since_s + (group.document.held.oldest_age_seconds or 0) for group in groups if group.document and group.held]
    return HeldStatus(current=sum(one.current for one in held), oldest_seconds=math.floor(max(aged)) if aged else None)


def last_request_time(groups: Sequence[Group], *, before: datetime | None, now: datetime) -> datetime | None:
    """Return the time of the last request. A new server process has none, so the earlier time stays.

    It stays too if the new time is less than 3 s later.
    """
    ages = [group.poll.request_age_s for group in groups if group.poll.fresh]
    times = [now - timedelta(seconds=round(age)) for age in ages if age is not None]
    latest = max(times, default=before)
    return before if before is not None and latest is not None and latest < before + JITTER else latest


def sleep_eligible_time(
    spec: DeploymentSpec, groups: Sequence[Group], *, rolling: bool, before: datetime | None, now: datetime
) -> datetime | None:
    """Return the time at which a replica may sleep if no request comes; a time that moved less than 3 s stays as it was.

    None without OnIdle, during a rollout (`rolling`), and if none may.
    """
    due_in_s = next_sleep_in_s(spec, groups) if spec.sleep.policy is SleepPolicy.ON_IDLE and not rolling else None
    if due_in_s is None:
        return None
    due = now + timedelta(seconds=round(due_in_s))
    return before if before is not None and abs(due - before) < JITTER else due
