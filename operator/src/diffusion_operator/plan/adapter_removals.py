# SPDX-License-Identifier: Apache-2.0
"""Adapters that leave replicas, and the Events that tell it: about an object that may be gone, so its metadata is remembered here."""

from collections.abc import Iterable

import msgspec

from diffusion_operator.api.meta import ObjectMeta
from diffusion_operator.plan.adapters.plan import AdapterPlan
from diffusion_operator.plan.observed.observed import AdapterPlace, Departures
from diffusion_operator.plan.observed.replica_state import Group
from diffusion_operator.plan.results.events import EventType, PlannedEvent


class AdapterEvent(msgspec.Struct, frozen=True):
    about: ObjectMeta
    event: PlannedEvent


def plan_removals(before: Departures, adapters: AdapterPlan) -> tuple[Departures, tuple[AdapterEvent, ...]]:
    """Return the departures to remember for the next pass, and the Events of this one.

    An Event says that an adapter drains on a replica while requests use it, or that it has left the replica; each comes once.
    """
    present = [group for group in adapters.groups if group.document is not None and group.poll.fresh]
    named = {group.boot_id or "": group.document.named for group in present if group.document}
    indices = {group.boot_id or "": group.index for group in present}
    owners = {**before.owners, **adapters.dropped}
    drain_s = {(one.worker.boot_id, one.name): one.drain_s for one in adapters.removals}
    new = {place: owners[place[1]] for place in drain_s if place[1] in owners and place not in before.leaving}
    told = [
        _draining(owner, indices.get(place[0]), place, refs, drain_s[place])
        for place, owner in new.items()
        if (refs := _refs(present, place))
    ]
    gone = {place: owner for place, owner in before.leaving.items() if place[0] in indices and place[1] not in named[place[0]]}
    told += [_removed(owner, indices[place[0]], place) for place, owner in gone.items()]
    leaving = {place: owner for place, owner in before.leaving.items() if place[1] in named.get(place[0], ())} | new
    held = {name: owner for name, owner in owners.items() if name not in adapters.wanted and any(name in one for one in named.values())}
    return Departures(owners=held, leaving=leaving), tuple(told)


def _refs(groups: Iterable[Group], place: AdapterPlace) -> int:
    boot_id, name = place
    documents = (group.document for group in groups if group.boot_id == boot_id and group.document is not None)
    return sum(record.refs for document in documents for record in document.named.get(name, ()))


def _draining(owner: ObjectMeta, index: int | None, place: AdapterPlace, requests: int, drain_s: int) -> AdapterEvent:
    message = f"Draining: {requests} requests still use the adapter on replica {index} and have {drain_s} s to finish"
    return AdapterEvent(about=owner, event=_event(message, place, owner, "draining"))


def _removed(owner: ObjectMeta, index: int, place: AdapterPlace) -> AdapterEvent:
    message = f"Removed: replica {index} has unloaded the adapter"
    return AdapterEvent(about=owner, event=_event(message, place, owner, "removed"))


def _event(message: str, place: AdapterPlace, owner: ObjectMeta, step: str) -> PlannedEvent:
    key = f"{place[0]}-{owner.generation}-{step}"
    return PlannedEvent(type=EventType.NORMAL, reason="AdapterUnloaded", message=message, key=key)
