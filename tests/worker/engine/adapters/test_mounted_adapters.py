# SPDX-License-Identifier: Apache-2.0
"""Adapters of the mounted file: read at the start, and again at a wake."""

import asyncio
import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffusion_worker.engine.state.state_document import Residency, SleepCall, WakeCall
from diffusion_worker.sources.source import HuggingFaceSource, Source
from support.worker.fake_rank_group import FakeRankGroup
from support.worker.mounted_folder import MountedFolder, wanted
from support.worker.server_edge import DEADLINE_S, Edge, serving_edge


@pytest.fixture
def folder(tmp_path: Path) -> MountedFolder:
    return MountedFolder(tmp_path)


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not check():  # noqa: ASYNC110
            await asyncio.sleep(0)


def states(edge: Edge) -> dict[str, str]:
    return {one.name: str(one.state) for one in edge.engine.state_document().adapters}


@pytest.mark.parametrize(
    "content", [b"no gzip", gzip.compress(b'{"adapters": [{}]}', mtime=0), gzip.compress(b"{}", mtime=0)[:-9], b"", None]
)
async def test_a_file_that_cannot_be_read_or_went_changes_nothing(folder: MountedFolder, content: bytes | None) -> None:
    async with serving_edge(desired_path=folder.write(wanted("a"), age_s=60)) as edge:
        await _sleep(edge)
        folder.write()
        folder.adapters.unlink()
        if content is not None:
            folder.adapters.write_bytes(content)
        await _wake(edge)
        assert states(edge) == {"a": "Loaded"}


async def test_a_worker_starts_without_adapters_where_their_file_cannot_be_read(
    folder: MountedFolder, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder.write()
    folder.adapters.write_bytes(b"no gzip")
    async with serving_edge(desired_path=path) as edge:
        assert states(edge) == {}
    assert "adapters.json.gz: expected a compressed list of adapters" in caplog.text


async def test_at_start_resident_adapters_come_first_then_those_of_higher_priority(folder: MountedFolder) -> None:
    some = [wanted("low"), wanted("high", priority=5), wanted("c"), wanted("resident", residency=Residency.RESIDENT)]
    path = folder.write(*some, wanted("higher", priority=9), wanted("b"))
    async with serving_edge(max_loras=1, max_cached_loras=4, desired_path=path) as edge:
        assert edge.fetcher.fetches == ["/resident", "/higher", "/high", "/b"]
        assert states(edge) == dict.fromkeys(("resident", "higher", "high", "b"), "Loaded") | dict.fromkeys(("c", "low"), "Cached")


async def test_a_start_ends_in_its_time_whatever_sources_do_and_what_is_late_is_loaded_beside_what_serves(folder: MountedFolder) -> None:
    stalling = [wanted(f"s{number}") for number in range(6)]
    remote = [type(one)(one.name, Source(hugging_face=HuggingFaceSource(f"org/{one.name}"))) for one in stalling]
    edge = Edge(FakeRankGroup(), desired_path=folder.write(*remote), startup_timeout_s=0.2)
    edge.fetcher.arriving.clear()
    async with asyncio.timeout(DEADLINE_S):
        await edge.engine.start()
        assert edge.engine.state_document().state == "ready"
        assert sorted(states(edge).values()) == ["Cached"] * 2 + ["Fetching"] * 4
        edge.fetcher.arriving.set()
        await until(lambda: set(states(edge).values()) == {"Loaded"})
        await edge.engine.terminate()


async def _sleep(edge: Edge) -> None:
    edge.engine.sleep(SleepCall(operation_id="s"))
    await edge.engine.operation_over("s")


async def _wake(edge: Edge, operation_id: str = "w") -> None:
    edge.engine.wake(WakeCall(operation_id=operation_id))
    await edge.engine.operation_over(operation_id)


async def test_what_a_call_said_meanwhile_is_newer_than_a_file_that_is_late(folder: MountedFolder) -> None:
    """Let a start run out of time while its adapters are fetched, and put one of them by a call.

    The adapters of the file are loaded afterwards, but the call's source stays.
    """
    remote = [wanted(f"s{number}") for number in range(5)]
    sources: dict[str, Any] = {one.name: Source(hugging_face=HuggingFaceSource(f"org/{one.name}")) for one in remote}
    path = folder.write(*(type(one)(one.name, sources[one.name]) for one in remote), age_s=60)
    edge = Edge(FakeRankGroup(), desired_path=path, startup_timeout_s=0.2)
    edge.fetcher.arriving.clear()
    async with asyncio.timeout(DEADLINE_S):
        await edge.engine.start()
        assert (await edge.put_adapter("s4", "/by-call")).status_code == 200
        edge.fetcher.arriving.set()
        await until(lambda: set(states(edge).values()) == {"Loaded"})
        (record,) = [one for one in edge.engine.state_document().adapters if one.name == "s4"]
        assert record.source == Source(path="/by-call")
        await edge.engine.terminate()


async def test_files_that_came_later_count_where_a_start_still_has_adapters_to_load(folder: MountedFolder) -> None:
    remote = [wanted(f"s{number}") for number in range(6)]
    late = [type(one)(one.name, Source(hugging_face=HuggingFaceSource(f"org/{one.name}"))) for one in remote]
    edge = Edge(FakeRankGroup(), desired_path=folder.write(*late, age_s=60), startup_timeout_s=0.2)
    edge.fetcher.arriving.clear()
    async with asyncio.timeout(DEADLINE_S):
        await edge.engine.start()
        await _sleep(edge)
        folder.write(*late[:4], wanted("s4"))  # s4 has another source, and s5 is gone
        edge.engine.wake(WakeCall(operation_id="w"))
        await until(lambda: "s5" not in states(edge))
        edge.fetcher.arriving.set()
        await edge.engine.operation_over("w")
        await until(lambda: states(edge) == dict.fromkeys(("s0", "s1", "s2", "s3", "s4"), "Loaded"))
        (record,) = [one for one in edge.engine.state_document().adapters if one.name == "s4"]
        assert record.source == Source(path="/s4")
        assert "org/s5" not in edge.fetcher.fetches
        await edge.engine.terminate()
