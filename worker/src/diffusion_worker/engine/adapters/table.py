# SPDX-License-Identifier: Apache-2.0
"""All adapters of a server: by name, with what is about to replace or to leave them beside, and who goes for whom.

The ranks hold `capacity` of them in host memory, one copy for all names of the same bytes, and one more while a version of a
name is loaded beside the one it replaces.
"""

import asyncio
import itertools
from collections.abc import Iterator

from diffusion_worker.engine.adapters.adapter import Adapter, Usage
from diffusion_worker.engine.state.state_document import AdapterCall, AdapterState, Residency
from diffusion_worker.errors import ErrorCode, RequestError


class AdapterTable:
    """Adapters by name. `arriving` ones are loaded beside the one that has the name, `leaving` ones are used up."""

    def __init__(self, *, capacity: int, residents: int) -> None:
        self._capacity = capacity
        self._residents = residents
        self._ids = itertools.count(1)
        self._touches = itertools.count(1)
        self._named: dict[str, Adapter] = {}
        self._arriving: dict[str, Adapter] = {}
        self._leaving: list[Adapter] = []
        self._moved = asyncio.Event()

    def __iter__(self) -> Iterator[Adapter]:
        return iter([*self._named.values(), *self._arriving.values(), *self._leaving])

    @property
    def registered(self) -> int:
        """Copies that the ranks hold."""
        return len(self._copies())

    def get(self, name: str) -> Adapter | None:
        """The adapter of a name, in whatever state."""
        return self._named.get(name)

    def newest(self, name: str) -> Adapter | None:
        """What was put last under a name: the one that is about to replace its adapter, or that."""
        return self._arriving.get(name) or self._named.get(name)

    def names(self) -> list[str]:
        """All names, in whatever state their adapters are."""
        return sorted(self._named)

    def new(self, name: str, call: AdapterCall) -> Adapter:
        """An adapter that is about to be loaded, not yet in the table."""
        known = self._named.get(name)
        return Adapter(name, call, usage=known.usage if known else Usage())

    def next_id(self) -> int:
        """For a load; never given twice."""
        return next(self._ids)

    def touch(self, adapter: Adapter) -> None:
        """It was used or loaded just now."""
        adapter.touched = next(self._touches)

    def require_place(self, name: str, call: AdapterCall) -> None:
        """Raises RequestError (CapacityExceeded) that names the resident ones where one more would be too many."""
        others = [other for other in self._named.values() if other.name != name and other.state is not AdapterState.FAILED]
        holders = sorted(other.name for other in others if other.resident)
        if call.residency is Residency.RESIDENT and len(holders) >= self._residents:
            raise RequestError(
                ErrorCode.CAPACITY_EXCEEDED,
                f"adapter {name!r}: expected at most {self._residents} resident adapters, which is --max-loras, "
                f"found {len(holders)} already: {', '.join(holders)}",
            )

    # --- names ----------------------------------------------------------------------------------------------------------

    def put(self, adapter: Adapter) -> Adapter | None:
        """Make an adapter the one of its name; returns the one it replaces, which is leaving where the ranks hold it."""
        previous = self._named.get(adapter.name)
        self._named[adapter.name] = adapter
        if self._arriving.get(adapter.name) is adapter:
            del self._arriving[adapter.name]
        self._leave(previous)
        return previous

    def arrive(self, adapter: Adapter) -> None:
        """An adapter that replaces the one of its name when it is loaded."""
        self._arriving[adapter.name] = adapter

    def drop_arriving(self, name: str) -> Adapter | None:
        """Nothing is to replace the adapter of a name any more; returns what was."""
        return self._arriving.pop(name, None)

    def take_out(self, name: str) -> Adapter | None:
        """Remove a name: from now on it is unknown. Returns its adapter, which is leaving where the ranks hold it."""
        adapter = self._named.pop(name, None)
        self._leave(adapter)
        return adapter

    def leaving(self) -> list[Adapter]:
        """Those that nobody uses any more, and that no rank was told to forget yet."""
        return [adapter for adapter in self._leaving if not adapter.users and not adapter.unloading]

    def deferred(self) -> list[Adapter]:
        """Those that are to be loaded before the model serves, the most wanted first; what is about to be replaced is not."""
        arriving = [adapter for adapter in self._arriving.values() if adapter.state is AdapterState.DEFERRED]
        names = {adapter.name for adapter in arriving}
        named = [adapter for adapter in self._named.values() if adapter.state is AdapterState.DEFERRED and adapter.name not in names]
        return sorted([*arriving, *named], key=_wanted, reverse=True)

    def forget(self, adapter: Adapter) -> None:
        """A leaving adapter is gone from the ranks."""
        self._leaving.remove(adapter)

    def _leave(self, adapter: Adapter | None) -> None:
        if adapter is not None and adapter.state is AdapterState.LOADED:
            adapter.state = AdapterState.DRAINING
            self._leaving.append(adapter)

    # --- room -----------------------------------------------------------------------------------------------------------

    def room_for(self, adapter: Adapter) -> list[Adapter] | None:
        """Who has to go from the ranks' memory for an adapter, first ones first; None where not enough may go now.

        Those go that no request uses, of the lowest priority and then least recently used first. What a request waits for
        only goes for one that came before it: so the first of them always gets all of its adapters.
        """
        copies = self._copies(without=adapter)
        digest = adapter.pinned
        if digest is not None and any(key[0] == digest for key in copies):
            return []  # most likely the same copy; the ranks have room for one more where its components are others
        excess = len(copies) + 1 - self._capacity - self._goes_by_itself(adapter, copies)
        if excess <= 0:
            return []
        turn = min(adapter.wanted, default=None)
        may_go = [group for group in copies.values() if all(_may_go(each, turn) for each in group)]
        if len(may_go) < excess:
            return None
        may_go.sort(key=lambda group: max((bool(each.wanted), each.call.priority, each.touched) for each in group))
        return [each for group in may_go[:excess] for each in group]

    def _goes_by_itself(self, adapter: Adapter, copies: dict[tuple[object, ...], list[Adapter]]) -> bool:
        """Whether the copy of what an adapter replaces goes when that is done: not where another name has it as well."""
        current = self._named.get(adapter.name)
        if self._arriving.get(adapter.name) is not adapter or current is None or not current.registered:
            return False
        return len(copies[current.copy_key()]) == 1

    def holders(self) -> list[str]:
        """Names of what the ranks hold."""
        return sorted({adapter.name for adapter in self if adapter.registered})

    def move(self) -> None:
        """An adapter came, went or is unused: whoever waits for that looks again."""
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def moved(self) -> None:
        """Returns at the next `move`."""
        await self._moved.wait()

    def _copies(self, *, without: Adapter | None = None) -> dict[tuple[object, ...], list[Adapter]]:
        copies: dict[tuple[object, ...], list[Adapter]] = {}
        for adapter in self:
            if adapter.registered and adapter is not without:
                copies.setdefault(adapter.copy_key(), []).append(adapter)
        return copies


def is_wanted_more(adapter: Adapter, other: Adapter) -> bool:
    """Whether an adapter is to stay in memory rather than another one."""
    return _wanted(adapter) > _wanted(other)


def _wanted(adapter: Adapter) -> tuple[bool, int, int]:
    return adapter.resident, adapter.call.priority, adapter.touched


def _may_go(adapter: Adapter, turn: int | None) -> bool:
    """Whether an adapter may be evicted for one that the request of a turn waits for, or for nobody's."""
    if not adapter.usable or adapter.users or adapter.resident:
        return False
    return not adapter.wanted or (turn is not None and min(adapter.wanted) > turn)
