# SPDX-License-Identifier: Apache-2.0
"""The choice of adapters to evict from the ranks for others, and the identity of adapters. No ranks are needed."""

from typing import Any

import pytest

from diffusion_worker.engine.adapters.adapter import Adapter
from diffusion_worker.engine.adapters.table import AdapterTable
from diffusion_worker.engine.state.state_document import AdapterCall, AdapterState, Residency
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.messages import AdapterIdentity, LoadedLoRA
from diffusion_worker.sources.source import Source


def call(path: str = "/a", **fields: Any) -> AdapterCall:
    return AdapterCall(operation_id="o", source=Source(path=path), **fields)


def digest(path: str) -> str:
    return f"sha256:{path}"


def loaded(table: AdapterTable, name: str, path: str = "", **fields: Any) -> Adapter:
    """Put an adapter into the table as it is after its load; return it."""
    adapter = table.new(name, call(path or f"/{name}", **fields))
    adapter.lora_int_id, adapter.registered, adapter.state = table.next_id(), True, AdapterState.LOADED
    of = path or f"/{name}"
    adapter.loaded = LoadedLoRA(digest(of), 8, 24, 4096, ["transformer"], identity=AdapterIdentity(f"v1:{of}"))
    table.put(adapter)
    table.touch(adapter)
    return adapter


def table_of(*names: str, capacity: int = 3) -> tuple[AdapterTable, dict[str, Adapter]]:
    table = AdapterTable(capacity=capacity, residents=2)
    return table, {name: loaded(table, name) for name in names}


def newcomer(table: AdapterTable, name: str = "new", **fields: Any) -> Adapter:
    adapter = table.new(name, call(f"/{name}", **fields))
    table.put(adapter)
    return adapter


def going(table: AdapterTable, adapter: Adapter) -> list[str] | None:
    victims = table.room_for(adapter)
    return None if victims is None else [victim.name for victim in victims]


async def test_nobody_goes_while_there_is_room() -> None:
    table, _ = table_of("a", "b")
    assert going(table, newcomer(table)) == []


async def test_the_least_recently_used_of_the_lowest_priority_goes() -> None:
    table, adapters = table_of("a", "b", "c")
    assert going(table, newcomer(table)) == ["a"]
    table.touch(adapters["a"])
    assert going(table, newcomer(table)) == ["b"]
    adapters["c"].describe(call(priority=-1))
    assert going(table, newcomer(table)) == ["c"]
    adapters["b"].describe(call(priority=-2))
    assert going(table, newcomer(table)) == ["b"]


async def test_what_is_used_resident_or_leaving_stays_and_where_all_do_nobody_can_come() -> None:
    table, adapters = table_of("a", "b", "c")
    adapters["a"].hold("r")
    adapters["b"].describe(call(residency=Residency.RESIDENT))
    assert going(table, newcomer(table)) == ["c"]
    table.take_out("c")  # it stays on the ranks until it is unloaded
    assert going(table, newcomer(table)) is None
    adapters["a"].let_go("r")
    assert going(table, newcomer(table)) == ["a"]


async def test_a_version_beside_the_one_it_replaces_has_a_place_of_its_own() -> None:
    table, _ = table_of("a", "b", "c")
    version = table.new("a", call("/other"))
    table.arrive(version)
    assert going(table, version) == []
    assert table.newest("a") is version and table.get("a") is not version


async def test_a_version_has_no_place_of_its_own_where_the_old_bytes_stay_or_went_before() -> None:
    table, adapters = table_of("a", "b", "c")
    version = table.new("a", call("/other"))
    table.arrive(version)
    alias = loaded(table, "alias", "/a")
    assert going(table, version) == ["b"]
    table.take_out("alias")
    alias.registered = False
    assert going(table, version) == []
    adapters["a"].state, adapters["a"].registered = AdapterState.CACHED, False
    loaded(table, "d")
    assert going(table, version) == ["b"]


async def test_names_of_the_same_bytes_are_one_copy_and_go_together() -> None:
    table, adapters = table_of("a", "b", capacity=2)
    alias = loaded(table, "alias", "/a")
    assert table.registered == 2
    assert going(table, newcomer(table)) == ["b"]  # the alias was used after b
    table.touch(adapters["b"])
    assert going(table, newcomer(table)) == ["a", "alias"]
    alias.hold("r")
    assert going(table, newcomer(table)) == ["b"]


async def test_bytes_that_are_there_already_need_no_room() -> None:
    table, _ = table_of("a", "b", "c")
    assert going(table, newcomer(table, digest=digest("/b"))) == []


async def test_what_a_request_waits_for_goes_only_for_one_that_came_before_it() -> None:
    table, adapters = table_of("a", "b", capacity=2)
    adapters["a"].wanted.add(7)
    adapters["b"].wanted.add(5)
    new = newcomer(table)
    assert going(table, new) is None  # a put waits until the requests have taken their adapters
    new.wanted.add(6)
    assert going(table, new) == ["a"]
    adapters["a"].wanted.add(3)
    assert going(table, new) is None
    new.wanted.add(4)
    assert going(table, new) == ["b"]


async def test_more_resident_ones_than_slots_are_refused_with_the_holders() -> None:
    table, adapters = table_of("a", "b")
    for name in ("a", "b"):
        adapters[name].describe(call(residency=Residency.RESIDENT))
    table.require_place("c", call())
    table.require_place("b", call(residency=Residency.RESIDENT))
    with pytest.raises(RequestError, match=r"'c'.*at most 2 resident.*found 2 already: a, b") as error:
        table.require_place("c", call(residency=Residency.RESIDENT))
    assert error.value.code is ErrorCode.CAPACITY_EXCEEDED


@pytest.mark.parametrize(
    ("asked", "same"),
    [
        ({}, True),
        ({"scale": 0.5, "priority": 3, "residency": Residency.RESIDENT}, True),
        ({"path": "/other"}, False),
        ({"path": "/other", "digest": digest("/a")}, True),
        ({"digest": digest("/b")}, False),
        ({"components": ["text_encoder"]}, False),
        ({"expected_rank": 8, "format": "peft"}, True),
        ({"expected_rank": 4}, False),
        ({"format": "kohya"}, False),
    ],
)
async def test_content_is_decided_by_the_digest_or_else_by_the_source(asked: dict[str, Any], same: bool) -> None:
    _, adapters = table_of("a")
    assert adapters["a"].is_content(call(**{"path": "/a"} | asked)) is same


async def test_bytes_of_an_evicted_adapter_may_be_others_by_now_unless_they_are_pinned() -> None:
    _, adapters = table_of("a")
    adapters["a"].state = AdapterState.CACHED
    assert not adapters["a"].is_content(call("/a"))
    assert adapters["a"].is_content(call("/a", digest=digest("/a")))
