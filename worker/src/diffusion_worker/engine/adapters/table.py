# SPDX-License-Identifier: Apache-2.0
"""The one table of a server's adapters: data and lookups, without torch. `machine.py` alone makes the transitions.

A name has a current version, perhaps one that arrives, and versions that only finish their requests. Ids stand for the ranks' copies.
"""

import itertools
import time
import weakref
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from diffusion_worker.engine.state.histogram import Durations
from diffusion_worker.engine.state.state_document import AdapterCall, AdapterDocument, AdapterState, ProblemReport, Residency
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.identity import contradicts
from diffusion_worker.messages import AdapterIdentity, LoadedLoRA
from diffusion_worker.sources.fetching import Fetched

LOADING = (AdapterState.FETCHING, AdapterState.LOADING)
# Seconds for which an adapter reports that a wake found it wrong, so that somebody can see it.
TELL_WRONG_S = 600.0


class Load:
    """A load in progress, shared by all its waiters. `number` is the id on the ranks; `deadline_s` is on the event loop's clock."""

    def __init__(self, number: int, deadline_s: float, *, asked: bool) -> None:
        self.number = number
        self.deadline_s = deadline_s
        # True for a put; otherwise the load is for requests, which may try again after a failure that may pass.
        self.asked = asked
        # True when the ranks have the call already, so that their answer must be awaited.
        self.registering = False
        # Adapters that the ranks may evict for it.
        self.victims: Sequence[Adapter] = ()
        # The error for the waiters of a load that is no longer wanted.
        self.superseded: RequestError | None = None
        # True when its waiters have their outcome.
        self.answered = False


class Usage:
    """The number of requests that used adapters of one name, and the monotonic time of the last; None before it."""

    requests = 0
    last_s: float | None = None


class LoadCounts:
    """Counters of loads since the start: codes with OK among them, durations of successes and of remote fetches, and evictions."""

    def __init__(self) -> None:
        self.codes = Counter[str]()
        self.durations = Durations()
        self.fetch_durations = Durations()
        self.fetched_bytes = 0
        self.evictions = 0


class TouchedRecords:
    """The adapters whose records may have changed, so that the records of all adapters need not be compared."""

    def __init__(self) -> None:
        # Weak references: without a reader, removed adapters must not gather here.
        self.unpublished: weakref.WeakKeyDictionary[Adapter, None] = weakref.WeakKeyDictionary()
        self.names: set[str] = set()

    def add(self, adapter: "Adapter") -> None:
        """Record that an adapter's record may have changed."""
        self.unpublished[adapter] = None
        self.names.add(adapter.name)


class Adapter:
    """A version of an adapter's content under its name. Other bytes under the same name are another adapter; each load has another id."""

    _touched: TouchedRecords

    def __init__(self, name: str, call: AdapterCall, *, usage: Usage, touched: TouchedRecords) -> None:
        object.__setattr__(self, "_touched", touched)
        self.name = name
        self.call = call
        self.usage = usage
        self.lora_int_id = 0
        self.state = AdapterState.FETCHING
        # The result of the last load; kept while the adapter is `Cached`.
        self.loaded: LoadedLoRA | None = None
        # Each rank's report of the adapter, recorded at the load and compared after every wake.
        self.kept: list[str] = []
        # Seconds of the last load that succeeded.
        self.load_s: float | None = None
        # Time at which a wake last found those reports to differ.
        self.found_wrong_s: float | None = None
        self.fetched: Fetched | None = None
        self.progress: tuple[int, int | None] | None = None
        self.error: ProblemReport | None = None
        self.load: Load | None = None
        # True while the ranks hold its weights, or may hold them.
        self.registered = False
        # True while the load that runs may evict it, so that no request may take it.
        self.going = False
        # Set before the weights leave the ranks: a new generation must not load them.
        self.unloading = False
        self.users: set[str] = set()
        # Numbers of the requests that wait until all of their adapters are usable.
        self.wanted: set[int] = set()
        # The place in the order of uses and loads.
        self.used_at = 0

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        self.touch()

    def touch(self) -> None:
        """Record that its record may have changed."""
        self._touched.add(self)

    @property
    def usable(self) -> bool:
        """Return whether a request may use it now."""
        return self.state is AdapterState.LOADED and not self.going

    @property
    def serves(self) -> bool:
        """Return whether its name could be served if the ranks were awake: it is Loaded, or Deferred after it was loaded once."""
        return self.state is AdapterState.LOADED or (self.state is AdapterState.DEFERRED and self.loaded is not None)

    @property
    def digest(self) -> str:
        """sha256 of the weights of a loaded adapter."""
        assert self.loaded is not None, "only loaded adapters are used"
        return self.loaded.digest

    @property
    def identity(self) -> AdapterIdentity:
        """Identity of a loaded adapter: what it does to the model."""
        assert self.loaded is not None, "only loaded adapters are used"
        return self.loaded.identity

    @property
    def pinned_identity(self) -> str | None:
        """The identity that every load of it must find, unless another converter named it; None accepts any."""
        return self.loaded.identity if self.loaded else self.call.identity

    @property
    def pinned(self) -> str | None:
        """The digest that every load of it must find; None accepts any."""
        return self.loaded.digest if self.loaded else self.call.digest

    @property
    def resident(self) -> bool:
        """Return whether it is never evicted."""
        return self.call.residency is Residency.RESIDENT

    def copy_key(self) -> tuple[object, ...]:
        """Return the key of the adapter's copy on the ranks; adapters with one key share a copy."""
        return (self.lora_int_id,) if self.loaded is None else (self.loaded.identity,)

    def is_content(self, call: AdapterCall) -> bool:
        """Return whether a call asks for the content that this adapter has, or is about to load; its scale and residency may differ.

        A failed adapter matches no call. The components must be equal. Once loaded, its format, rank and identity must be those that the
        call states, if any. Then the call's digest decides, or without one its source. A source matches no more if its files may have
        changed since the adapter left memory.
        """
        loaded = self.loaded
        if self.state is AdapterState.FAILED or set(call.components) != set(self.call.components):
            return False
        if loaded and (call.format not in (None, loaded.format) or call.expected_rank not in (None, loaded.rank)):
            return False
        if loaded and contradicts(loaded.identity, call.identity):
            return False
        if call.digest is not None:
            return call.digest == self.pinned
        # A deferred adapter's fetched copy cannot change.
        in_place = self.fetched is None or self.fetched.digest is None
        may_have_changed = self.state is AdapterState.CACHED or (self.state is AdapterState.DEFERRED and in_place)
        return call.source == self.call.source and not (loaded and may_have_changed)

    def may_be_behind(self, call: AdapterCall) -> bool:
        """Return True if it is loaded and matches a call, but only the source can show if the content changed there.

        False if the call names exactly its digest and identity.
        """
        loaded = self.loaded if self.state is AdapterState.LOADED and self.fetched is not None else None
        exactly = loaded is not None and (call.digest, call.identity) == (loaded.digest, loaded.identity)
        return loaded is not None and not exactly and self.is_content(call)

    def document(self, ranks: int) -> AdapterDocument:
        """Return the adapter as the state document shows it."""
        loaded, fetched, last_s = self.loaded, self.fetched, self.usage.last_s
        fetched_bytes, total_bytes = (self.progress if self.progress and self.state is AdapterState.FETCHING else None) or (None, None)
        # A deferred adapter's file was inspected, but no rank has read it yet.
        unread = fetched.digest if fetched and self.state is AdapterState.DEFERRED else None
        return AdapterDocument(
            name=self.name,
            digest=loaded.digest if loaded else unread,
            identity=loaded.identity if loaded else None,
            source=self.call.source,
            state=self.state,
            scale=self.call.scale,
            rank=loaded.rank if loaded else None,
            modules=loaded.modules if loaded else None,
            size_bytes=loaded.size_bytes if loaded else None,
            ranks_loaded=ranks if loaded and self.registered else 0,
            ranks_total=ranks,
            refs=len(self.users),
            error=self.error,
            revision=fetched.revision if fetched else None,
            components=loaded.components if loaded else [],
            format=loaded.format if loaded else None,
            alpha=loaded.alpha if loaded else None,
            base_model=loaded.base_model if loaded else None,
            recipe=loaded.recipe if loaded else None,
            residency=self.call.residency,
            priority=self.call.priority,
            fetched_bytes=fetched_bytes,
            total_bytes=total_bytes,
            requests_total=self.usage.requests,
            last_request_age_seconds=None if last_s is None else round(time.monotonic() - last_s, 3),
            verification_failed=self.found_wrong_s is not None and time.monotonic() - self.found_wrong_s < TELL_WRONG_S,
            load_seconds=None if self.load_s is None else round(self.load_s, 6),
        )


class AdapterTable:
    """Adapters by name. The ranks hold at most `capacity` copies in host memory, one for all names with the same effect.

    An `arriving` one replaces the current one of its name once it is loaded; `leaving` ones only finish their requests.
    """

    def __init__(self, *, capacity: int, residents: int, keep_failed: Container[str] | None = ()) -> None:
        """Begin empty. `keep_failed` has the names whose failed adapters stay, as something wants them; None stands for all names."""
        self.capacity = capacity
        self.keep_failed = keep_failed
        self.loads = LoadCounts()
        self.touched = TouchedRecords()
        # Records of failures that only calls brought, the oldest first.
        self.failed: dict[Adapter, None] = {}
        self.named: dict[str, Adapter] = {}
        self.arriving: dict[str, Adapter] = {}
        self.leaving: list[Adapter] = []
        self._residents = residents
        # The names that hold a place for resident adapters, so that not all names have to be looked at.
        self._holders: set[str] = set()
        self._ids = itertools.count(1)
        self._uses = itertools.count(1)

    def __iter__(self) -> Iterator[Adapter]:
        return iter([*self.named.values(), *self.arriving.values(), *self.leaving])

    def __contains__(self, adapter: Adapter) -> bool:
        name = adapter.name
        return self.named.get(name) is adapter or self.arriving.get(name) is adapter or adapter in self.leaving

    def get(self, name: str) -> Adapter | None:
        """Return the current adapter of a name, in any state; None if there is none."""
        return self.named.get(name)

    def newest(self, name: str) -> Adapter | None:
        """Return the version last put under a name: the arriving one, or else the current one."""
        return self.arriving.get(name) or self.named.get(name)

    def names(self) -> list[str]:
        """Return all names, sorted, whatever the states of their adapters."""
        return sorted(self.named)

    def new(self, name: str, call: AdapterCall) -> Adapter:
        """Make an adapter for a call of this name without adding it; it shares the usage of the one that the table has, if any."""
        known = self.named.get(name)
        return Adapter(name, call, usage=known.usage if known else Usage(), touched=self.touched)

    def unpublished(self, ranks: int) -> list[tuple[Adapter, AdapterDocument | None]]:
        """List the adapters whose record may have changed since `settle`, with their record for so many ranks; None for removed ones."""
        touched = list(self.touched.unpublished)
        return [(adapter, adapter.document(ranks) if adapter in self else None) for adapter in touched]

    def settle(self, adapters: Iterable[Adapter]) -> None:
        """Take these records as published. A record with a temporary value is looked at again until that ends."""
        for adapter in adapters:
            if adapter.found_wrong_s is None or not adapter.document(1).verification_failed:
                self.touched.unpublished.pop(adapter, None)

    def next_id(self) -> int:
        """Return a new id for a load; no id is used twice."""
        return next(self._ids)

    def use(self, adapter: Adapter) -> None:
        """Record that an adapter was used or loaded just now."""
        adapter.used_at = next(self._uses)

    def require_place(self, name: str, call: AdapterCall) -> None:
        """Raise RequestError (CapacityExceeded), naming the resident adapters, if the call's would be one too many."""
        if call.residency is not Residency.RESIDENT:
            return
        for each in self.touched.names:
            current = self.named.get(each)
            holds = current is not None and current.resident and current.state is not AdapterState.FAILED
            (self._holders.add if holds else self._holders.discard)(each)
        self.touched.names.clear()
        holders = sorted(self._holders - {name})
        if len(holders) >= self._residents:
            raise RequestError(
                ErrorCode.CAPACITY_EXCEEDED,
                f"adapter {name!r}: expected at most {self._residents} resident adapters, which is --max-loras, "
                f"found {len(holders)} already: {', '.join(holders)}",
            )

    # --- the ranks' memory ----------------------------------------------------------------------------------------------

    def copies(self, *, without: Adapter | None = None) -> dict[tuple[object, ...], list[Adapter]]:
        """Return the copies that the ranks hold by their keys, each with the adapters that share it; `without` is left out."""
        copies: dict[tuple[object, ...], list[Adapter]] = {}
        for adapter in self:
            if adapter.registered and adapter is not without:
                copies.setdefault(adapter.copy_key(), []).append(adapter)
        return copies

    def held(self) -> dict[int, list[str]]:
        """Return the ranks' reports of each adapter at its load, by id, for all adapters that the ranks should hold."""
        return {adapter.lora_int_id: adapter.kept for adapter in self if adapter.registered and adapter.loaded}

    def unused_leaving(self) -> list[Adapter]:
        """Return the leaving adapters that no request uses and that are not being unloaded."""
        return [adapter for adapter in self.leaving if not adapter.users and not adapter.unloading]

    def deferred(self) -> list[Adapter]:
        """Return the deferred adapters, the most wanted first, without those that a deferred one replaces."""
        arriving = [adapter for adapter in self.arriving.values() if adapter.state is AdapterState.DEFERRED]
        names = {adapter.name for adapter in arriving}
        named = [adapter for adapter in self.named.values() if adapter.state is AdapterState.DEFERRED and adapter.name not in names]
        return sorted([*arriving, *named], key=lambda each: (*rank_of(each.call), each.used_at), reverse=True)

    def most_wanted(self, calls: Mapping[str, AdapterCall]) -> list[str]:
        """Return the names in `calls` to load now, the most wanted first.

        OnDemand ones are left out, and those without room beside more wanted adapters in memory or on their way.
        """
        held = [("", each.call) for each in self if each.registered or each.state in (*LOADING, AdapterState.LOADED, AdapterState.DEFERRED)]
        may_be = [(name, call) for name, call in sorted(calls.items()) if call.residency is not Residency.ON_DEMAND]
        wanted = sorted([*held, *may_be], key=lambda each: rank_of(each[1]), reverse=True)
        return [name for name, _ in wanted[: self.capacity] if name]


def rank_of(call: AdapterCall) -> tuple[bool, int]:
    """Return a sort key for staying in memory, larger for more wanted adapters: resident ones first, then by priority."""
    return call.residency is Residency.RESIDENT, call.priority
