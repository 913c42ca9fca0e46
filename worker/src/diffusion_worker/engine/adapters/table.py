# SPDX-License-Identifier: Apache-2.0
"""All adapters of a server: by name, with those about to replace or to leave them, and the choice of evictions.

The ranks hold `capacity` of them in host memory, one copy for all names of the same bytes. They hold one more while a version is loaded
beside the one it replaces.
"""

import asyncio
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping

from diffusion_worker.engine.adapters.adapter import LOADING, Adapter, Usage
from diffusion_worker.engine.adapters.failed_records import FailedRecords
from diffusion_worker.engine.state.adapter_changes import AdapterChanges
from diffusion_worker.engine.state.state_document import AdapterCall, AdapterDocument, AdapterState, Residency
from diffusion_worker.errors import ErrorCode, RequestError


class AdapterTable:
    """Adapters by name.

    An `arriving` one replaces the current one of its name once it is loaded; `leaving` ones only finish their requests.
    """

    def __init__(self, *, capacity: int, residents: int, keeps_failed: Callable[[str], bool] = lambda name: False) -> None:
        """Begin empty. `keeps_failed` returns whether a name's failed adapter stays in the table."""
        self.failed = FailedRecords(self._drop_failed, keeps=keeps_failed)
        self._capacity = capacity
        self._residents = residents
        self._ids = itertools.count(1)
        self._touches = itertools.count(1)
        self._named: dict[str, Adapter] = {}
        # The names that hold a place for resident adapters, so that not all names have to be looked at.
        self._holders: set[str] = set()
        self._arriving: dict[str, Adapter] = {}
        self._leaving: list[Adapter] = []
        self._moved = asyncio.Event()
        # Weak references: without a reader, removed adapters must not gather here.
        self._touched: weakref.WeakKeyDictionary[Adapter, None] = weakref.WeakKeyDictionary()
        # The names whose adapters changed, by revision.
        self.changes = AdapterChanges()

    def __iter__(self) -> Iterator[Adapter]:
        return iter([*self._named.values(), *self._arriving.values(), *self._leaving])

    @property
    def registered(self) -> int:
        """Number of copies that the ranks hold."""
        return len(self._copies())

    def get(self, name: str) -> Adapter | None:
        """Return the current adapter of a name, in any state; None if there is none."""
        return self._named.get(name)

    def newest(self, name: str) -> Adapter | None:
        """Return the version last put under a name: the arriving one, or else the current one."""
        return self._arriving.get(name) or self._named.get(name)

    def names(self) -> list[str]:
        """Return all names, sorted, whatever the states of their adapters."""
        return sorted(self._named)

    def new(self, name: str, call: AdapterCall) -> Adapter:
        """Return a new adapter that is about to be loaded, not yet in the table."""
        known = self._named.get(name)
        return Adapter(name, call, usage=known.usage if known else Usage(), on_touched=self._touch_record)

    def next_id(self) -> int:
        """Return a new id for a load; no id is used twice."""
        return next(self._ids)

    def touch(self, adapter: Adapter) -> None:
        """Record that an adapter was used or loaded just now."""
        adapter.touched = next(self._touches)

    def require_place(self, name: str, call: AdapterCall) -> None:
        """Raise RequestError (CapacityExceeded), naming the resident adapters, if the call's would be one too many."""
        if call.residency is not Residency.RESIDENT:
            return
        if len(self._holders - {name}) >= self._residents:
            holders = sorted(self._holders - {name})
            raise RequestError(
                ErrorCode.CAPACITY_EXCEEDED,
                f"adapter {name!r}: expected at most {self._residents} resident adapters, which is --max-loras, "
                f"found {len(holders)} already: {', '.join(holders)}",
            )

    def touched_records(self, ranks: int) -> list[tuple[Adapter, AdapterDocument | None]]:
        """List the adapters whose record may have changed since the last `settle`, with the record; None for removed ones."""
        return [(adapter, adapter.document(ranks) if self._has(adapter) else None) for adapter in list(self._touched)]

    def of_name(self, name: str) -> list[Adapter]:
        """Return all adapters of a name: the current, the arriving and the leaving ones."""
        found = [self._named.get(name), self._arriving.get(name)]
        return [adapter for adapter in found if adapter is not None] + [adapter for adapter in self._leaving if adapter.name == name]

    def publish(self, number: int, adapters: Iterable[object]) -> None:
        """Record that a revision published changes of these adapters."""
        for name in {adapter.name for adapter in adapters if isinstance(adapter, Adapter)}:
            self.changes.add(name, number, gone=not self.of_name(name))

    def settle(self, adapters: Iterable[object]) -> None:
        """Take these records as known. A record with a temporary value is looked at again until that ends."""
        for adapter in adapters:
            if isinstance(adapter, Adapter) and (adapter.found_wrong_s is None or not adapter.document(1).verification_failed):
                self._touched.pop(adapter, None)

    def _has(self, adapter: Adapter) -> bool:
        name = adapter.name
        return self._named.get(name) is adapter or self._arriving.get(name) is adapter or adapter in self._leaving

    def _touch_record(self, adapter: Adapter) -> None:
        self._touched[adapter] = None
        current = self._named.get(adapter.name)
        if current is not None and current.resident and current.state is not AdapterState.FAILED:
            self._holders.add(adapter.name)
        else:
            self._holders.discard(adapter.name)

    def _drop_failed(self, adapter: Adapter) -> None:
        if self._named.get(adapter.name) is adapter and adapter.state is AdapterState.FAILED:
            self.take_out(adapter.name)

    # --- names ----------------------------------------------------------------------------------------------------------

    def put(self, adapter: Adapter) -> Adapter | None:
        """Make an adapter the current one of its name; return the one before, which is leaving if it was loaded."""
        previous = self._named.get(adapter.name)
        self._named[adapter.name] = adapter
        if self._arriving.get(adapter.name) is adapter:
            del self._arriving[adapter.name]
        self._leave(previous)
        self._touch_record(adapter)
        return previous

    def arrive(self, adapter: Adapter) -> None:
        """Add an adapter that replaces the current one of its name once it is loaded."""
        self._arriving[adapter.name] = adapter
        self._touch_record(adapter)

    def drop_arriving(self, name: str) -> Adapter | None:
        """Remove and return the arriving adapter of a name, if there is one."""
        adapter = self._arriving.pop(name, None)
        if adapter is not None:
            self._touch_record(adapter)
        return adapter

    def take_out(self, name: str) -> Adapter | None:
        """Remove a name, and return its current adapter, which is leaving if it was loaded."""
        adapter = self._named.pop(name, None)
        self._leave(adapter)
        return adapter

    def leaving(self) -> list[Adapter]:
        """Return the leaving adapters that no request uses and that are not being unloaded."""
        return [adapter for adapter in self._leaving if not adapter.users and not adapter.unloading]

    def deferred(self) -> list[Adapter]:
        """Return the deferred adapters, the most wanted first, without those that a deferred one replaces."""
        arriving = [adapter for adapter in self._arriving.values() if adapter.state is AdapterState.DEFERRED]
        names = {adapter.name for adapter in arriving}
        named = [adapter for adapter in self._named.values() if adapter.state is AdapterState.DEFERRED and adapter.name not in names]
        return sorted([*arriving, *named], key=_wanted, reverse=True)

    def most_wanted(self, calls: Mapping[str, AdapterCall]) -> list[str]:
        """Return the names in `calls` to load now, the most wanted first.

        OnDemand ones are left out, and those without room beside more wanted adapters in memory or on their way.
        """
        held = [("", each.call) for each in self if each.registered or each.state in (*LOADING, AdapterState.LOADED, AdapterState.DEFERRED)]
        may_be = [(name, call) for name, call in sorted(calls.items()) if call.residency is not Residency.ON_DEMAND]
        wanted = sorted([*held, *may_be], key=lambda each: _rank(each[1]), reverse=True)
        return [name for name, _ in wanted[: self._capacity] if name]

    def forget(self, adapter: Adapter) -> None:
        """Remove a leaving adapter, which the ranks do not hold any more."""
        self._leaving.remove(adapter)
        self._touch_record(adapter)

    def _leave(self, adapter: Adapter | None) -> None:
        if adapter is not None:
            self._touch_record(adapter)
        if adapter is not None and adapter.state is AdapterState.LOADED:
            adapter.state = AdapterState.DRAINING
            self._leaving.append(adapter)

    # --- room -----------------------------------------------------------------------------------------------------------

    def room_for(self, adapter: Adapter) -> list[Adapter] | None:
        """Return the adapters to evict for another, in order; None if too few may go now.

        Only adapters that no request uses may go, those of the lowest priority first, then the least recently used. An adapter that a
        request waits for gives way only to an earlier request's. So the earliest request always gets all of its adapters.
        """
        copies = self._copies(without=adapter)
        digest = adapter.pinned
        held = (each.loaded.digest for group in copies.values() for each in group if each.loaded)
        if digest is not None and digest in held:
            return []  # most likely the same copy; with other components it is one more, for which the ranks have room
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
        """Return whether the replaced adapter's copy is dropped after the replacement, as no other name shares it."""
        current = self._named.get(adapter.name)
        if self._arriving.get(adapter.name) is not adapter or current is None or not current.registered:
            return False
        return len(copies[current.copy_key()]) == 1

    def holders(self) -> list[str]:
        """Return the names of adapters that the ranks hold."""
        return sorted({adapter.name for adapter in self if adapter.registered})

    def move(self) -> None:
        """Notify waiters that an adapter came, went or became unused."""
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def moved(self) -> None:
        """Wait for the next `move`."""
        await self._moved.wait()

    def _copies(self, *, without: Adapter | None = None) -> dict[tuple[object, ...], list[Adapter]]:
        copies: dict[tuple[object, ...], list[Adapter]] = {}
        for adapter in self:
            if adapter.registered and adapter is not without:
                copies.setdefault(adapter.copy_key(), []).append(adapter)
        return copies


def _rank(call: AdapterCall) -> tuple[bool, int]:
    return call.residency is Residency.RESIDENT, call.priority


def is_wanted_more(adapter: Adapter, other: Adapter) -> bool:
    """Return whether an adapter has precedence over another one for staying in memory."""
    return _wanted(adapter) > _wanted(other)


def _wanted(adapter: Adapter) -> tuple[bool, int, int]:
    return adapter.resident, adapter.call.priority, adapter.touched


def _may_go(adapter: Adapter, turn: int | None) -> bool:
    """Return whether an adapter may be evicted for the request with number `turn`, or for no request."""
    if not adapter.usable or adapter.users or adapter.resident:
        return False
    return not adapter.wanted or (turn is not None and min(adapter.wanted) > turn)
