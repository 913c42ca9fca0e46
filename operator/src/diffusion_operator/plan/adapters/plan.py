# SPDX-License-Identifier: Apache-2.0
"""The adapters of a deployment on its replicas: decisions, records and pushes, and what each LoRAAdapter's status is computed from.

The deployment's reconcile decides and acts, because acceptance, capacity and the mounted file span all adapters. The LoRAAdapter's
reconcile writes its object's status from this view.

Planning is by difference: a plan remembers what it was made from. The next one looks again only at adapters that changed, whose records
or attempts did, or whose time has come. It looks at all of them where the deployment or a replica changed. The result is that of a plan
from nothing with the same attempts.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import TypeVar

import msgspec

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.deployment_status import AdaptersStatus, ReplicaState
from diffusion_operator.api.meta import ObjectMeta
from diffusion_operator.api.worker_state import AdapterRecord
from diffusion_operator.plan.adapters.acceptance import Claim, decide
from diffusion_operator.plan.adapters.instances import undeclared_removals
from diffusion_operator.plan.adapters.mounted_file import NO_ADAPTERS, AdapterFile, Refusal, plan_file, refusals_of
from diffusion_operator.plan.adapters.refilling import refills
from diffusion_operator.plan.adapters.roster import Roster, enroll
from diffusion_operator.plan.adapters.row import Column, Decided, Named, Row, Table, column_of, row_of
from diffusion_operator.plan.adapters.slices import SLICE, Slices
from diffusion_operator.plan.adapters.view import BROKEN, READY, REFUSED, WANTED, AdapterView, Frame, frame_of, marks_of, view_of
from diffusion_operator.plan.observed.observed import Attempt, AttemptKey, Observed
from diffusion_operator.plan.observed.replica_state import Group
from diffusion_operator.plan.results.actions import PutAdapter, RemoveAdapter

NAMED = 20
"""Names in a message; of more it says how many."""

Value = TypeVar("Value")


class Tally(msgspec.Struct, frozen=True):
    """Adapters of a deployment counted by their marks, and named as far as anybody reads."""

    views: Mapping[str, AdapterView] = {}
    """Views by UID, in the order of precedence."""
    marks: Mapping[str, int] = {}
    counts: Mapping[int, int] = {}
    """Views by their marks."""

    @property
    def summary(self) -> AdaptersStatus:
        return AdaptersStatus(desired=self.count(WANTED), ready=self.count(READY), failed=self.count(REFUSED | BROKEN))

    def count(self, any_of: int, *, none_of: int = 0) -> int:
        return sum(number for marks, number in self.counts.items() if marks & any_of and not marks & none_of)

    def first(self, any_of: int) -> AdapterView | None:
        return next((self.views[uid] for uid, marks in self.marks.items() if marks & any_of), None) if self.count(any_of) else None

    def names(self, any_of: int, *, none_of: int = 0) -> str:
        """Format the names of adapters with a mark of `any_of` and none of `none_of`, as `a, b, c and 17 more`.

        At most 20 are named; empty without any.
        """
        having = (uid for uid, marks in self.marks.items() if marks & any_of and not marks & none_of)
        names = [self.views[uid].decision.adapter.metadata.name for uid in islice(having, NAMED)]
        more = self.count(any_of, none_of=none_of) - len(names)
        return ", ".join(names) + (f" and {more} more" if more else "")


class AdapterPlan(msgspec.Struct, frozen=True):
    tally: Tally = Tally()
    """With the views."""
    changed: tuple[AdapterView, ...] = ()
    """Views that are not those of the plan before."""
    groups: tuple[Group, ...] = ()
    """The same groups, those that are not yet verified as Verifying."""
    pushes: tuple[PutAdapter, ...] = ()
    removals: tuple[RemoveAdapter, ...] = ()
    dropped: Mapping[str, ObjectMeta] = {}
    """Adapters that were to be served in the plan before, and are no more; by name."""
    again_at: datetime | None = None
    """When time alone changes something."""

    # Remembered for the next plan.
    frame: Frame | None = None
    roster: Roster = Roster()
    columns: tuple[Column, ...] = ()
    named: tuple[Named, ...] = ()
    states: tuple[ReplicaState, ...] = ()
    rows: Mapping[str, Row] = {}
    wanted: Mapping[str, str] = {}
    """UIDs by name."""
    file: AdapterFile = NO_ADAPTERS
    refusals: Mapping[str, Refusal] = {}
    """Adapters that the file has no room for, by UID."""
    eager: Mapping[str, Row] = {}
    """Rows with pushes or with a time, by UID."""

    @property
    def calls(self) -> tuple[PutAdapter | RemoveAdapter, ...]:
        """All calls of the plan to workers: removals come first because they make room, then pushes."""
        return (*self.removals, *self.pushes)

    @property
    def views(self) -> tuple[AdapterView, ...]:
        return tuple(self.tally.views.values())

    def attempt(self, key: AttemptKey) -> Attempt | None:
        row = self.rows.get(key.adapter_uid)
        column = next((place for place, one in enumerate(self.columns) if one.boot_id == key.boot_id), None)
        same = row is not None and row.adapter.metadata.generation == key.generation
        return row.cells[column].attempt if row is not None and same and column is not None else None


def plan_adapters(
    observed: Observed, groups: tuple[Group, ...], now: datetime, *, revision: str, before: AdapterPlan
) -> Slices[AdapterPlan]:
    """Plan the adapters of a deployment on its replicas: decisions, pushes, removals and views. It makes no call.

    `before` is the plan of the pass before, or an empty one; only the differences from it are computed.
    """
    table = _table(observed, groups, now, revision=revision, before=before)
    frame, enrolled = frame_of(observed.deployment), (yield from enroll(before.roster, observed.adapters))
    whole = frame != before.frame or table.columns != before.columns
    if not whole and not enrolled.touched and not enrolled.moved and not _news(table, before, now):
        plan = msgspec.structs.replace(before, roster=enrolled.roster, dropped={})
        return (yield from _with_views(plan, (), groups, table, frame=frame, before=before))
    touched = frozenset(enrolled.roster.adapters) if whole else enrolled.touched | _touched(table, before, enrolled.roster, now)
    decided = yield from decide_all(observed.deployment, enrolled.roster, touched, table, before=before.rows)
    file = before.file
    if enrolled.moved or asks_another(decided, before.rows):
        accepted = [decided[uid].accepted if uid in decided else before.rows[uid].accepted for uid in enrolled.roster.adapters]
        file = plan_file(accepted, before.file)
    refusals = before.refusals if file is before.file else refusals_of(file, frame.name)
    rows = yield from _rows(decided, refusals, table, before=before)
    plan = yield from _planned(frame, enrolled.roster, rows, table, before=before)
    plan = msgspec.structs.replace(plan, file=file, refusals=refusals)
    return (yield from _with_views(plan, tuple(rows), groups, table, frame=frame, before=before))


def _table(observed: Observed, groups: tuple[Group, ...], now: datetime, *, revision: str, before: AdapterPlan) -> Table:
    present = tuple(group for group in groups if group.state is not ReplicaState.TERMINATING)
    columns = tuple(column_of(group, revision=revision) for group in present)
    lives = {one.boot_id: place for place, one in enumerate(before.columns) if one.boot_id is not None}
    origins = tuple(lives.get(one.boot_id or "") for one in columns)
    return Table(
        columns=columns,
        groups=present,
        named=tuple(group.document.named if group.document is not None else {} for group in present),
        origins=origins,
        kept=frozenset(place for place, one in enumerate(origins) if one is not None and before.columns[one] == columns[place]),
        news=observed.attempts,
        now=now,
    )


def _news(table: Table, before: AdapterPlan, now: datetime) -> bool:
    """Return whether the records of a replica changed, a call had an outcome, or the time has come that the plan before waits for."""
    said = any(then is not named for then, named in zip(before.named, table.named, strict=True))
    return said or bool(table.news) or (before.again_at is not None and before.again_at <= now)


def _touched(table: Table, before: AdapterPlan, roster: Roster, now: datetime) -> set[str]:
    """Return the UIDs of adapters whose records changed, whose call had an outcome, or whose time has come."""
    names: set[str] = set()
    for then, named in zip(before.named, table.named, strict=True):
        if then is not named:
            names.update(name for name, records in named.items() if then.get(name) is not records)
            names.update(then.keys() - named.keys())
    touched = {uid for name in names for uid in roster.by_name.get(name, ())}
    touched.update(key.adapter_uid for key in table.news)
    touched.update(uid for uid, row in before.eager.items() if row.is_due(now))
    return touched & roster.adapters.keys()


def _rows(decided: Mapping[str, Decided], refusals: Mapping[str, Refusal], table: Table, *, before: AdapterPlan) -> Slices[dict[str, Row]]:
    """Build rows for the decided adapters, and for others whose refusal for lack of room in the file is new, gone or another."""
    others = {uid for uid in refusals.keys() | before.refusals.keys() if uid in before.rows and uid not in decided}
    moved = {uid: before.rows[uid].decided for uid in others if refusals.get(uid) != before.refusals.get(uid)}
    rows: dict[str, Row] = {}
    for uid, one in {**decided, **moved}.items():
        rows[uid] = row_of(one, refusals.get(uid), table, known=before.rows.get(uid))
        if len(rows) % SLICE == 0:
            yield
    return rows


def _planned(frame: Frame, roster: Roster, new: Mapping[str, Row], table: Table, *, before: AdapterPlan) -> Slices[AdapterPlan]:
    """Build the plan of all rows, without views. It copies whole mappings, and looks at no row that is neither new nor gone."""
    came, gone = new.keys() - before.rows.keys(), before.rows.keys() - roster.adapters.keys()
    rows = {**before.rows, **new} if not came and not gone else {uid: new.get(uid) or before.rows[uid] for uid in roster.adapters}
    yield
    then = {uid: row for uid in (*new, *gone) if (row := before.rows.get(uid)) is not None and row.desired is not None}
    now = {uid: row for uid, row in new.items() if row.desired is not None}
    wanted = _replaced(before.wanted, [_name(row) for row in then.values()], {_name(row): uid for uid, row in now.items()})
    yield
    removals = tuple(one for group in table.groups for one in undeclared_removals(group, wanted, lora=frame.lora))
    eager = _replaced(before.eager, (*new, *gone), {uid: row for uid, row in new.items() if row.pushes or row.again_at})
    pushes = [push for uid in roster.in_order(eager) for push in eager[uid].pushes]
    yield
    return AdapterPlan(
        pushes=(*pushes, *refills(rows.values(), table, lora=frame.lora, pushes=pushes)),
        removals=removals,
        dropped={name: row.adapter.metadata for row in then.values() if (name := _name(row)) not in wanted},
        again_at=min((row.again_at for row in eager.values() if row.again_at is not None), default=None),
        frame=frame,
        roster=roster,
        columns=table.columns,
        named=table.named,
        rows=rows,
        wanted=wanted,
        eager=eager,
    )


def _replaced(before: Mapping[str, Value], left: Iterable[str], new: Mapping[str, Value]) -> dict[str, Value]:
    after = dict(before)
    for key in left:
        after.pop(key, None)
    return {**after, **new}


def _name(row: Row) -> str:
    return row.adapter.served_name


def _with_views(
    plan: AdapterPlan, new: Sequence[str], groups: tuple[Group, ...], table: Table, *, frame: Frame, before: AdapterPlan
) -> Slices[AdapterPlan]:
    """Add the states of replicas, and rebuild the views that they and `new` rows change."""
    verified = {group.index: _verified(group, place, plan) for place, group in enumerate(table.groups)}
    states = tuple(group.state for group in verified.values())
    same = states == before.states and frame == before.frame
    views, marks, changed = dict[str, AdapterView](), dict[str, int](), list[AdapterView]()
    for number, uid in enumerate(new if same else plan.rows):
        known, view = before.tally.views.get(uid), view_of(frame, plan.columns, plan.rows[uid], states)
        if known != view:
            views[uid], marks[uid] = view, marks_of(view)
            changed.append(view)
        if number % SLICE == SLICE - 1:
            yield
    tally = before.tally
    if plan.rows is not before.rows or changed:
        views, marks = {**tally.views, **views}, {**tally.marks, **marks}
        yield
        if views.keys() != plan.rows.keys() or plan.rows.keys() != before.rows.keys():
            views, marks = {uid: views[uid] for uid in plan.rows}, {uid: marks[uid] for uid in plan.rows}
        yield
        tally = tally_of(views, marks)
    verified_groups = tuple(verified.get(group.index, group) for group in groups)
    return msgspec.structs.replace(plan, tally=tally, states=states, changed=tuple(changed), groups=verified_groups)


def _verified(group: Group, place: int, plan: AdapterPlan) -> Group:
    """Return an awake group as Verifying until each adapter there is in place or has failed, and none is to be removed.

    A group that was Awake before, in the same life of the server, stays so: a new adapter does not lead back.
    """
    if group.state is not ReplicaState.AWAKE:
        return group
    before = group.previous
    was_awake = before is not None and before.state is ReplicaState.AWAKE and before.boot_id == group.boot_id
    if was_awake or _done(group, place, plan):
        return group
    return msgspec.structs.replace(group, state=ReplicaState.VERIFYING)


def _done(group: Group, place: int, plan: AdapterPlan) -> bool:
    leaving = any(one.worker.pod_uid == group.pod.uid for one in plan.removals)
    return not leaving and all(row.cells[place].done for row in plan.rows.values() if row.desired is not None)


def decide_all(
    deployment: DiffusionDeployment, roster: Roster, touched: frozenset[str], table: Table, *, before: Mapping[str, Row]
) -> Slices[dict[str, Decided]]:
    """Decide on the `touched` UIDs, and on Resident adapters that get or lose their place by it.

    Returns only these decisions, by UID. `before` has the rows of the pass before.
    """
    decided: dict[str, Decided] = {}
    slots, residents = deployment.spec.lora.slots, 0
    for uid in roster.in_order({*touched, *roster.residents}):
        adapter, resident, known = roster.adapters[uid], uid in roster.residents, before.get(uid)
        claim = Claim(owner=roster.owner(uid), full=resident and residents >= slots)
        if known is None or uid in touched or claim != known.claim:
            held = _held(table.groups, table.records(adapter.served_name))
            decided[uid] = Decided(claim=claim, accepted=decide(deployment, adapter, claim, held=held))
            if len(decided) % SLICE == 0:
                yield
        accepted = decided[uid].accepted if uid in decided or known is None else known.accepted
        residents += resident and accepted.desired is not None
    return decided


def asks_another(decided: Mapping[str, Decided], before: Mapping[str, Row]) -> bool:
    """Return whether a decided adapter had no row before, or replicas are to have another content or settings of it than before."""
    return any((known := before.get(uid)) is None or known.accepted.desired != one.accepted.desired for uid, one in decided.items())


def _held(groups: Sequence[Group], records: Sequence[Sequence[AdapterRecord]]) -> list[AdapterRecord]:
    """Return the records of awake replicas."""
    return [one for group, there in zip(groups, records, strict=True) if group.state is ReplicaState.AWAKE for one in there]


def tally_of(views: Mapping[str, AdapterView], marks: Mapping[str, int]) -> Tally:
    return Tally(views=views, marks=marks, counts=Counter(marks.values()))
