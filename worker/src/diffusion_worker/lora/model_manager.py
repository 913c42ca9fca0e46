# SPDX-License-Identifier: Apache-2.0
"""The adapters of a rank on two levels: registered in host memory, and active in one of the slots of the layers.

The plain manager refuses an adapter without room; the other one makes room by evicting the least recently used. Adapters are
known here by number only. `diffusion_manager` knows their files and the requests that use them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.pipeline_layers import HostAdapter, SlotUse

# Rank of the adapters of a warm-up: real ones mostly have this rank or a larger one.
DUMMY_RANK = 8


class Slots(Protocol):
    """The layers with the slots that adapters are active in: `AdapterLayers`."""

    @property
    def max_rank(self) -> int:
        """The largest rank that fits."""

    def register_module(self, name: str) -> bool:
        """Give a layer its slots."""

    def dummy(self, rank: int) -> HostAdapter:
        """Make an adapter of zeros."""

    def write(self, slot: int, adapter: HostAdapter) -> None:
        """Put an adapter into a slot."""

    def clear(self, slot: int) -> None:
        """Empty a slot."""

    def rows(self, uses: Sequence[Sequence[SlotUse]]) -> AbstractContextManager[None]:
        """Make the rows of a call use slots, inside the `with` block alone."""


class LoRAModel(msgspec.Struct, frozen=True):
    """An adapter that can be registered."""

    id: int
    name: str
    adapter: HostAdapter


class LoRAModelManager:
    """A manager of adapters up to a capacity, some of them active in slots. It removes none unless a call asks for it."""

    def __init__(self, layers: Slots, *, slots: int, capacity: int) -> None:
        """Manage no adapters yet; raises ValueError if `capacity` is below `slots`, because active adapters are registered too."""
        if capacity < slots:
            raise ValueError(f"a capacity of {capacity} adapters is less than {slots} slots")
        self.lora_slots = slots
        self.capacity = capacity
        self._layers = layers
        # Both from the least to the most recently used.
        self._registered: dict[int, LoRAModel] = {}
        self._active: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of registered adapters."""
        return len(self._registered)

    @property
    def adapter_slots(self) -> int:
        """The number of adapters that can be active at once: `lora_slots`, under the name that managers of any adapters use."""
        return self.lora_slots

    def register_module(self, name: str) -> bool:
        """Give the layer `component.path` its slots now, not when the first adapter names it; return False if it has them.

        Raises:
            ValueError: there is no such layer, or none that may have adapters.
        """
        return self._layers.register_module(name)

    def create_dummy_lora(self, lora_int_id: int, rank: int = DUMMY_RANK) -> LoRAModel:
        """Make an adapter of zeros for every layer that has slots: it is computed like any other, and changes nothing.

        Raises:
            ValueError: no layer has slots, or the rank is over the largest one.
        """
        return LoRAModel(lora_int_id, "dummy", self._layers.dummy(rank))

    def get_dummy_lora_warmup_rank(self, default_rank: int = DUMMY_RANK) -> int:
        """Return the rank for an adapter of a warm-up: the default, or the largest that fits if that is less."""
        return min(default_rank, self._layers.max_rank)

    def set_adapter_mapping(self, mapping: Sequence[Mapping[int, float]]) -> AbstractContextManager[None]:
        """Make each row of a call use adapters, given as a strength by id, inside the `with` block alone.

        Raises:
            ValueError: an adapter is in no slot.
        """
        rows = [[SlotUse(self._slot(lora_int_id), scale) for lora_int_id, scale in row.items() if scale] for row in mapping]
        return self._layers.rows(rows)

    def add_adapter(self, model: LoRAModel) -> bool:
        """Register an adapter; return False if its id is registered already.

        Raises:
            RequestError: CapacityExceeded.
        """
        if model.id in self._registered:
            return False
        if len(self) >= self.capacity:
            raise _no_room(f"adapter {model.name!r}", f"{self.capacity} are in memory")
        self._registered[model.id] = model
        return True

    def activate_adapter(self, lora_int_id: int) -> bool:
        """Put a registered adapter into a slot; return False if it is in one already.

        Raises:
            ValueError: it is not registered. RequestError: CapacityExceeded, no slot is free.
        """
        model = self._require(lora_int_id)
        if lora_int_id in self._active:
            return False
        free = sorted(set(range(self.lora_slots)) - set(self._active.values()))
        if not free:
            raise _no_room(f"adapter {model.name!r}", f"all {self.lora_slots} slots are in use")
        self._layers.write(free[0], model.adapter)
        self._active[lora_int_id] = free[0]
        return True

    def deactivate_adapter(self, lora_int_id: int) -> bool:
        """Take an adapter out of its slot; return False if it is in none."""
        slot = self._active.pop(lora_int_id, None)
        if slot is None:
            return False
        self._layers.clear(slot)
        return True

    def deactivate_all(self) -> None:
        """Take every adapter out of its slot; all stay registered."""
        for lora_int_id in list(self._active):
            self.deactivate_adapter(lora_int_id)

    def pin_adapter(self, lora_int_id: int) -> bool:
        """Raise NotImplementedError, because this manager evicts nothing and so has nothing to pin."""
        raise NotImplementedError(f"adapter {lora_int_id}: pinning is LRUCacheLoRAModelManager's, this manager evicts nothing")

    def remove_adapter(self, lora_int_id: int) -> bool:
        """Take an adapter out of its slot and forget it; return False if it is not registered."""
        self.deactivate_adapter(lora_int_id)
        return self._registered.pop(lora_int_id, None) is not None

    def remove_all_adapters(self) -> None:
        """Forget every adapter."""
        for lora_int_id in list(self._registered):
            self.remove_adapter(lora_int_id)

    def list_adapters(self) -> dict[int, LoRAModel]:
        """Return the registered adapters by id, the least recently used first, as a copy."""
        return dict(self._registered)

    def get_adapter(self, lora_int_id: int) -> LoRAModel | None:
        """Return a registered adapter; None if the id is not registered."""
        return self._registered.get(lora_int_id)

    def slot_of(self, lora_int_id: int) -> int | None:
        """Look up the slot of an adapter by its id; None for one that is only registered, or unknown."""
        return self._active.get(lora_int_id)

    def _slot(self, lora_int_id: int) -> int:
        slot = self.slot_of(lora_int_id)
        if slot is None:
            raise ValueError(f"adapter {lora_int_id} is in no slot, there are: {sorted(self._active) or 'none'}")
        return slot

    def _require(self, lora_int_id: int) -> LoRAModel:
        if lora_int_id not in self._registered:
            raise ValueError(f"adapter {lora_int_id} is not registered, there are: {sorted(self._registered) or 'none'}")
        return self._registered[lora_int_id]


class LRUCacheLoRAModelManager(LoRAModelManager):
    """A manager that makes room by evicting the least recently used adapter, but none that is pinned or in use.

    `in_use` returns the ids that running rows use: the same ones on all ranks, so that all evict the same adapter.
    """

    def __init__(self, layers: Slots, *, slots: int, capacity: int, in_use: Callable[[], Collection[int]] = frozenset) -> None:
        super().__init__(layers, slots=slots, capacity=capacity)
        self._in_use = in_use
        self._kept: set[int] = set()
        self._kept_active: set[int] = set()

    def add_adapter(self, model: LoRAModel) -> bool:
        """Register an adapter, evicting another if there is no room; return False if it was registered, and count it as used."""
        if model.id in self._registered:
            self.touch(model.id)
            return False
        if len(self) >= self.capacity:
            self.remove_oldest_adapter()
        return super().add_adapter(model)

    def activate_adapter(self, lora_int_id: int) -> bool:
        """Put an adapter into a slot, in the place of another if none is free; return False if it is in one already."""
        self._require(lora_int_id)
        self.touch(lora_int_id)
        if lora_int_id not in self._active and len(self._active) >= self.lora_slots:
            busy = self._kept_active | set(self._in_use())
            if (oldest := next((known for known in self._active if known not in busy), None)) is not None:
                self.deactivate_adapter(oldest)
        return super().activate_adapter(lora_int_id)

    def remove_adapter(self, lora_int_id: int) -> bool:
        """Take an adapter out of its slot, unpin it and forget it; return False if it is not registered."""
        self.unpin_adapter(lora_int_id)
        return super().remove_adapter(lora_int_id)

    def remove_oldest_adapter(self) -> bool:
        """Forget the least recently used adapter that may be evicted; return False if there is none."""
        oldest = next(iter(self.evictable()), None)
        return oldest is not None and self.remove_adapter(oldest)

    def evictable(self) -> list[int]:
        """Return the ids of the adapters that may be evicted, the least recently used first."""
        busy = self._kept | set(self._in_use())
        return [known for known in self._registered if known not in busy]

    def touch(self, lora_int_id: int) -> bool:
        """Count an adapter as used just now; return False if it is not registered."""
        if lora_int_id not in self._registered:
            return False
        self._registered[lora_int_id] = self._registered.pop(lora_int_id)
        if lora_int_id in self._active:
            self._active[lora_int_id] = self._active.pop(lora_int_id)
        return True

    def pin_adapter(self, lora_int_id: int) -> bool:
        """Keep an adapter registered and active, until it is unpinned or removed.

        Raises:
            ValueError: it is not registered. RequestError: CapacityExceeded, no slot can be freed.
        """
        self._require(lora_int_id)
        self.activate_adapter(lora_int_id)
        self._kept_active.add(lora_int_id)
        return self.keep_adapter(lora_int_id)

    def keep_adapter(self, lora_int_id: int) -> bool:
        """Keep an adapter registered, while other adapters may take its slot; raises ValueError if it is not registered."""
        self._require(lora_int_id)
        self._kept.add(lora_int_id)
        return True

    def unpin_adapter(self, lora_int_id: int) -> bool:
        """Let an adapter be evicted again; return False if it was not pinned."""
        pinned = lora_int_id in self._kept
        self._kept.discard(lora_int_id)
        self._kept_active.discard(lora_int_id)
        return pinned


def _no_room(what: str, why: str) -> RequestError:
    return RequestError(ErrorCode.CAPACITY_EXCEEDED, f"{what}: {why}, and none of them can be evicted")
