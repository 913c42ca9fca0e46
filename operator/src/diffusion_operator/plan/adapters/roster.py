# SPDX-License-Identifier: Apache-2.0
"""The adapters that name a deployment, in the order of precedence, and who has which name.

A roster is made from the one before it, so that it costs what has changed. An adapter that is the same object has not.
"""

from collections.abc import Collection, Iterable, Mapping

import msgspec

from diffusion_operator.api.adapter import LoRAAdapter, Residency
from diffusion_operator.plan.adapters.slices import Slices


class Roster(msgspec.Struct, frozen=True):
    given: tuple[LoRAAdapter, ...] = ()
    """The adapters as they were observed, in any order."""
    adapters: Mapping[str, LoRAAdapter] = {}
    """Adapters by UID, the oldest first: the order of precedence."""
    by_name: Mapping[str, tuple[str, ...]] = {}
    """UIDs by the name that requests use, the oldest first."""
    residents: frozenset[str] = frozenset()
    """UIDs of those that are always in memory."""

    def in_order(self, uids: Collection[str]) -> list[str]:
        """Return the UIDs in the order of precedence: the oldest adapter first, then by name."""
        if len(uids) == len(self.adapters):
            return list(self.adapters)
        return [uid for uid, _ in sorted(((uid, self.adapters[uid]) for uid in uids), key=_age)]

    def owner(self, uid: str) -> str | None:
        """Return the object name of the oldest adapter that has the same served name; None if this one is the oldest."""
        first = self.by_name[self.adapters[uid].served_name][0]
        return None if first == uid else self.adapters[first].metadata.name


class Enrolled(msgspec.Struct, frozen=True):
    roster: Roster
    touched: frozenset[str] = frozenset()
    """UIDs of those that changed or came, and of all that share a name with an adapter that changed, came or went."""
    moved: bool = False
    """An adapter came or went."""


def enroll(before: Roster, given: tuple[LoRAAdapter, ...]) -> Slices[Enrolled]:
    if given is before.given:
        return Enrolled(before)
    now, old = {one.metadata.uid: one for one in given}, before.adapters
    yield
    changed = [uid for uid, one in now.items() if old.get(uid) is not one]
    gone = [uid for uid in old if uid not in now]
    moved = bool(gone) or len(now) > len(old)
    yield
    adapters = dict(sorted(now.items(), key=_age)) if moved else {**old, **now}
    yield
    names = {one.served_name for one in (*(old[uid] for uid in changed if uid in old), *(old[uid] for uid in gone))}
    by_name = _by_name(before.by_name, adapters, changed=changed, left=names)
    yield
    names.update(adapters[uid].served_name for uid in changed)
    yield
    touched = frozenset(uid for name in names for uid in by_name.get(name, ()))
    yield
    residents = (before.residents - set(changed) - set(gone)).union(uid for uid in changed if _resident(adapters[uid]))
    return Enrolled(Roster(given=given, adapters=adapters, by_name=by_name, residents=residents), touched=touched, moved=moved)


def _by_name(
    before: Mapping[str, tuple[str, ...]], adapters: Mapping[str, LoRAAdapter], *, changed: Iterable[str], left: Iterable[str]
) -> dict[str, tuple[str, ...]]:
    """Update the UIDs by name for the `changed` UIDs. `left` are names that an adapter may have given up."""
    by_name = dict(before)
    for name in left:
        having = tuple(uid for uid in by_name[name] if uid in adapters and adapters[uid].served_name == name)
        by_name[name] = having
        if not having:
            del by_name[name]
    for uid in changed:
        name = adapters[uid].served_name
        having = by_name.get(name, ())
        if uid not in having:
            by_name[name] = tuple(sorted((*having, uid), key=lambda one: _age((one, adapters[one])))) if having else (uid,)
    return by_name


def _resident(adapter: LoRAAdapter) -> bool:
    return adapter.spec.residency is Residency.RESIDENT


def _age(one: tuple[str, LoRAAdapter]) -> tuple[object, str]:
    metadata = one[1].metadata
    return metadata.creation_timestamp, metadata.name
