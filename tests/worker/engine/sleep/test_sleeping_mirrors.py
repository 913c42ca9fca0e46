# SPDX-License-Identifier: Apache-2.0
"""The time at which ranks mirror their weights in host memory: at the load if the policy sleeps, else in the first sleep."""

import logging
from pathlib import Path

import pytest

from diffusion_worker.engine.state.state_document import SleepPolicy
from diffusion_worker.errors import ErrorCode
from diffusion_worker.messages import ErrorReport, SleepLevel
from support.worker.fake_rank_group import FakeRankGroup
from support.worker.sleep_rig import KILLED, sleep_rig, write_desired

pytestmark = pytest.mark.looptime

NO_ROOM = ErrorReport(ErrorCode.INSUFFICIENT_MEMORY, "a mirror needs 5 bytes, found 4 free")


@pytest.mark.parametrize(
    ("policy", "level", "mirrors"),
    [("AlwaysAwake", "HostMemory", 0), ("OnIdle", "HostMemory", 1), ("OnIdle", "Discard", 0)],
)
async def test_a_load_makes_mirrors_only_where_the_policy_sleeps_at_host_memory(
    tmp_path: Path, policy: str, level: str, mirrors: int
) -> None:
    async with sleep_rig(desired_path=write_desired(tmp_path, policy, sleep={"level": level})) as rig:
        assert rig.ranks.counts["mirror_weights"] == mirrors
        assert (await rig.image()).images
        rig.ranks.lose(KILLED)
        await rig.until("restarting")
        await rig.until("ready")
        assert rig.ranks.counts["mirror_weights"] == 2 * mirrors


@pytest.mark.parametrize(("level", "mirrors"), [(SleepLevel.HOST_MEMORY, 1), (SleepLevel.DISCARD, 0)])
async def test_the_first_sleep_makes_the_mirrors_that_the_load_did_not(level: SleepLevel, mirrors: int) -> None:
    async with sleep_rig() as rig:
        assert rig.ranks.counts["mirror_weights"] == 0
        assert (await rig.sleep(level=level)).error is None
        assert (rig.ranks.counts["mirror_weights"], rig.engine.state) == (mirrors, "asleep")


async def test_a_policy_that_changes_later_has_its_mirrors_made_by_the_first_sleep(tmp_path: Path) -> None:
    async with sleep_rig(desired_path=write_desired(tmp_path, "AlwaysAwake")) as rig:
        write_desired(tmp_path, "OnIdle")
        assert (rig.document.policy, rig.ranks.counts["mirror_weights"]) == (SleepPolicy.ON_IDLE, 0)
        assert (await rig.sleep()).error is None
        assert rig.ranks.counts["mirror_weights"] == 1


async def test_a_model_without_room_for_mirrors_serves_and_its_sleep_is_refused_with_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    group = FakeRankGroup(2)
    group.method_errors["mirror_weights"] = NO_ROOM
    with caplog.at_level(logging.WARNING):
        async with sleep_rig(group=group, desired_path=write_desired(tmp_path, "OnIdle")) as rig:
            assert f"not mirrored in host memory before the first sleep: {NO_ROOM.message}" in caplog.text
            result = await rig.sleep()
            assert result.error is not None
            assert (result.error.code, result.error.message) == (NO_ROOM.code, NO_ROOM.message)
            assert (rig.engine.state, rig.document.generation, rig.asleep) == ("ready", 1, [[], []])
            assert (await rig.image()).images
            assert (await rig.sleep(level=SleepLevel.DISCARD)).error is None


async def test_ranks_that_cannot_mirror_for_another_reason_do_not_serve(tmp_path: Path) -> None:
    group = FakeRankGroup(2)
    group.method_errors["mirror_weights"] = ErrorReport(ErrorCode.RANK_FAILED, "a fault")
    with pytest.raises(Exception, match="the weights of the loaded ranks cannot be mirrored in host memory: a fault"):
        async with sleep_rig(group=group, desired_path=write_desired(tmp_path, "OnIdle")):
            raise AssertionError("it started")
