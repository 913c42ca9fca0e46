# SPDX-License-Identifier: Apache-2.0
"""The adapters a server knows by name, and the requests that use them. Holds no torch: ids stand for what the ranks loaded."""

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from diffusion_worker.engine.documents import AdapterCall, AdapterDocument, AdapterState, Problem
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.messages import LoadedLoRA, LoRAUse
from diffusion_worker.sources.source import Source


class Adapter:
    """One load of an adapter. The same name loaded again with other bytes is another one, with another id."""

    def __init__(self, name: str, source: Source, *, scale: float, lora_int_id: int) -> None:
        self.name = name
        self.source = source
        self.scale = scale
        self.lora_int_id = lora_int_id
        self.state = AdapterState.LOADING
        self.loaded: LoadedLoRA | None = None
        self.error: Problem | None = None
        # Its weights are about to leave the ranks: a new generation of them is not to have it.
        self.unloading = False
        self.users: set[str] = set()
        self.unused = asyncio.Event()
        self.unused.set()

    @property
    def holds_slot(self) -> bool:
        """Whether the ranks keep, or are about to keep, its weights."""
        return self.state is not AdapterState.FAILED

    @property
    def digest(self) -> str:
        """sha256 of the weights of a loaded adapter."""
        assert self.loaded is not None, "only loaded adapters are used"
        return self.loaded.digest

    def document(self, ranks: int) -> AdapterDocument:
        """The adapter as the state document shows it."""
        loaded = self.loaded
        return AdapterDocument(
            name=self.name,
            digest=loaded.digest if loaded else None,
            source=self.source,
            state=self.state,
            scale=self.scale,
            rank=loaded.rank if loaded else None,
            modules=loaded.modules if loaded else None,
            size_bytes=loaded.size_bytes if loaded else None,
            ranks_loaded=ranks if loaded else 0,
            ranks_total=ranks,
            refs=len(self.users),
            error=self.error,
        )


class AdapterTable:
    """Adapters by name, with the ones that are being replaced or removed beside them until nobody uses them."""

    def __init__(self, *, slots: int) -> None:
        self._slots = slots
        self._ids = itertools.count(1)
        self._named: dict[str, Adapter] = {}
        self._leaving: list[Adapter] = []

    def __iter__(self) -> Iterator[Adapter]:
        return iter([*self._named.values(), *self._leaving])

    def get(self, name: str) -> Adapter | None:
        """The adapter of a name, in whatever state."""
        return self._named.get(name)

    def names(self) -> list[str]:
        """Names that are served right now."""
        return sorted(name for name, adapter in self._named.items() if adapter.state is AdapterState.LOADED)

    def new(self, name: str, call: AdapterCall) -> Adapter:
        """An adapter that is about to be loaded, not yet in the table."""
        return Adapter(name, call.source, scale=call.scale, lora_int_id=next(self._ids))

    def require_slot(self, adapter: Adapter) -> None:
        """Raises RequestError (CapacityExceeded) that names what holds the slots."""
        name = adapter.name
        holders = [other.name for other in self if other.holds_slot and other is not adapter]
        others = {holder for holder in holders if holder != name}
        # The ranks have one slot more than names: a new version of an adapter is loaded beside the old one.
        if len(others) >= self._slots or len(holders) > self._slots:
            raise RequestError(
                ErrorCode.CAPACITY_EXCEEDED,
                f"adapter {name!r}: expected a free slot, found all {self._slots} held by {', '.join(sorted(holders))}",
            )

    def put(self, adapter: Adapter) -> Adapter | None:
        """Make an adapter the one of its name; returns the one it replaces, which then is leaving."""
        previous = self._named.get(adapter.name)
        self._named[adapter.name] = adapter
        return self._leave(previous)

    def take_out(self, name: str) -> Adapter | None:
        """Remove a name: from now on it is unknown. Returns the adapter, which then is leaving."""
        return self._leave(self._named.pop(name, None))

    def forget(self, adapter: Adapter) -> None:
        """A leaving adapter is gone from the ranks."""
        self._leaving.remove(adapter)

    def resolve(self, name: str) -> Adapter:
        """The adapter a request asks for; never the base instead.

        Raises:
            RequestError: NotFound for a name nobody declared, AdapterNotLoaded with the reason for one that is not ready.
        """
        adapter = self._named.get(name)
        if adapter is None:
            known = ", ".join(self.names()) or "none"
            raise RequestError(ErrorCode.NOT_FOUND, f"model {name!r} is not known here; loaded adapters: {known}")
        if adapter.state is not AdapterState.LOADED:
            why = f": {adapter.error.message}" if adapter.error else ""
            raise RequestError(ErrorCode.ADAPTER_NOT_LOADED, f"adapter {name!r} is {adapter.state.value}, not Loaded{why}")
        return adapter

    @contextmanager
    def used(self, adapter: Adapter | None, request_id: str, scale: float | None) -> Iterator[LoRAUse | None]:
        """Holds an adapter for one request; None stands for the base.

        Raises:
            RequestError: InvalidRequest for a scale where there is nothing to scale.
        """
        if adapter is None:
            if scale is not None:
                message = "lora_scale: expected with it the name of an adapter as model, found the base model"
                raise RequestError(ErrorCode.INVALID_REQUEST, message, details={"field": "lora_scale"})
            yield None
            return
        adapter.users.add(request_id)
        adapter.unused.clear()
        try:
            yield LoRAUse(adapter.lora_int_id, adapter.scale if scale is None else scale)
        finally:
            adapter.users.discard(request_id)
            if not adapter.users:
                adapter.unused.set()

    def _leave(self, adapter: Adapter | None) -> Adapter | None:
        if adapter is None or not adapter.holds_slot:
            return None
        adapter.state = AdapterState.DRAINING
        self._leaving.append(adapter)
        return adapter
