# SPDX-License-Identifier: Apache-2.0
"""Records of failed adapters: those from a call are bounded and kept for a while, those of declared adapters stay."""

import asyncio
import time

import pytest

from diffusion_worker.engine.adapters import machine, runner
from diffusion_worker.engine.adapters.machine import MOST_FAILED
from diffusion_worker.engine.adapters.table import AdapterTable
from diffusion_worker.engine.state.state_document import AdapterCall, Residency
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.sources.source import Source
from support.worker.server_edge import Edge, serving_edge

WANTED = "wanted"


def put(table: AdapterTable, name: str, residency: Residency = Residency.CACHED) -> None:
    call = AdapterCall(operation_id="o", source=Source(path="/a"), residency=residency)
    machine.put(table, name, call, deadline_s=1.0)


def table() -> AdapterTable:
    return AdapterTable(capacity=4, residents=4, keep_failed=[WANTED])


def fail(table: AdapterTable, name: str) -> None:
    put(table, name)
    machine.load_failed(table, table.named[name], RequestError(ErrorCode.INVALID_ADAPTER, "no such file"))


async def test_the_oldest_failures_go_and_those_that_somebody_wants_stay() -> None:
    there = table()
    for name in (WANTED, *(f"call-{number:03}" for number in range(3 * MOST_FAILED))):
        fail(there, name)
    assert there.names() == [f"call-{number:03}" for number in range(2 * MOST_FAILED, 3 * MOST_FAILED)] + [WANTED]


async def test_a_failure_is_forgotten_after_a_while_unless_its_name_was_put_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "FAILED_S", 0.05)
    async with serving_edge(preload_loras={WANTED: f"/{WANTED}"}) as edge:
        for name in (WANTED, "gone", "again"):
            answer = await edge.put_adapter(name, f"/bad/{name}", digest="sha256:" + "0" * 64)
            assert answer.status_code == 409
        assert (await edge.put_adapter("again", "/good")).status_code == 200
        async with asyncio.timeout(30):
            while "gone" in await names(edge):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await names(edge) == ["again", WANTED]


async def names(edge: Edge) -> list[str]:
    return sorted(adapter["name"] for adapter in (await edge.state())["adapters"])


RESIDENT = AdapterCall(operation_id="o", source=Source(path="/a"), residency=Residency.RESIDENT)


def refused_residents(count: int) -> tuple[AdapterTable, float]:
    """Refuse `count` residents by a table of 4 residents and `count` others; return it and the CPU seconds of the refusals."""
    there = table()
    for number in range(4):
        put(there, f"resident-{number}", Residency.RESIDENT)
    for number in range(count):
        put(there, f"other-{number}")
    began = time.process_time()
    for number in range(count):
        with pytest.raises(RequestError, match="found 4 already: resident-0, resident-1, resident-2, resident-3"):
            there.require_place(f"new-{number}", RESIDENT)
    return there, time.process_time() - began


async def test_ten_times_as_many_residents_take_about_ten_times_as_long_to_refuse() -> None:
    few_s = min(refused_residents(1_000)[1] for _ in range(3))
    there, many_s = refused_residents(10_000)
    # A search of the table for each of them would take a hundred times as long.
    assert many_s < 40 * few_s
    machine.removed(there, "resident-2", 1.0)
    there.require_place("new", RESIDENT)


async def test_puts_that_fail_leave_a_bounded_number_of_records() -> None:
    async with serving_edge() as edge:
        for number in range(MOST_FAILED + 6):
            answer = await edge.put_adapter(f"bad-{number:03}", f"/bad/{number}", digest="sha256:" + "0" * 64)
            assert answer.status_code == 409
        adapters = (await edge.state())["adapters"]
    assert [adapter["name"] for adapter in adapters] == [f"bad-{number:03}" for number in range(6, MOST_FAILED + 6)]
