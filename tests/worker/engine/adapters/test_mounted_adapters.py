# SPDX-License-Identifier: Apache-2.0
"""Adapters from mounted shards: read as the main file names them, awaited where they are late, and read again at a wake."""

import asyncio
import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffusion_worker.engine.adapters import declared
from diffusion_worker.engine.adapters.desired_files import DesiredFiles
from diffusion_worker.engine.sleep.policy import read_desired
from diffusion_worker.engine.state.state_document import DesiredSleep, Residency, SleepCall, SleepPolicy, WakeCall
from diffusion_worker.sources.source import HuggingFaceSource, Source
from support.worker.fake_rank_group import FakeRankGroup
from support.worker.mounted_folder import MountedFolder, wanted
from support.worker.server_edge import DEADLINE_S, Edge, serving_edge

SHARD, OTHER = "adapters-0.json.gz", "adapters-1.json.gz"


@pytest.fixture
def folder(tmp_path: Path) -> MountedFolder:
    return MountedFolder(tmp_path)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses between looks at shards, and the time after which a missing shard counts as late."""
    monkeypatch.setattr(declared, "FILE_LOOK_S", 0.005)
    monkeypatch.setattr(declared, "FILE_LATER_LOOK_S", 0.005)
    monkeypatch.setattr(declared, "FILE_PATIENCE_S", 0.05)


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not check():  # noqa: ASYNC110
            await asyncio.sleep(0)


def states(edge: Edge) -> dict[str, str]:
    return {one.name: str(one.state) for one in edge.engine.state_document().adapters}


def read(folder: MountedFolder, files: DesiredFiles | None = None) -> tuple[list[str], dict[str, str]]:
    named, missing = (files or DesiredFiles(str(folder.main))).read(read_desired(str(folder.main)))
    return sorted(named), missing


def test_the_adapters_are_those_of_the_list_and_of_the_shards(folder: MountedFolder) -> None:
    folder.shard(SHARD, wanted("a"), wanted("b"))
    folder.shard(OTHER, wanted("c"))
    folder.write(wanted("a"), wanted("listed"))
    assert read(folder) == (["a", "b", "c", "listed"], {})


def test_a_shard_that_is_not_as_the_main_file_names_it_is_named_with_what_is_found(folder: MountedFolder) -> None:
    folder.shard(SHARD, wanted("a"))
    folder.shard(OTHER, wanted("b"), brought=False)
    folder.write()
    (folder.folder / SHARD).write_bytes(gzip.compress(b"{}"))
    named, missing = read(folder)
    assert named == []
    assert "expected the sha256" in missing[SHARD]
    assert "No such file" in missing[OTHER]


@pytest.mark.parametrize("content", [b"no gzip", gzip.compress(b'{"adapters": [{}]}', mtime=0), gzip.compress(b"{}", mtime=0)[:-9], b""])
def test_a_shard_that_cannot_be_read_keeps_the_others(folder: MountedFolder, content: bytes) -> None:
    folder.shard(OTHER, wanted("b"))
    folder._shards[SHARD] = content
    folder.bring(SHARD)
    folder.write()
    named, missing = read(folder)
    assert (named, list(missing)) == (["b"], [SHARD])


def test_a_shard_that_did_not_change_is_not_read_again(folder: MountedFolder) -> None:
    folder.shard(SHARD, wanted("a"))
    folder.write()
    files = DesiredFiles(str(folder.main))
    assert read(folder, files) == (["a"], {})
    (folder.folder / SHARD).unlink()
    assert read(folder, files) == (["a"], {})


def test_a_shard_is_looked_for_in_the_folder_of_the_main_file_alone(folder: MountedFolder) -> None:
    outside = folder.folder.parent / "outside.gz"
    folder._shards["../outside.gz"] = gzip.compress(b'{"adapters": []}')
    outside.write_bytes(folder._shards["../outside.gz"])
    folder.write()
    assert list(read(folder)[1]) == ["../outside.gz"]


async def test_at_start_resident_adapters_of_all_shards_come_first_then_those_of_higher_priority(folder: MountedFolder) -> None:
    folder.shard(SHARD, wanted("low"), wanted("high", priority=5), wanted("c"))
    folder.shard(OTHER, wanted("resident", residency=Residency.RESIDENT), wanted("higher", priority=9), wanted("b"))
    async with serving_edge(max_loras=1, max_cached_loras=4, desired_path=folder.write()) as edge:
        assert edge.fetcher.fetches == ["/resident", "/higher", "/high", "/b"]
        assert states(edge) == dict.fromkeys(("resident", "higher", "high", "b"), "Loaded") | dict.fromkeys(("c", "low"), "Cached")


@pytest.mark.usefixtures("quick")
async def test_a_start_waits_for_a_shard_that_the_kubelet_brings_late(folder: MountedFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared, "FILE_PATIENCE_S", DEADLINE_S)
    folder.shard(SHARD, wanted("a"))
    folder.shard(OTHER, wanted("late"), brought=False)
    edge = Edge(FakeRankGroup(), desired_path=folder.write())
    async with asyncio.timeout(DEADLINE_S):
        starting = asyncio.create_task(edge.engine.start())
        await until(lambda: states(edge).get("a") == "Loaded")
        assert not starting.done()
        folder.bring(OTHER)
        await starting
        assert (states(edge), edge.engine.state_document().desired.problem) == ({"a": "Loaded", "late": "Loaded"}, None)
        await edge.engine.terminate()


@pytest.mark.usefixtures("quick")
async def test_a_shard_that_does_not_come_is_told_and_keeps_nothing_from_serving_and_is_taken_when_it_comes(folder: MountedFolder) -> None:
    folder.shard(SHARD, wanted("a"))
    folder.shard(OTHER, wanted("late"), brought=False)
    async with serving_edge(desired_path=folder.write()) as edge:
        assert states(edge) == {"a": "Loaded"}
        await until(lambda: edge.engine.state_document().desired.problem is not None)
        problem = edge.engine.state_document().desired.problem
        assert problem is not None and problem.code == "DigestMismatch" and OTHER in problem.message
        folder.bring(OTHER)
        await until(lambda: states(edge) == {"a": "Loaded", "late": "Loaded"})
        await until(lambda: edge.engine.state_document().desired.problem is None)


async def test_a_start_ends_in_its_time_whatever_sources_do_and_what_is_late_is_loaded_beside_what_serves(folder: MountedFolder) -> None:
    stalling = [wanted(f"s{number}") for number in range(6)]
    remote = [type(one)(one.name, Source(hugging_face=HuggingFaceSource(f"org/{one.name}"))) for one in stalling]
    folder.shard(SHARD, *remote)
    edge = Edge(FakeRankGroup(), desired_path=folder.write(), startup_timeout_s=0.2)
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


async def test_a_wake_follows_the_shards(folder: MountedFolder) -> None:
    folder.shard(SHARD, wanted("same"), wanted("gone"))
    async with serving_edge(desired_path=folder.write(age_s=60)) as edge:
        await _sleep(edge)
        folder.shard(SHARD, wanted("same"))
        folder.shard(OTHER, wanted("added"))
        folder.write()
        await _wake(edge)
        assert states(edge) == {"same": "Loaded", "added": "Loaded"}


async def test_adapters_whose_home_moves_from_the_list_to_a_shard_are_not_touched(folder: MountedFolder) -> None:
    async with serving_edge(desired_path=folder.write(wanted("a"), wanted("b"), age_s=60)) as edge:
        await _sleep(edge)
        folder.shard(SHARD, wanted("b"), wanted("a"))
        folder.write()
        await _wake(edge)
        assert (states(edge), edge.fetcher.fetches) == ({"a": "Loaded", "b": "Loaded"}, ["/a", "/b"])


@pytest.mark.usefixtures("quick")
async def test_a_wake_does_not_wait_for_a_shard_and_removes_nothing_before_all_are_there(folder: MountedFolder) -> None:
    folder.shard(SHARD, wanted("kept"), wanted("gone"))
    async with serving_edge(desired_path=folder.write(age_s=60)) as edge:
        await _sleep(edge)
        folder.shard(SHARD, wanted("kept"), wanted("added"), brought=False)
        folder.write()
        await _wake(edge)
        assert states(edge) == {"kept": "Loaded", "gone": "Loaded"}
        folder.bring(SHARD)
        await until(lambda: states(edge) == {"kept": "Loaded", "added": "Loaded"})


async def test_what_a_call_said_meanwhile_is_newer_than_a_file_that_is_late(folder: MountedFolder) -> None:
    """Let a start run out of time while its adapters are fetched, and put one of them by a call.

    The adapters of the file are loaded afterwards, but the call's source stays.
    """
    remote = [wanted(f"s{number}") for number in range(5)]
    sources: dict[str, Any] = {one.name: Source(hugging_face=HuggingFaceSource(f"org/{one.name}")) for one in remote}
    folder.shard(SHARD, *(type(one)(one.name, sources[one.name]) for one in remote))
    edge = Edge(FakeRankGroup(), desired_path=folder.write(age_s=60), startup_timeout_s=0.2)
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
    folder.shard(SHARD, *late)
    edge = Edge(FakeRankGroup(), desired_path=folder.write(age_s=60), startup_timeout_s=0.2)
    edge.fetcher.arriving.clear()
    async with asyncio.timeout(DEADLINE_S):
        await edge.engine.start()
        await _sleep(edge)
        folder.shard(SHARD, *late[:4], wanted("s4"))  # s4 has another source, and s5 is gone
        folder.write()
        edge.engine.wake(WakeCall(operation_id="w"))
        await until(lambda: "s5" not in states(edge))
        edge.fetcher.arriving.set()
        await edge.engine.operation_over("w")
        await until(lambda: states(edge) == dict.fromkeys(("s0", "s1", "s2", "s3", "s4"), "Loaded"))
        (record,) = [one for one in edge.engine.state_document().adapters if one.name == "s4"]
        assert record.source == Source(path="/s4")
        assert "org/s5" not in edge.fetcher.fetches
        await edge.engine.terminate()


async def test_a_worker_that_starts_asleep_knows_the_adapters_of_its_shards(folder: MountedFolder) -> None:
    folder.shard(SHARD, wanted("a"), wanted("b"), wanted("c"))
    path = folder.write(sleep=DesiredSleep(policy=SleepPolicy.ASLEEP))
    settings: dict[str, Any] = {"desired_path": path, "state_dir": str(folder.folder), "max_loras": 1, "max_cached_loras": 2}
    async with serving_edge(**settings):
        pass
    async with serving_edge(**settings) as edge:
        assert states(edge) == {"a": "Deferred", "b": "Deferred", "c": "Cached"}
