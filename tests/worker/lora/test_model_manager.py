# SPDX-License-Identifier: Apache-2.0
"""Adapters registered on the host and active in slots: the results of each call, and the order of evictions."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.call_rows import Uses
from diffusion_worker.lora.model_manager import LoRAModel, LoRAModelManager, LRUCacheLoRAModelManager
from diffusion_worker.lora.pipeline_layers import HostAdapter, SlotUse


class FakeSlots:
    """Slots that only remember their content and the calls."""

    max_rank = 4

    def __init__(self) -> None:
        self.held: dict[int, object] = {}
        self.registered: list[str] = []
        self.mapped: list[object] = []

    def register_module(self, name: str) -> bool:
        self.registered.append(name)
        return self.registered.count(name) == 1

    def dummy(self, rank: int) -> HostAdapter:
        return HostAdapter(frozenset(), rank, (), (), torch.empty(0))

    @contextmanager
    def rows(self, uses: Uses) -> Iterator[None]:
        self.mapped.append(uses)
        yield
        self.mapped.append(None)

    def write(self, slot: int, adapter: HostAdapter) -> None:
        self.held[slot] = adapter

    def clear(self, slot: int) -> None:
        self.held.pop(slot, None)


def model(number: int) -> LoRAModel:
    return LoRAModel(number, f"adapter {number}", f"weights of {number}")  # type: ignore[arg-type]


def plain(slots: int = 2, capacity: int = 3) -> tuple[LoRAModelManager, FakeSlots]:
    layers = FakeSlots()
    return LoRAModelManager(layers, slots=slots, capacity=capacity), layers


def least_recent(slots: int = 2, capacity: int = 3, in_use: frozenset[int] = frozenset()) -> tuple[LRUCacheLoRAModelManager, FakeSlots]:
    layers = FakeSlots()
    return LRUCacheLoRAModelManager(layers, slots=slots, capacity=capacity, in_use=lambda: in_use), layers


# --- the plain manager ----------------------------------------------------------------------------------------------------


def test_fewer_places_in_memory_than_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="capacity of 1 adapters is less than 2 slots"):
        plain(slots=2, capacity=1)


def test_an_adapter_is_registered_once_and_activated_once() -> None:
    manager, layers = plain()
    assert manager.add_adapter(model(1))
    assert not manager.add_adapter(model(1))
    assert layers.held == {}
    assert manager.activate_adapter(1)
    assert not manager.activate_adapter(1)
    assert layers.held == {0: "weights of 1"}
    assert manager.slot_of(1) == 0
    assert manager.get_adapter(1) == model(1)
    assert manager.get_adapter(2) is None


def test_a_full_plain_manager_refuses_on_both_levels_and_changes_nothing() -> None:
    manager, layers = plain(slots=1, capacity=2)
    assert manager.add_adapter(model(1)) and manager.add_adapter(model(2)) and manager.activate_adapter(1)
    with pytest.raises(RequestError, match="'adapter 3': 2 adapters are in memory") as refused:
        manager.add_adapter(model(3))
    assert refused.value.code is ErrorCode.CAPACITY_EXCEEDED
    with pytest.raises(RequestError, match="'adapter 2': all 1 slots are in use"):
        manager.activate_adapter(2)
    assert list(manager.list_adapters()) == [1, 2]
    assert layers.held == {0: "weights of 1"}


def test_deactivating_empties_the_slot_and_keeps_the_adapter() -> None:
    manager, layers = plain()
    manager.add_adapter(model(1))
    assert not manager.deactivate_adapter(1)
    manager.activate_adapter(1)
    assert manager.deactivate_adapter(1)
    assert layers.held == {}
    assert list(manager.list_adapters()) == [1]
    assert not manager.deactivate_adapter(9)


def test_removing_an_active_adapter_takes_it_out_of_its_slot_first() -> None:
    manager, layers = plain()
    manager.add_adapter(model(1))
    manager.activate_adapter(1)
    assert manager.remove_adapter(1)
    assert (layers.held, manager.list_adapters(), manager.slot_of(1)) == ({}, {}, None)
    assert not manager.remove_adapter(1)


def test_all_adapters_are_removed_at_once_and_the_list_is_a_copy() -> None:
    manager, layers = plain()
    for number in (1, 2, 3):
        manager.add_adapter(model(number))
    manager.activate_adapter(2)
    manager.list_adapters().clear()
    assert list(manager.list_adapters()) == [1, 2, 3]
    manager.remove_all_adapters()
    assert (manager.list_adapters(), layers.held) == ({}, {})


def test_what_is_not_registered_cannot_be_activated_and_the_plain_manager_pins_nothing() -> None:
    manager, _ = plain()
    with pytest.raises(ValueError, match="adapter 7 is not registered, registered are: none"):
        manager.activate_adapter(7)
    with pytest.raises(NotImplementedError):
        manager.pin_adapter(7)


def test_a_manager_counts_its_adapters_and_says_how_many_it_has_room_for() -> None:
    manager, _ = plain(slots=2, capacity=3)
    assert (len(manager), manager.capacity, manager.lora_slots, manager.adapter_slots) == (0, 3, 2, 2)
    manager.add_adapter(model(1))
    assert len(manager) == 1
    manager.remove_adapter(1)
    assert len(manager) == 0


def test_a_mapping_gives_the_rows_of_one_call_their_slots_and_ends_with_it() -> None:
    manager, layers = plain(slots=2)
    for number in (1, 2, 3):
        manager.add_adapter(model(number))
    manager.activate_adapter(2)
    manager.activate_adapter(3)
    with manager.set_adapter_mapping([{3: 0.5}, {}, {2: 1.0, 3: 2.0}, {1: 0.0}]):
        assert layers.mapped == [[[SlotUse(1, 0.5)], [], [SlotUse(0, 1.0), SlotUse(1, 2.0)], []]]
    assert layers.mapped[1:] == [None]
    with pytest.raises(ValueError, match=r"adapter 1 is in no slot, adapters in slots: \[2, 3\]"):
        manager.set_adapter_mapping([{1: 1.0}])


def test_a_dummy_is_of_the_rank_that_is_asked_for_and_a_warm_up_asks_for_none_that_does_not_fit() -> None:
    manager, _ = plain()
    dummy = manager.create_dummy_lora(-1, rank=3)
    assert (dummy.id, dummy.adapter.rank) == (-1, 3)
    assert [manager.get_dummy_lora_warmup_rank(rank) for rank in (2, 4, 8)] == [2, 4, 4]


# --- least recently used --------------------------------------------------------------------------------------------------


def test_the_least_recently_used_adapter_goes_from_memory_and_from_its_slot() -> None:
    manager, layers = least_recent(slots=2, capacity=2)
    manager.add_adapter(model(1))
    manager.activate_adapter(1)
    manager.add_adapter(model(2))
    assert manager.add_adapter(model(3))
    assert list(manager.list_adapters()) == [2, 3]
    assert layers.held == {}


def test_an_adapter_that_is_added_again_or_touched_or_activated_is_the_newest() -> None:
    manager, _ = least_recent(slots=1, capacity=3)
    for number in (1, 2, 3):
        manager.add_adapter(model(number))
    assert not manager.add_adapter(model(1))
    assert list(manager.list_adapters()) == [2, 3, 1]
    assert manager.touch(2)
    assert not manager.touch(9)
    assert list(manager.list_adapters()) == [3, 1, 2]
    manager.activate_adapter(3)
    assert list(manager.list_adapters()) == [1, 2, 3]


def test_activation_takes_the_slot_of_the_least_recently_used_active_adapter() -> None:
    manager, layers = least_recent(slots=2, capacity=3)
    for number in (1, 2, 3):
        manager.add_adapter(model(number))
    manager.activate_adapter(1)
    manager.activate_adapter(2)
    assert not manager.activate_adapter(1)  # used again
    assert manager.activate_adapter(3)
    assert layers.held == {0: "weights of 1", 1: "weights of 3"}
    assert list(manager.list_adapters()) == [2, 1, 3]


def test_a_pinned_adapter_stays_on_both_levels_until_it_is_unpinned() -> None:
    manager, layers = least_recent(slots=1, capacity=2)
    manager.add_adapter(model(1))
    manager.add_adapter(model(2))
    assert manager.pin_adapter(1)
    assert layers.held == {0: "weights of 1"}
    with pytest.raises(RequestError, match="all 1 slots are in use"):
        manager.activate_adapter(2)
    manager.add_adapter(model(3))
    assert set(manager.list_adapters()) == {1, 3}
    assert manager.unpin_adapter(1)
    assert not manager.unpin_adapter(1)
    assert manager.activate_adapter(3)
    with pytest.raises(ValueError, match="adapter 9 is not registered"):
        manager.pin_adapter(9)
    with pytest.raises(ValueError, match="adapter 9 is not registered"):
        manager.keep_adapter(9)


def test_with_all_adapters_pinned_or_in_use_nothing_is_let_in_and_nothing_goes() -> None:
    manager, layers = least_recent(slots=2, capacity=2, in_use=frozenset({2}))
    manager.add_adapter(model(1))
    manager.add_adapter(model(2))
    manager.activate_adapter(2)
    manager.pin_adapter(1)
    with pytest.raises(RequestError) as refused:
        manager.add_adapter(model(3))
    assert refused.value.code is ErrorCode.CAPACITY_EXCEEDED
    assert not manager.remove_oldest_adapter()
    assert layers.held == {0: "weights of 2", 1: "weights of 1"}


def test_the_oldest_adapter_is_removed_when_asked_and_nothing_is_removed_of_nothing() -> None:
    manager, _ = least_recent()
    assert not manager.remove_oldest_adapter()
    manager.add_adapter(model(1))
    manager.add_adapter(model(2))
    assert manager.remove_oldest_adapter()
    assert list(manager.list_adapters()) == [2]


def test_a_pin_goes_with_its_adapter() -> None:
    manager, _ = least_recent(slots=1, capacity=1)
    manager.add_adapter(model(1))
    manager.pin_adapter(1)
    assert manager.remove_adapter(1)
    manager.add_adapter(model(1))
    assert manager.add_adapter(model(2))


CALLS = st.lists(st.tuples(st.sampled_from(["add", "activate", "deactivate", "remove", "pin", "unpin", "touch"]), st.integers(1, 5)))


@settings(max_examples=60)
@given(CALLS, st.frozensets(st.integers(1, 5), max_size=2))
def test_whatever_is_called_slots_hold_what_is_active_and_none_in_use_or_pinned_goes(
    calls: list[tuple[str, int]], in_use: frozenset[int]
) -> None:
    manager, layers = least_recent(slots=2, capacity=3, in_use=in_use)
    kept: set[int] = set()
    for name, number in calls:
        before = set(manager.list_adapters())
        try:
            if name == "add":
                manager.add_adapter(model(number))
            elif name == "touch":
                manager.touch(number)
            else:
                done = getattr(manager, f"{name}_adapter")(number)
                kept = {"pin": kept | {number}, "unpin": kept - {number}, "remove": kept - {number}}.get(name, kept) if done else kept
        except (RequestError, ValueError):
            assert set(manager.list_adapters()) == before
        now = set(manager.list_adapters())
        assert not (before - now - {number}) & (in_use | kept)
        assert len(now) <= 3
        active = {slot: f"weights of {known}" for known in now if (slot := manager.slot_of(known)) is not None}
        assert layers.held == active
