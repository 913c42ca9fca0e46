# SPDX-License-Identifier: Apache-2.0
"""One adapter on one replica: what it is, and whether to push it now.

A worker tries the adapters of its mounted file itself when it starts, so a push is for what changed since, what the worker reports as
failed and was not yet tried by us in this life of its process, and what is due for another try. Nothing is pushed to a replica that is
not awake: it is recorded as Deferred and done before the replica counts as Awake again.
"""

from collections.abc import Mapping
from datetime import datetime

import msgspec

from diffusion_operator.api.adapter import ErrorStatus, InstanceState, InstanceStatus
from diffusion_operator.api.deployment import GroupState, Lora
from diffusion_operator.api.source import identity
from diffusion_operator.api.worker_state import AdapterRecord, RecordState, WireError, WorkerState
from diffusion_operator.plan.acceptance import DesiredAdapter
from diffusion_operator.plan.actions import PutAdapter, RemoveAdapter, WorkerAddress
from diffusion_operator.plan.groups import Group
from diffusion_operator.plan.observed import Attempt, AttemptKey

SCALE_TOLERANCE = 1e-6


class Instance(msgspec.Struct, frozen=True):
    """The record for status, and the push that would bring it forward."""

    status: InstanceStatus
    record: AdapterRecord | None = None
    push: PutAdapter | None = None

    @property
    def done(self) -> bool:
        """Nothing more will happen by itself soon: loaded, or tried and failed. A broken adapter never keeps the base from serving."""
        return self.status.state in (InstanceState.LOADED, InstanceState.FAILED)


def worker_address(group: Group) -> WorkerAddress | None:
    """Where a call to this life of the server goes; None while it cannot be called."""
    if group.document is None or not group.poll.fresh or not group.pod.ip:
        return None
    return WorkerAddress(pod_uid=group.pod.uid, ip=group.pod.ip, boot_id=group.document.boot_id)


def instance_of(group: Group, desired: DesiredAdapter, *, attempts: Mapping[AttemptKey, Attempt], lora: Lora, now: datetime) -> Instance:
    document = group.document
    if document is None or group.state is not GroupState.AWAKE:
        return Instance(status=_status(group, InstanceState.DEFERRED))
    record = _record(document, desired)
    key = AttemptKey(adapter_uid=desired.uid, generation=desired.generation, boot_id=document.boot_id)
    attempt = attempts.get(key)
    state = _state(record, desired, attempt)
    if record is not None and state is InstanceState.LOADED:
        return Instance(status=_status(group, state, record=record), record=record)
    return Instance(
        status=_status(group, state, record=record, attempt=attempt, error=_error(record, attempt)),
        record=record,
        push=_push(group, desired, key=key, attempt=attempt, lora=lora) if _due(record, desired, attempt, now) else None,
    )


def matches(record: AdapterRecord, desired: DesiredAdapter) -> bool:
    """Loaded on all ranks, from this source, with the digest that is asked for. Reported, never assumed."""
    return (
        record.state is RecordState.LOADED
        and identity(record.source) == identity(desired.load.source)
        and desired.load.digest in (None, record.digest)
        and record.ranks_loaded == record.ranks_total
        and abs(record.scale - desired.load.scale) < SCALE_TOLERANCE
    )


def strays(group: Group, wanted: frozenset[str], *, lora: Lora) -> tuple[RemoveAdapter, ...]:
    """What runs and is no longer declared."""
    address = worker_address(group)
    if address is None or group.document is None or group.state is not GroupState.AWAKE:
        return ()
    return tuple(
        RemoveAdapter(
            worker=address,
            operation_id=f"remove-{record.name}-{address.boot_id[:8]}",
            name=record.name,
            drain_s=lora.drain_timeout_seconds,
        )
        for record in group.document.adapters
        if record.name not in wanted and record.state is not RecordState.DRAINING
    )


def _record(document: WorkerState, desired: DesiredAdapter) -> AdapterRecord | None:
    """The record that counts: an older load of the name may still drain beside it."""
    named = [one for one in document.adapters if one.name == desired.name and one.state is not RecordState.DRAINING]
    return next((one for one in named if matches(one, desired)), named[0] if named else None)


def _state(record: AdapterRecord | None, desired: DesiredAdapter, attempt: Attempt | None) -> InstanceState:
    if record is not None:
        if matches(record, desired):
            return InstanceState.LOADED
        if record.state is RecordState.LOADING:
            return InstanceState.LOADING
    if _error(record, attempt) is not None:
        return InstanceState.FAILED
    return InstanceState.LOADING if attempt is not None or record is not None else InstanceState.PENDING


def _error(record: AdapterRecord | None, attempt: Attempt | None) -> WireError | None:
    if attempt is not None and attempt.error is not None:
        return attempt.error
    return record.error if record is not None and record.state is RecordState.FAILED else None


def _due(record: AdapterRecord | None, desired: DesiredAdapter, attempt: Attempt | None, now: datetime) -> bool:
    if record is not None and (record.state is RecordState.LOADING or matches(record, desired)):
        return False
    if attempt is None:
        return True
    error = _error(record, attempt)
    return (error is None or error.retryable) and now >= attempt.next_retry


def _push(group: Group, desired: DesiredAdapter, *, key: AttemptKey, attempt: Attempt | None, lora: Lora) -> PutAdapter | None:
    address = worker_address(group)
    if address is None:
        return None
    count = attempt.count if attempt else 0
    return PutAdapter(
        worker=address,
        key=key,
        operation_id=f"put-{desired.name}-{desired.uid[:8]}-{desired.generation}-{count + 1}",
        name=desired.name,
        load=desired.load,
        deadline_s=desired.load_timeout_s,
    )


def _status(
    group: Group,
    state: InstanceState,
    *,
    record: AdapterRecord | None = None,
    attempt: Attempt | None = None,
    error: WireError | None = None,
) -> InstanceStatus:
    retryable = error is not None and error.retryable
    return InstanceStatus(
        group=group.index,
        state=state,
        pod_uid=group.pod.uid,
        boot_id=group.boot_id,
        incarnation=group.pod.incarnation,
        ranks_loaded=record.ranks_loaded if record else None,
        ranks_total=record.ranks_total if record else None,
        digest=record.digest if record else None,
        attempts=attempt.count if attempt else None,
        next_retry_time=attempt.next_retry if attempt and retryable else None,
        last_error=ErrorStatus(code=error.code, message=error.message[:1024], retryable=error.retryable) if error else None,
    )
