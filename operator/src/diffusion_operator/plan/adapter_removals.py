# SPDX-License-Identifier: Apache-2.0
"""Adapters that leave replicas, and the Events that tell it: about an object that may be gone, so its metadata is remembered here."""

from collections.abc import Iterable

import msgspec

from diffusion_operator.api.meta import ObjectMeta
from diffusion_operator.plan.adapters.plan import AdapterView
from diffusion_operator.plan.observed.observed import AdapterPlace, Departures
from diffusion_operator.plan.observed.replica_state import Group
from diffusion_operator.plan.results.actions import RemoveAdapter
from diffusion_operator.plan.results.events import EventType, PlannedEvent


class AdapterEvent(msgspec.Struct, frozen=True):
    about: ObjectMeta
    event: PlannedEvent


def plan_removals(
    before: Departures, groups: Iterable[Group], *, views: Iterable[AdapterView], removals: Iterable[RemoveAdapter]
) -> tuple[Departures, tuple[AdapterEvent, ...]]:
    """What is remembered for the next pass, and what is to be told now."""
    present = [group for group in groups if group.document is not None and group.poll.fresh]
    held = {(group.boot_id or "", record.name) for group in present if group.document for record in group.document.adapters}
    indices = {group.boot_id: group.index for group in present}
    new = {
        (one.worker.boot_id, one.name): owner
        for one in removals
        if (owner := before.owners.get(one.name)) is not None and (one.worker.boot_id, one.name) not in before.leaving
    }
    drain_s = {(one.worker.boot_id, one.name): one.drain_s for one in removals}
    told = [
        _draining(owner, indices.get(place[0]), place, refs, drain_s[place])
        for place, owner in new.items()
        if (refs := _refs(present, place))
    ]
    gone = {place: owner for place, owner in before.leaving.items() if place not in held and place[0] in indices}
    told += [_removed(owner, indices[place[0]], place) for place, owner in gone.items()]
    leaving = {place: owner for place, owner in before.leaving.items() if place in held} | new
    return Departures(owners=_owners(before, views, {name for _, name in held}), leaving=leaving), tuple(told)


def _owners(before: Departures, views: Iterable[AdapterView], held: set[str]) -> dict[str, ObjectMeta]:
    kept = {name: owner for name, owner in before.owners.items() if name in held}
    return kept | {view.decision.desired.name: view.decision.adapter.metadata for view in views if view.decision.desired is not None}


def _refs(groups: Iterable[Group], place: AdapterPlace) -> int:
    boot_id, name = place
    documents = (group.document for group in groups if group.boot_id == boot_id and group.document is not None)
    return sum(record.refs for document in documents for record in document.named.get(name, ()))


def _draining(owner: ObjectMeta, index: int | None, place: AdapterPlace, refs: int, drain_s: int) -> AdapterEvent:
    message = f"Draining: {refs} requests still use it on replica {index} and may finish within {drain_s} s"
    return AdapterEvent(about=owner, event=_event(message, place, owner, "draining"))


def _removed(owner: ObjectMeta, index: int, place: AdapterPlace) -> AdapterEvent:
    return AdapterEvent(about=owner, event=_event(f"Removed from replica {index}", place, owner, "removed"))


def _event(message: str, place: AdapterPlace, owner: ObjectMeta, step: str) -> PlannedEvent:
    key = f"{place[0]}-{owner.generation}-{step}"
    return PlannedEvent(type=EventType.NORMAL, reason="AdapterUnloaded", message=message, key=key)
