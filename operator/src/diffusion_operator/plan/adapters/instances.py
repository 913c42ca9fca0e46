# SPDX-License-Identifier: Apache-2.0
"""An adapter on a replica: its state, and whether to push it now.

A worker loads the adapters of its mounted file at its start. Push only adapters that changed since, that failed there and were not retried
in this process, or whose retry is due. A sleeping replica gets the push without being woken. It fetches and validates the file, reports
Deferred, and loads it before it serves again.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime

import msgspec

from diffusion_operator.api.adapter import ErrorStatus, InstanceState, InstanceStatus
from diffusion_operator.api.deployment_spec import Lora
from diffusion_operator.api.deployment_status import ReplicaState
from diffusion_operator.api.worker_state import AdapterRecord, RecordState, WireError
from diffusion_operator.plan.adapters.acceptance import DesiredAdapter
from diffusion_operator.plan.adapters.error_codes import FINAL
from diffusion_operator.plan.adapters.load_attempts import attempt_key
from diffusion_operator.plan.adapters.records import (
    comes_from,
    current_record,
    error_of,
    in_place,
    is_coming,
    is_deferred,
    is_told,
    other_version,
)
from diffusion_operator.plan.observed.observed import Attempt
from diffusion_operator.plan.observed.replica_state import Group
from diffusion_operator.plan.observed.states import ADAPTER_CALL_STATES
from diffusion_operator.plan.results.actions import PutAdapter, RemoveAdapter, WorkerAddress


class Instance(msgspec.Struct, frozen=True, gc=False):
    """An adapter on one replica: its entry for the status, the worker's record, and the push that is due, if any."""

    status: InstanceStatus
    record: AdapterRecord | None = None
    """Without what changes with every request."""
    push: PutAdapter | None = None
    error: WireError | None = None
    other_digest: str | None = None
    """The digest of another version that serves under the name."""
    other_identity: str | None = None
    drifted: bool = False
    """The other version comes from the declared source: its bytes differ from the pinned ones."""
    evictions: int = 0
    """Evictions of the last ten minutes that nobody requested."""

    @property
    def done(self) -> bool:
        """True once the adapter is in place and no push is planned, or its load has failed.

        Failure is included, so that serving of the base model never waits for a broken adapter.
        """
        in_place = self.status.state in (InstanceState.LOADED, InstanceState.CACHED) and self.push is None
        return in_place or self.status.state is InstanceState.FAILED


def worker_address(group: Group) -> WorkerAddress | None:
    """Return the address of the process that wrote a replica's last state document.

    None without a document, with a stale one, or without a pod IP.
    """
    if group.document is None or not group.poll.fresh or not group.pod.ip:
        return None
    return WorkerAddress(pod_uid=group.pod.uid, ip=group.pod.ip, boot_id=group.document.boot_id)


def instance_of(
    group: Group, desired: DesiredAdapter, records: Sequence[AdapterRecord], *, attempt: Attempt | None, now: datetime
) -> Instance:
    """Return the state of an adapter on a replica, with its error, and with a push if one is due.

    `records` are the replica's records under its name. It is Deferred while the replica takes no calls.
    """
    if group.document is None or group.state not in ADAPTER_CALL_STATES:
        return Instance(status=_status(group, InstanceState.DEFERRED))
    record = current_record(records, desired)
    other = other_version(records, desired) if group.state is ReplicaState.AWAKE else None
    state = _state(record, desired, attempt) if group.state is ReplicaState.AWAKE else _state_asleep(record, desired, attempt)
    error = _error(record, desired, attempt) if state is InstanceState.FAILED else None
    due = _due(record, desired, attempt, now=now)
    return Instance(
        status=_status(group, state, record=record, attempt=attempt, error=error),
        record=_steady(record) if record is not None else None,
        push=push_of(group, desired, attempt=attempt) if due else None,
        error=error,
        other_digest=other.digest if other is not None else None,
        other_identity=other.identity if other is not None else None,
        drifted=other is not None and desired.load.digest is not None and comes_from(other, desired),
        evictions=len(attempt.evictions) if attempt is not None else 0,
    )


def leaving_instances(group: Group, records: Sequence[AdapterRecord]) -> tuple[Instance, ...]:
    """Return an instance in the state Draining for each record of an adapter that is to go.

    So the status shows replicas whose requests still use it. Empty unless the replica is awake.
    """
    if group.state is not ReplicaState.AWAKE:
        return ()
    return tuple(Instance(status=_status(group, InstanceState.DRAINING, record=one), record=_steady(one)) for one in records)


def undeclared_removals(group: Group, wanted: Mapping[str, object], *, lora: Lora) -> tuple[RemoveAdapter, ...]:
    """Plan removals of the adapters that a worker holds under names outside `wanted`, but for those that drain already.

    Empty while the worker takes no adapter calls.
    """
    address = worker_address(group)
    if address is None or group.document is None or group.state not in ADAPTER_CALL_STATES:
        return ()
    if group.document.named.keys() <= wanted.keys():
        return ()
    return tuple(
        RemoveAdapter(
            worker=address,
            operation_id=f"remove-{name}-{address.boot_id[:8]}",
            name=name,
            drain_s=lora.drain_timeout_seconds,
        )
        for name, records in group.document.named.items()
        if name not in wanted and not _drains(records)
    )


def _drains(records: Sequence[AdapterRecord]) -> bool:
    """Return whether all records are draining already."""
    return all(one.state is RecordState.DRAINING for one in records)


def _steady(record: AdapterRecord) -> AdapterRecord:
    return msgspec.structs.replace(record, refs=0, requests_total=0, last_request_age_seconds=None)


def _is_wanted(record: AdapterRecord, desired: DesiredAdapter, attempt: Attempt | None) -> bool:
    """Return whether the adapter is in place, or will be when a sleeping replica wakes.

    If another version was pinned before, the worker must also have taken a push of this one.
    """
    told = attempt is not None and attempt.count > 0 and attempt.error is None
    return (in_place(record, desired) or is_deferred(record, desired)) and (told or not desired.changed)


def _state(record: AdapterRecord | None, desired: DesiredAdapter, attempt: Attempt | None) -> InstanceState:
    if record is not None:
        if _is_wanted(record, desired, attempt):
            # The last request for it failed to load it. The next request tries again and may fail alike.
            stranded = record.state is RecordState.CACHED and record.error is not None
            return InstanceState.FAILED if stranded else InstanceState(record.state.value)
        if is_coming(record, desired):
            return InstanceState(record.state.value)
    if _error(record, desired, attempt) is not None:
        return InstanceState.FAILED
    tried = record is not None or (attempt is not None and attempt.count > 0)
    return InstanceState.LOADING if tried else InstanceState.PENDING


def _state_asleep(record: AdapterRecord | None, desired: DesiredAdapter, attempt: Attempt | None) -> InstanceState:
    """Return Fetching or Failed, as for an awake replica, else Deferred: nothing is loaded before the wake."""
    state = _state(record, desired, attempt)
    return state if state in (InstanceState.FETCHING, InstanceState.FAILED) else InstanceState.DEFERRED


def _error(record: AdapterRecord | None, desired: DesiredAdapter, attempt: Attempt | None) -> WireError | None:
    """Return the error of the operator's last try, else that of a load that the worker tried by itself; None without either."""
    if attempt is not None and attempt.error is not None:
        return attempt.error
    idle = record is not None and record.state in (RecordState.FAILED, RecordState.CACHED)
    error = error_of(record, desired) if record is not None and idle else None
    return msgspec.structs.replace(error, retryable=error.code not in FINAL) if error is not None else None


def _due(record: AdapterRecord | None, desired: DesiredAdapter, attempt: Attempt | None, *, now: datetime) -> bool:
    if record is not None and _is_wanted(record, desired, attempt) and is_told(record, desired):
        return False
    if attempt is None:
        return record is None or not is_coming(record, desired)
    return now >= attempt.next_retry


def push_of(group: Group, desired: DesiredAdapter, *, attempt: Attempt | None) -> PutAdapter | None:
    """Build the call that puts an adapter on a replica; None if the replica has no current `worker_address`."""
    address = worker_address(group)
    if address is None:
        return None
    count = attempt.count if attempt else 0
    return PutAdapter(
        worker=address,
        key=attempt_key(group, desired),
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
    fetching = record if record is not None and state is InstanceState.FETCHING else None
    settled = state in (InstanceState.LOADED, InstanceState.CACHED)
    tried = attempt is not None and not settled and (attempt.count > 0 or attempt.error is not None)
    return InstanceStatus(
        replica=group.index,
        state=state,
        pod_uid=group.pod.uid,
        boot_id=group.boot_id,
        incarnation=group.pod.incarnation,
        ranks_loaded=record.ranks_loaded if record else None,
        ranks_total=record.ranks_total if record else None,
        digest=record.digest if record else None,
        identity=record.identity if record else None,
        fetched_bytes=fetching.fetched_bytes if fetching else None,
        total_bytes=fetching.total_bytes if fetching else None,
        attempts=attempt.count if attempt is not None and tried else None,
        next_retry_time=attempt.next_retry if attempt is not None and attempt.error is not None else None,
        last_error=ErrorStatus(code=error.code, message=error.message[:1024], retryable=error.retryable) if error else None,
    )
