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
    """The interface through which a manager reaches the layers and their slots, numbered from 0. `AdapterLayers` implements it."""

    @property
    def max_rank(self) -> int:
        """The largest rank an adapter may have to be written into a slot."""

    def register_module(self, name: str) -> bool:
        """Give slots to the layers of this name; return False if all of them have slots already."""

    def dummy(self, rank: int) -> HostAdapter:
        """Return an adapter of this rank that has all factors zero, for every layer with slots."""

    def write(self, slot: int, adapter: HostAdapter) -> None:
        """Replace the adapter in a slot. Factors may be copied later, at the latest when the slot is used."""

    def clear(self, slot: int) -> None:
        """Empty a slot."""

    def rows(self, uses: Sequence[Sequence[SlotUse]]) -> AbstractContextManager[None]:
        """Return a context in which row i of a call uses the slots in `uses[i]`; an empty entry means no adapter."""


class LoRAModel(msgspec.Struct, frozen=True):
    """An adapter in host memory, with the id by which a manager registers it and a name for messages."""

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
        """The number of slots, which bounds the adapters active at once.

        It equals `lora_slots`; managers of other kinds of adapters also have this name.
        """
        return self.lora_slots

    def register_module(self, name: str) -> bool:
        """Wrap a layer, named `component.path`, before any adapter names it. Return False if the name's layers all have slots.

        Raises:
            ValueError: the name means no layer, or adapters may not change it.
        """
        return self._layers.register_module(name)

    def create_dummy_lora(self, lora_int_id: int, rank: int = DUMMY_RANK) -> LoRAModel:
        """Return an adapter with factors of zeros for every layer with slots, without registering it.

        It is computed as any adapter is, but has no effect.

        Raises:
            ValueError: there are no layers with slots, or `rank` exceeds the largest allowed.
        """
        return LoRAModel(lora_int_id, "dummy", self._layers.dummy(rank))

    def get_dummy_lora_warmup_rank(self, default_rank: int = DUMMY_RANK) -> int:
        """Return `default_rank`, lowered to the slots' largest rank if that is smaller, so that `create_dummy_lora` accepts it."""
        return min(default_rank, self._layers.max_rank)

    def set_adapter_mapping(self, mapping: Sequence[Mapping[int, float]]) -> AbstractContextManager[None]:
        """Return a context in which row i of a call uses the adapters in `mapping[i]`, a strength by id. Strength 0 is no use.

        Raises:
            ValueError: an adapter of another strength is in no slot.
        """
        rows = [[SlotUse(self._slot(lora_int_id), scale) for lora_int_id, scale in row.items() if scale] for row in mapping]
        return self._layers.rows(rows)

    def add_adapter(self, model: LoRAModel) -> bool:
        """Register an adapter, without a slot; return False if its id is registered already.

        Raises:
            RequestError: CapacityExceeded if as many as `capacity` are registered.
        """
        if model.id in self._registered:
            return False
        if len(self) >= self.capacity:
            raise _no_room(f"adapter {model.name!r}", f"{self.capacity} adapters are in memory")
        self._registered[model.id] = model
        return True

    def activate_adapter(self, lora_int_id: int) -> bool:
        """Write an adapter into the lowest free slot and return True, or return False if it has a slot already. Nothing is evicted.

        Raises:
            ValueError: the id is not registered. RequestError: CapacityExceeded, other adapters are in all slots.
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
        """Empty the slot of an adapter, which stays registered; return False if it is not active."""
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
        raise NotImplementedError(f"adapter {lora_int_id}: this manager evicts nothing, so it pins nothing; LRUCacheLoRAModelManager does")

    def remove_adapter(self, lora_int_id: int) -> bool:
        """Forget an adapter and empty its slot, if it has one; return False for an unknown id."""
        self.deactivate_adapter(lora_int_id)
        return self._registered.pop(lora_int_id, None) is not None

    def remove_all_adapters(self) -> None:
        """Forget every adapter and empty all slots."""
        for lora_int_id in list(self._registered):
            self.remove_adapter(lora_int_id)

    def list_adapters(self) -> dict[int, LoRAModel]:
        """Return a copy of the registered adapters by id; the last is the newest or, in the evicting manager, the most recently used."""
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
            raise ValueError(f"adapter {lora_int_id} is in no slot, adapters in slots: {sorted(self._active) or 'none'}")
        return slot

    def _require(self, lora_int_id: int) -> LoRAModel:
        if lora_int_id not in self._registered:
            raise ValueError(f"adapter {lora_int_id} is not registered, registered are: {sorted(self._registered) or 'none'}")
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
        """Register an adapter, evicting another if there is no room; return False if it was registered, and count it as used.

        Raises:
            RequestError: CapacityExceeded if none may be evicted.
        """
        if model.id in self._registered:
            self.touch(model.id)
            return False
        if len(self) >= self.capacity:
            self.remove_oldest_adapter()
        return super().add_adapter(model)

    def activate_adapter(self, lora_int_id: int) -> bool:
        """Put an adapter into a slot and count it as used; return False if it has a slot.

        Without a free one, take that of the least recently used. Slots of pinned adapters and of those in use are never taken.

        Raises:
            ValueError: it is not registered. RequestError: CapacityExceeded, no slot can be taken.
        """
        self._require(lora_int_id)
        self.touch(lora_int_id)
        if lora_int_id not in self._active and len(self._active) >= self.lora_slots:
            busy = self._kept_active | set(self._in_use())
            if (oldest := next((known for known in self._active if known not in busy), None)) is not None:
                self.deactivate_adapter(oldest)
        return super().activate_adapter(lora_int_id)

    def remove_adapter(self, lora_int_id: int) -> bool:
        """Take an adapter out of its slot, unpin it and forget it, even if it is in use; return False if it is not registered."""
        self.unpin_adapter(lora_int_id)
        return super().remove_adapter(lora_int_id)

    def remove_oldest_adapter(self) -> bool:
        """Forget the least recently used adapter that may be evicted; return False if there is none."""
        oldest = next(iter(self.evictable()), None)
        return oldest is not None and self.remove_adapter(oldest)

    def evictable(self) -> list[int]:
        """Return the ids of registered adapters that are neither pinned, kept nor used by running rows. The first was used longest ago."""
        busy = self._kept | set(self._in_use())
        return [known for known in self._registered if known not in busy]

    def touch(self, lora_int_id: int) -> bool:
        """Mark an adapter as the most recently used, in memory and in its slot if it has one; return False for an unknown id."""
        if lora_int_id not in self._registered:
            return False
        self._registered[lora_int_id] = self._registered.pop(lora_int_id)
        if lora_int_id in self._active:
            self._active[lora_int_id] = self._active.pop(lora_int_id)
        return True

    def pin_adapter(self, lora_int_id: int) -> bool:
        """Give an adapter a slot, which no other may take, keep it registered, and return True. `unpin_adapter` or its removal end this.

        Raises:
            ValueError: it is not registered. RequestError: CapacityExceeded, all slots are pinned or in use.
        """
        self._require(lora_int_id)
        self.activate_adapter(lora_int_id)
        self._kept_active.add(lora_int_id)
        return self.keep_adapter(lora_int_id)

    def keep_adapter(self, lora_int_id: int) -> bool:
        """Keep an adapter registered until `unpin_adapter` or its removal, while others may take its slot; return True.

        Raises:
            ValueError: it is not registered.
        """
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
