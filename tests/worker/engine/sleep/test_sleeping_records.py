# SPDX-License-Identifier: Apache-2.0
"""A server that takes the place of one whose model slept: asleep at once, without device memory. The ranks are fake."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diffusion_worker.config import WorkerConfig
from diffusion_worker.engine.sleep.record import FILE_NAME, record_key
from diffusion_worker.messages import MemoryTag, SleepLevel
from support.worker.fake_rank_group import FakeRankGroup
from support.worker.sleep_rig import KILLED, sleep_rig, write_desired

pytestmark = pytest.mark.looptime

ADAPTER = {"name": "style", "source": {"path": "/loras/style"}}


def settings(folder: Path, policy: str = "OnIdle", **fields: Any) -> dict[str, Any]:
    """Write a desired file into the folder, and return the settings of a server that reads it and keeps its state there."""
    return {"desired_path": write_desired(folder, policy, **fields), "state_dir": str(folder / "state")}


async def slept_in(place: dict[str, Any], **operation: Any) -> None:
    """Run a server with these settings, put its model to sleep, and end the server while the model sleeps."""
    async with sleep_rig(**place) as rig:
        await rig.sleep(**operation)


@pytest.mark.parametrize("level", SleepLevel)
async def test_the_next_server_starts_asleep_and_its_first_wake_is_verified(tmp_path: Path, level: SleepLevel) -> None:
    place = settings(tmp_path, adapters=[ADAPTER])
    await slept_in(place, level=level)
    async with sleep_rig(**place) as rig:
        assert (rig.engine.state, rig.engine.loaded, rig.ranks.starts_asleep) == ("asleep", True, [True])
        assert (rig.asleep, rig.ranks.counts["warm_up"]) == ([list(MemoryTag)] * 2, 0)
        assert rig.adapters() == {"style": "Deferred"}
        assert (await rig.image(model="style")).images
        assert (rig.ranks.counts["warm_up"], rig.ranks.counts["fingerprint"], rig.document.generation) == (1, 1, 1)


async def test_a_model_that_changed_while_the_server_was_away_is_found_by_the_first_wake(tmp_path: Path) -> None:
    place = settings(tmp_path)
    await slept_in(place)
    group = FakeRankGroup(2)
    group.weights_checksum = "other weights"
    async with sleep_rig(group=group, **place) as rig:
        result = await rig.wake()
        assert result.error is not None and result.error.code == "VerificationFailed"
        assert (rig.engine.state, rig.document.generation) == ("ready", 2)


async def test_a_crash_while_it_sleeps_leaves_the_record_and_a_wake_removes_it(tmp_path: Path) -> None:
    place = settings(tmp_path)
    record = tmp_path / "state" / FILE_NAME
    async with sleep_rig(**place) as rig:
        assert not record.exists()
        await rig.sleep()
        assert record.exists() and [path.name for path in record.parent.iterdir()] == [FILE_NAME]
        rig.ranks.hanging.add("handle_wake_task")
        operation = rig.begin_wake(deadline_seconds=1.0)
        await asyncio.sleep(0.5)
        assert not record.exists()
        await rig.until("restarting")
        rig.ranks.hanging.clear()
        await rig.over(operation)
        await rig.sleep()
        assert record.exists()
        await rig.wake(tags=[MemoryTag.WEIGHTS])
        assert not record.exists()


async def test_new_ranks_of_a_sleeping_server_keep_its_record(tmp_path: Path) -> None:
    place = settings(tmp_path)
    async with sleep_rig(**place) as rig:
        await rig.sleep()
        rig.ranks.lose(KILLED)
        await rig.until("restarting")
        await rig.until("asleep")
    async with sleep_rig(**place) as rig:
        assert rig.ranks.starts_asleep == [True]


async def test_with_the_policy_always_awake_the_next_server_is_awake(tmp_path: Path) -> None:
    await slept_in(settings(tmp_path))
    async with sleep_rig(**settings(tmp_path, "AlwaysAwake")) as rig:
        assert (rig.engine.state, rig.ranks.starts_asleep) == ("ready", [False])
        assert not (tmp_path / "state" / FILE_NAME).exists()


@pytest.mark.parametrize("change", [{"max_batch_size": 3}, {"dtype": "bfloat16"}, {"model": "/models/letters"}])
async def test_a_record_of_other_options_is_void(tmp_path: Path, change: dict[str, Any]) -> None:
    place = settings(tmp_path)
    await slept_in(place)
    async with sleep_rig(**place, **change) as rig:
        assert (rig.engine.state, rig.ranks.starts_asleep) == ("ready", [False])


@pytest.mark.parametrize("content", [b"", b"{", b'{"key": 1}', b"\xff"])
async def test_a_record_that_cannot_be_read_is_void(tmp_path: Path, content: bytes) -> None:
    place = settings(tmp_path)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / FILE_NAME).write_bytes(content)
    async with sleep_rig(**place) as rig:
        assert rig.ranks.starts_asleep == [False]


async def test_a_place_that_cannot_be_written_keeps_no_model_from_sleeping(tmp_path: Path) -> None:
    place = settings(tmp_path)
    (tmp_path / "state").write_text("a file")
    async with sleep_rig(**place) as rig:
        assert (await rig.sleep()).error is None
        assert rig.engine.state == "asleep"


async def test_without_a_place_nothing_is_written_and_the_next_server_loads(tmp_path: Path) -> None:
    place = settings(tmp_path) | {"state_dir": None}
    await slept_in(place)
    assert not (tmp_path / "state").exists()
    async with sleep_rig(**place) as rig:
        assert rig.ranks.starts_asleep == [False]


async def test_the_record_has_a_fingerprint_of_each_rank(tmp_path: Path) -> None:
    await slept_in(settings(tmp_path))
    record = json.loads((tmp_path / "state" / FILE_NAME).read_bytes())
    assert (record["level"], [each["weights"] for each in record["fingerprints"]]) == ("HostMemory", ["weights", "weights"])


def test_a_fetched_model_is_known_by_its_source_and_revision_not_by_its_place() -> None:
    config = WorkerConfig(model="/tmp/one", model_source="hf://org/model", served_name="m")
    elsewhere = msgspec.structs.replace(config, model="/tmp/two")
    assert record_key(config, version="1", revision="abc") == record_key(elsewhere, version="1", revision="abc")
    assert record_key(config, version="1", revision="abc") != record_key(config, version="1", revision="def")
    assert record_key(config, version="1", revision="abc") != record_key(config, version="2", revision="abc")
