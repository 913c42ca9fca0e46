# SPDX-License-Identifier: Apache-2.0
"""Records of failed adapters: those from a call are bounded and kept for a while, those of declared adapters stay (fault 158)."""

import asyncio
import time

import pytest

from diffusion_worker.engine.adapters import failed_records
from diffusion_worker.engine.adapters.failed_records import MOST
from diffusion_worker.engine.adapters.table import AdapterTable
from diffusion_worker.engine.state.state_document import AdapterCall, AdapterState, Residency
from diffusion_worker.errors import RequestError
from diffusion_worker.sources.source import Source
from support.worker.server_edge import serving_edge

WANTED = "wanted"


def call(residency: Residency = Residency.CACHED) -> AdapterCall:
    return AdapterCall(operation_id="o", source=Source(path="/a"), residency=residency)


def table() -> AdapterTable:
    return AdapterTable(capacity=4, residents=4, keeps_failed=WANTED.__eq__)


def fail(table: AdapterTable, name: str) -> None:
    adapter = table.new(name, call())
    adapter.state = AdapterState.FAILED
    table.put(adapter)
    table.failed.add(adapter)


async def test_the_oldest_failures_go_and_those_that_somebody_wants_stay() -> None:
    there = table()
    for name in (WANTED, *(f"call-{number:03}" for number in range(3 * MOST))):
        fail(there, name)
    assert there.names() == [f"call-{number:03}" for number in range(2 * MOST, 3 * MOST)] + [WANTED]


async def test_a_failure_is_forgotten_after_a_while_unless_its_name_was_put_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failed_records, "KEPT_S", 0.05)
    there = table()
    for name in (WANTED, "gone", "again"):
        fail(there, name)
    there.put(there.new("again", call()))
    async with asyncio.timeout(10):
        while "gone" in there.names():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert there.names() == ["again", WANTED]


async def test_ten_thousand_residents_are_refused_within_a_second() -> None:
    there = table()
    for number in range(4):
        adapter = there.new(f"resident-{number}", call(Residency.RESIDENT))
        there.put(adapter)
    for number in range(9_900):
        there.put(there.new(f"other-{number}", call()))
    began = time.process_time()
    for number in range(9_900):
        with pytest.raises(RequestError, match="found 4 already: resident-0, resident-1, resident-2, resident-3"):
            there.require_place(f"new-{number}", call(Residency.RESIDENT))
    assert time.process_time() - began < 1
    there.take_out("resident-2")
    there.require_place("new", call(Residency.RESIDENT))


async def test_puts_that_fail_leave_a_bounded_number_of_records() -> None:
    async with serving_edge() as edge:
        for number in range(MOST + 6):
            answer = await edge.put_adapter(f"bad-{number:03}", f"/bad/{number}", digest="sha256:" + "0" * 64)
            assert answer.status_code == 409
        adapters = (await edge.state())["adapters"]
    assert [adapter["name"] for adapter in adapters] == [f"bad-{number:03}" for number in range(6, MOST + 6)]
