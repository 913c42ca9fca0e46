# SPDX-License-Identifier: Apache-2.0
"""An adapter on every replica: what was planned, and what it was planned from.

A cell is one adapter on one replica. It is kept while its column, records, attempt and desired state are the same, until the time comes
that it waits for.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from diffusion_operator.api.adapter import LoRAAdapter, Residency
from diffusion_operator.api.deployment_status import ReplicaState
from diffusion_operator.api.worker_state import AdapterRecord, RecordState, WireError
from diffusion_operator.plan.adapters.acceptance import Claim, Decision, DesiredAdapter
from diffusion_operator.plan.adapters.instances import Instance, instance_of, leaving_instances
from diffusion_operator.plan.adapters.load_attempts import THRASH_WINDOW, learned, recalled
from diffusion_operator.plan.adapters.mounted_file import Refusal, refused
from diffusion_operator.plan.adapters.records import current_record, in_place
from diffusion_operator.plan.adapters.usage import Use, use_of
from diffusion_operator.plan.observed.observed import Attempt, AttemptKey
from diffusion_operator.plan.observed.replica_state import Group
from diffusion_operator.plan.observed.states import ADAPTER_CALL_STATES
from diffusion_operator.plan.results.actions import PutAdapter

Named = Mapping[str, tuple[AdapterRecord, ...]]


class Column(msgspec.Struct, frozen=True):
    """A replica, as far as the plan of an adapter there depends on it, without what it says of adapters."""

    index: int
    pod_uid: str
    incarnation: int
    ip: str
    boot_id: str | None
    state: ReplicaState
    fresh: bool
    current: bool
    """It has the settings of the spec. Others are about to go."""


class Cell(msgspec.Struct, frozen=True, gc=False):
    records: tuple[AdapterRecord, ...] = ()
    attempt: Attempt | None = None
    instances: tuple[Instance, ...] = ()
    """Exactly one of an adapter that is to be served."""
    use: Use = Use()
    evicted: bool = False
    """Out of memory, and may come back when there is room."""
    again_at: datetime | None = None
    """Then time alone may change it."""

    @property
    def errors(self) -> tuple[WireError, ...]:
        return tuple(one.error for one in self.instances if one.error is not None)

    @property
    def done(self) -> bool:
        return all(one.done for one in self.instances)


class Decided(msgspec.Struct, frozen=True, gc=False):
    claim: Claim
    accepted: Decision
    """Whatever room there is in the mounted files."""


class Row(msgspec.Struct, frozen=True, gc=False):
    decided: Decided
    decision: Decision
    """Without what replicas found out."""
    cells: tuple[Cell, ...]
    pushes: tuple[PutAdapter, ...] = ()
    again_at: datetime | None = None

    @property
    def adapter(self) -> LoRAAdapter:
        return self.decision.adapter

    @property
    def claim(self) -> Claim:
        return self.decided.claim

    @property
    def accepted(self) -> Decision:
        return self.decided.accepted

    def is_due(self, now: datetime) -> bool:
        return self.again_at is not None and self.again_at <= now

    @property
    def instances(self) -> tuple[Instance, ...]:
        return tuple(one for cell in self.cells for one in cell.instances)

    @property
    def desired(self) -> DesiredAdapter | None:
        return self.decision.desired


class Table(msgspec.Struct, frozen=True):
    """All that the cells of one pass have in common."""

    columns: tuple[Column, ...]
    groups: tuple[Group, ...]
    named: tuple[Named, ...]
    """Records of the replicas, by the adapter's name."""
    origins: tuple[int | None, ...]
    """Places in a row of the pass before: cells of the same life of a server process."""
    kept: frozenset[int]
    """Columns that are as they were."""
    news: Mapping[AttemptKey, Attempt]
    """Attempts that calls since the pass before came to."""
    now: datetime

    def records(self, name: str) -> tuple[tuple[AdapterRecord, ...], ...]:
        return tuple(one.get(name, ()) for one in self.named)


def column_of(group: Group, *, revision: str) -> Column:
    return Column(
        index=group.index,
        pod_uid=group.pod.uid,
        incarnation=group.pod.incarnation,
        ip=group.pod.ip,
        boot_id=group.boot_id,
        state=group.state,
        fresh=group.poll.fresh,
        current=group.pod.revision == revision,
    )


def row_of(decided: Decided, refusal: Refusal | None, table: Table, *, known: Row | None) -> Row:
    """Build an adapter's row, with a cell for each replica. A `refusal` for lack of room in the files overrules the decision.

    `known` is the adapter's row of the pass before, whose unchanged cells are kept.
    """
    adapter, decision = decided.accepted.adapter, refused(decided.accepted, refusal)
    records = table.records(adapter.served_name)
    before = _cells(known, table, same_spec=known is not None and known.adapter.metadata.generation == adapter.metadata.generation)
    same = known is not None and known.decision.desired == decision.desired and known.decision.accepted == decision.accepted
    cells = tuple(
        _cell(column, decision, records[column], table, known=before[column], same=same and column in table.kept)
        for column in range(len(table.columns))
    )
    return Row(
        decided=decided,
        decision=decision,
        cells=cells,
        pushes=tuple(one.push for cell in cells for one in cell.instances if one.push is not None),
        again_at=min((cell.again_at for cell in cells if cell.again_at is not None), default=None),
    )


def _cells(known: Row | None, table: Table, *, same_spec: bool) -> tuple[Cell | None, ...]:
    """Return the cells of the row before, in today's columns; None for new columns. Without `same_spec` attempts are dropped."""
    if known is None:
        return (None,) * len(table.columns)
    cells = (known.cells[one] if one is not None else None for one in table.origins)
    return tuple(cell if cell is None or same_spec else msgspec.structs.replace(cell, attempt=None) for cell in cells)


def _cell(column: int, decision: Decision, records: tuple[AdapterRecord, ...], table: Table, *, known: Cell | None, same: bool) -> Cell:
    group, attempt = table.groups[column], _attempt(table, column, decision.adapter, known)
    due = known is None or (known.again_at is not None and known.again_at <= table.now)
    if known is not None and same and not due and known.records is records and known.attempt is attempt:
        return known
    heard_at = table.now - timedelta(seconds=group.poll.since_s)
    use = known.use if known is not None and known.records is records else use_of(records, heard_at)
    desired = decision.desired
    if desired is None:
        leaving = leaving_instances(group, records) if decision.accepted else ()
        return Cell(records=records, attempt=attempt, instances=leaving, use=use)
    settled = True
    if group.state in ADAPTER_CALL_STATES and group.poll.fresh:
        attempt = learned(attempt, record := current_record(records, desired), desired, now=table.now)
        settled = learned(attempt, record, desired, now=table.now) == attempt
    instance = instance_of(group, desired, records, attempt=attempt, now=table.now)
    return Cell(
        records=records,
        attempt=attempt,
        instances=(instance,),
        use=use,
        evicted=_evicted(records, desired),
        again_at=_again_at(attempt, table.now) if settled else table.now,
    )


def _attempt(table: Table, column: int, adapter: LoRAAdapter, known: Cell | None) -> Attempt | None:
    """Return the newest attempt: from a call since the pass before, from the cell before, or from the adapter's status.

    None without one, or while the replica has not answered.
    """
    boot_id = table.columns[column].boot_id
    if boot_id is None:
        return None
    key = AttemptKey(adapter_uid=adapter.metadata.uid, generation=adapter.metadata.generation, boot_id=boot_id)
    attempt = table.news.get(key) or (known.attempt if known is not None else None)
    return attempt if attempt is not None else recalled(adapter, boot_id, table.now)


def _evicted(records: Sequence[AdapterRecord], desired: DesiredAdapter) -> bool:
    record = current_record(records, desired)
    if record is None or desired.load.residency is not Residency.CACHED:
        return False
    return record.state is RecordState.CACHED and in_place(record, desired) and record.error is None


def _again_at(attempt: Attempt | None, now: datetime) -> datetime | None:
    """Return the next time at which the attempt is due or an eviction is forgotten; None if there is none after `now`."""
    if attempt is None:
        return None
    times = [attempt.next_retry, *(when + THRASH_WINDOW for when in attempt.evictions)]
    return min((when for when in times if when > now), default=None)
