# SPDX-License-Identifier: Apache-2.0
"""Evicted adapters back into memory where there is room again and no request would load them.

Only as many as fit, those with the highest priority first: one more would push another one out, and so on for ever. Only on
replicas that were made with the settings of the spec, because others may have less room than it says.
"""

from collections.abc import Collection, Iterator, Sequence
from datetime import datetime

from diffusion_operator.api.deployment_spec import Lora, OnMissing
from diffusion_operator.api.deployment_status import ReplicaState
from diffusion_operator.plan.adapters.acceptance import DesiredAdapter
from diffusion_operator.plan.adapters.instances import push_of
from diffusion_operator.plan.adapters.row import Row, Table
from diffusion_operator.plan.observed.observed import Attempt
from diffusion_operator.plan.results.actions import PutAdapter

Waiting = tuple[DesiredAdapter, Attempt | None]


def refills(rows: Collection[Row], table: Table, *, lora: Lora, pushes: Sequence[PutAdapter]) -> Iterator[PutAdapter]:
    """Yield pushes of evicted adapters to awake replicas with room in memory; none where requests load adapters (`on_missing`).

    `pushes` are those that were planned already: they need room too.
    """
    if lora.on_missing is OnMissing.LOAD:
        return
    for place, group in enumerate(table.groups):
        if group.document is None or group.state is not ReplicaState.AWAKE or not group.poll.fresh or not table.columns[place].current:
            continue
        coming = sum(push.worker.pod_uid == group.pod.uid for push in pushes)
        room = lora.cached - group.document.in_memory - coming
        if room <= 0:
            continue
        for desired, attempt in _waiting(rows, place, table.now)[:room]:
            push = push_of(group, desired, attempt=attempt)
            if push is not None:
                yield push


def _waiting(rows: Collection[Row], place: int, now: datetime) -> list[Waiting]:
    """Return the evicted adapters of a replica that may be tried now, with their attempts, the highest priority first."""
    waiting = [
        (row.desired, attempt)
        for row in rows
        if row.cells[place].evicted and row.desired is not None and _may_try(attempt := row.cells[place].attempt, now)
    ]
    return sorted(waiting, key=lambda one: (-one[0].load.priority, one[0].name))


def _may_try(attempt: Attempt | None, now: datetime) -> bool:
    return attempt is None or (attempt.error is None and now >= attempt.next_retry)
