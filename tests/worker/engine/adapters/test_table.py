# SPDX-License-Identifier: Apache-2.0
"""The choice of adapters to evict from the ranks for others, and the identity of adapters. No ranks are needed."""

from typing import Any

import pytest

from diffusion_worker.engine.adapters import machine
from diffusion_worker.engine.adapters.table import Adapter, AdapterTable
from diffusion_worker.engine.state.state_document import AdapterCall, AdapterState, Residency
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.messages import AdapterIdentity, LoadedLoRA
from diffusion_worker.sources.fetching import Fetched
from diffusion_worker.sources.source import Source


def call(path: str = "/a", **fields: Any) -> AdapterCall:
    return AdapterCall(operation_id="o", source=Source(path=path), **fields)


def digest(path: str) -> str:
    return f"sha256:{path}"


def put(table: AdapterTable, name: str, path: str = "", **fields: Any) -> Adapter:
    """Put an adapter, whose load is about to begin; return it."""
    machine.put(table, name, call(path or f"/{name}", **fields), deadline_s=60.0)
    adapter = table.newest(name)
    assert adapter is not None
    return adapter


def loaded(table: AdapterTable, name: str, path: str = "", **fields: Any) -> Adapter:
    """Put an adapter, and load it on the ranks; return it."""
    adapter, of = put(table, name, path, **fields), path or f"/{name}"
    machine.file_came(table, adapter, Fetched(of), 0.0)
    assert machine.prepared(table, adapter)
    found = LoadedLoRA(digest(of), 8, 24, 4096, ["transformer"], identity=AdapterIdentity(f"v1:{of}"))
    machine.loaded(table, adapter, found, [], 0.0)
    return adapter


def table_of(*names: str, capacity: int = 3) -> tuple[AdapterTable, dict[str, Adapter]]:
    table = AdapterTable(capacity=capacity, residents=2)
    return table, {name: loaded(table, name) for name in names}


def going(table: AdapterTable, adapter: Adapter) -> list[str] | None:
    victims = machine.room_for(table, adapter)
    return None if victims is None else [victim.name for victim in victims]


async def test_nobody_goes_while_there_is_room() -> None:
    table, _ = table_of("a", "b")
    assert going(table, put(table, "new")) == []


async def test_the_least_recently_used_of_the_lowest_priority_goes() -> None:
    table, adapters = table_of("a", "b", "c")
    assert going(table, put(table, "new")) == ["a"]
    table.use(adapters["a"])
    assert going(table, put(table, "new")) == ["b"]
    put(table, "c", priority=-1)
    assert going(table, put(table, "new")) == ["c"]
    put(table, "b", priority=-2)
    assert going(table, put(table, "new")) == ["b"]


async def test_what_is_used_resident_or_leaving_stays_and_where_all_do_nobody_can_come() -> None:
    table, adapters = table_of("a", "b", "c")
    machine.taken(table, [adapters["a"]], "r", 1.0)
    put(table, "b", residency=Residency.RESIDENT)
    assert going(table, put(table, "new")) == ["c"]
    machine.removed(table, "c", 1.0)  # it stays on the ranks until it is unloaded
    assert going(table, put(table, "new")) is None
    machine.given_back(table, [adapters["a"]], "r")
    assert going(table, put(table, "new")) == ["a"]


async def test_a_version_beside_the_one_it_replaces_has_a_place_of_its_own() -> None:
    table, _ = table_of("a", "b", "c")
    version = put(table, "a", "/other")
    assert going(table, version) == []
    assert table.newest("a") is version and table.get("a") is not version


async def test_a_version_has_no_place_of_its_own_where_the_old_bytes_stay_or_went_before() -> None:
    table, adapters = table_of("a", "b", "c")
    version = put(table, "a", "/other")
    alias = loaded(table, "alias", "/a")
    assert going(table, version) == ["b"]
    machine.removed(table, "alias", 1.0)
    machine.unloaded(table, alias)
    assert going(table, version) == []
    adapters["a"].state, adapters["a"].registered = AdapterState.CACHED, False
    loaded(table, "d")
    assert going(table, version) == ["b"]


async def test_names_of_the_same_bytes_are_one_copy_and_go_together() -> None:
    table, adapters = table_of("a", "b", capacity=2)
    alias = loaded(table, "alias", "/a")
    assert len(table.copies()) == 2
    assert going(table, put(table, "new")) == ["b"]  # the alias was used after b
    table.use(adapters["b"])
    assert going(table, put(table, "new")) == ["a", "alias"]
    machine.taken(table, [alias], "r", 1.0)
    assert going(table, put(table, "new")) == ["b"]


async def test_bytes_that_are_there_already_need_no_room() -> None:
    table, _ = table_of("a", "b", "c")
    assert going(table, put(table, "new", digest=digest("/b"))) == []


async def test_what_a_request_waits_for_goes_only_for_one_that_came_before_it() -> None:
    table, adapters = table_of("a", "b", capacity=2)
    machine.awaited(table, [adapters["a"]], 7)
    machine.awaited(table, [adapters["b"]], 5)
    new = put(table, "new")
    assert going(table, new) is None  # a put waits until the requests have taken their adapters
    machine.awaited(table, [new], 6)
    assert going(table, new) == ["a"]
    machine.awaited(table, [adapters["a"]], 3)
    assert going(table, new) is None
    machine.awaited(table, [new], 4)
    assert going(table, new) == ["b"]


async def test_more_resident_ones_than_slots_are_refused_with_the_holders() -> None:
    table, _ = table_of("a", "b")
    for name in ("a", "b"):
        put(table, name, residency=Residency.RESIDENT)
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
