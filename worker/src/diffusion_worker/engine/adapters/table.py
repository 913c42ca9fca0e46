# SPDX-License-Identifier: Apache-2.0
"""All adapters of a server: by name, with what is about to replace or to leave them beside, and who goes for whom.

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
    """Adapters by name. `arriving` ones are loaded beside the one that has the name, `leaving` ones are used up."""

    def __init__(self, *, capacity: int, residents: int, keeps_failed: Callable[[str], bool] = lambda name: False) -> None:
        """`keeps_failed` says of which names the record of a failure stays."""
        self.failed = FailedRecords(self._drop_failed, keeps=keeps_failed)
        self._capacity = capacity
        self._residents = residents
        self._ids = itertools.count(1)
        self._touches = itertools.count(1)
        self._named: dict[str, Adapter] = {}
        # The names that hold a place for resident adapters, so that nobody need look at all names.
        self._holders: set[str] = set()
        self._arriving: dict[str, Adapter] = {}
        self._leaving: list[Adapter] = []
        self._moved = asyncio.Event()
        # Weakly: where nobody looks, adapters that are gone must not gather here.
        self._touched: weakref.WeakKeyDictionary[Adapter, None] = weakref.WeakKeyDictionary()
        # The names whose adapters changed, by revision.
        self.changes = AdapterChanges()

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
        """Return the version last put under a name: the one about to replace its adapter, or that adapter."""
        return self._arriving.get(name) or self._named.get(name)

    def names(self) -> list[str]:
        """All names, in whatever state their adapters are."""
        return sorted(self._named)

    def new(self, name: str, call: AdapterCall) -> Adapter:
        """An adapter that is about to be loaded, not yet in the table."""
        known = self._named.get(name)
        return Adapter(name, call, usage=known.usage if known else Usage(), on_touched=self._touch_record)

    def next_id(self) -> int:
        """For a load; never given twice."""
        return next(self._ids)

    def touch(self, adapter: Adapter) -> None:
        """It was used or loaded just now."""
        adapter.touched = next(self._touches)

    def require_place(self, name: str, call: AdapterCall) -> None:
        """Raises RequestError (CapacityExceeded) that names the resident ones where one more would be too many."""
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
        """List the adapters whose record may be another one than at the last `settle`, with the record; None for what is gone."""
        return [(adapter, adapter.document(ranks) if self._has(adapter) else None) for adapter in list(self._touched)]

    def of_name(self, name: str) -> list[Adapter]:
        """Return all adapters of a name: the one that has it, the one that is about to, and those that leave."""
        found = [self._named.get(name), self._arriving.get(name)]
        return [adapter for adapter in found if adapter is not None] + [adapter for adapter in self._leaving if adapter.name == name]

    def publish(self, number: int, adapters: Iterable[object]) -> None:
        """Take note that a revision is about these."""
        for name in {adapter.name for adapter in adapters if isinstance(adapter, Adapter)}:
            self.changes.add(name, number, gone=not self.of_name(name))

    def settle(self, adapters: Iterable[object]) -> None:
        """Take these records for known. A record that tells something for a time only is looked at again until it ends."""
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
        """Make an adapter the one of its name; returns the one it replaces, which is leaving where the ranks hold it."""
        previous = self._named.get(adapter.name)
        self._named[adapter.name] = adapter
        if self._arriving.get(adapter.name) is adapter:
            del self._arriving[adapter.name]
        self._leave(previous)
        self._touch_record(adapter)
        return previous

    def arrive(self, adapter: Adapter) -> None:
        """An adapter that replaces the one of its name when it is loaded."""
        self._arriving[adapter.name] = adapter
        self._touch_record(adapter)

    def drop_arriving(self, name: str) -> Adapter | None:
        """Nothing is to replace the adapter of a name any more; returns what was."""
        adapter = self._arriving.pop(name, None)
        if adapter is not None:
            self._touch_record(adapter)
        return adapter

    def take_out(self, name: str) -> Adapter | None:
        """Remove a name: from now on it is unknown. Returns its adapter, which is leaving where the ranks hold it."""
        adapter = self._named.pop(name, None)
        self._leave(adapter)
        return adapter

    def leaving(self) -> list[Adapter]:
        """Return adapters that nobody uses any more, and that no rank was asked to forget yet."""
        return [adapter for adapter in self._leaving if not adapter.users and not adapter.unloading]

    def deferred(self) -> list[Adapter]:
        """Those that are to be loaded before the model serves, the most wanted first; what is about to be replaced is not."""
        arriving = [adapter for adapter in self._arriving.values() if adapter.state is AdapterState.DEFERRED]
        names = {adapter.name for adapter in arriving}
        named = [adapter for adapter in self._named.values() if adapter.state is AdapterState.DEFERRED and adapter.name not in names]
        return sorted([*arriving, *named], key=_wanted, reverse=True)

    def most_wanted(self, calls: Mapping[str, AdapterCall]) -> list[str]:
        """Return the new adapters for which there is room beside the more wanted ones that are in memory or on their way, in order."""
        held = [("", each.call) for each in self if each.registered or each.state in (*LOADING, AdapterState.LOADED, AdapterState.DEFERRED)]
        may_be = [(name, call) for name, call in sorted(calls.items()) if call.residency is not Residency.ON_DEMAND]
        wanted = sorted([*held, *may_be], key=lambda each: _rank(each[1]), reverse=True)
        return [name for name, _ in wanted[: self._capacity] if name]

    def forget(self, adapter: Adapter) -> None:
        """A leaving adapter is gone from the ranks."""
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

        Those go that no request uses, of the lowest priority and then least recently used first. An adapter that a request waits for gives
        way only to an earlier request's. So the first of them always gets all of its adapters.
        """
        copies = self._copies(without=adapter)
        digest = adapter.pinned
        held = (each.loaded.digest for group in copies.values() for each in group if each.loaded)
        if digest is not None and digest in held:
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
        """Return whether a replaced adapter's copy is dropped after the replacement; not if another name shares it."""
        current = self._named.get(adapter.name)
        if self._arriving.get(adapter.name) is not adapter or current is None or not current.registered:
            return False
        return len(copies[current.copy_key()]) == 1

    def holders(self) -> list[str]:
        """Names of what the ranks hold."""
        return sorted({adapter.name for adapter in self if adapter.registered})

    def move(self) -> None:
        """Notify waiters that an adapter came, went or became unused."""
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


def _rank(call: AdapterCall) -> tuple[bool, int]:
    return call.residency is Residency.RESIDENT, call.priority


def is_wanted_more(adapter: Adapter, other: Adapter) -> bool:
    """Return whether an adapter has precedence over another one for staying in memory."""
    return _wanted(adapter) > _wanted(other)


def _wanted(adapter: Adapter) -> tuple[bool, int, int]:
    return adapter.resident, adapter.call.priority, adapter.touched


def _may_go(adapter: Adapter, turn: int | None) -> bool:
    """Return whether an adapter may be evicted for the request of a turn, or for none."""
    if not adapter.usable or adapter.users or adapter.resident:
        return False
    return not adapter.wanted or (turn is not None and min(adapter.wanted) > turn)
