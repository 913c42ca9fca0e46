# SPDX-License-Identifier: Apache-2.0
"""Evicted adapters back into memory where there is room again and no request would load them.

Only as many as fit, those with the highest priority first: one more would push another one out, and so on for ever. Only on
replicas that were made with the settings of the spec, because others may have less room than it says.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from diffusion_operator.api.adapter import Residency
from diffusion_operator.api.deployment_spec import Lora, OnMissing
from diffusion_operator.api.deployment_status import ReplicaState
from diffusion_operator.api.worker_state import RecordState, WorkerState
from diffusion_operator.plan.adapters.acceptance import DesiredAdapter
from diffusion_operator.plan.adapters.instances import push_of
from diffusion_operator.plan.adapters.load_attempts import attempt_key
from diffusion_operator.plan.adapters.records import current_record, in_place
from diffusion_operator.plan.observed.observed import Attempt, AttemptKey
from diffusion_operator.plan.observed.replica_state import Group
from diffusion_operator.plan.results.actions import PutAdapter

_OUT_OF_MEMORY = (RecordState.CACHED, RecordState.FAILED)


def refills(
    desired: Sequence[DesiredAdapter],
    groups: Sequence[Group],
    *,
    lora: Lora,
    pushes: Sequence[PutAdapter],
    attempts: Mapping[AttemptKey, Attempt],
    now: datetime,
) -> Iterator[PutAdapter]:
    """`pushes` are those that were planned already: they need room too. `groups` have the settings of the spec."""
    if lora.on_missing is OnMissing.LOAD:
        return
    for group in groups:
        if group.document is None or group.state is not ReplicaState.AWAKE or not group.poll.fresh:
            continue
        coming = sum(push.worker.pod_uid == group.pod.uid for push in pushes)
        room = lora.cached - _in_memory(group.document) - coming
        waiting = [one for one in desired if _waits(one, group, group.document, attempts, now)]
        waiting.sort(key=lambda one: (-one.load.priority, one.name))
        for one in waiting[: max(0, room)]:
            push = push_of(group, one, attempt=attempts.get(attempt_key(group, one)))
            if push is not None:
                yield push


def _in_memory(document: WorkerState) -> int:
    return sum(record.state not in _OUT_OF_MEMORY for record in document.adapters)


def _waits(desired: DesiredAdapter, group: Group, document: WorkerState, attempts: Mapping[AttemptKey, Attempt], now: datetime) -> bool:
    record = current_record(document, desired)
    if desired.load.residency is not Residency.CACHED or record is None:
        return False
    attempt = attempts.get(attempt_key(group, desired))
    may_try = attempt is None or (attempt.error is None and now >= attempt.next_retry)
    return record.state is RecordState.CACHED and in_place(record, desired) and record.error is None and may_try
