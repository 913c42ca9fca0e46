# SPDX-License-Identifier: Apache-2.0
"""Mirrors of the weights in host memory that ranks make together: one for those that are alike, counted before it is made."""

from pathlib import Path
from typing import Any

import pytest

from diffusion_worker.memory.host_mirror import own_bytes, shared_bytes
from diffusion_worker.messages import SleepLevel
from diffusion_worker.runner.mirroring import Need, leaders_of, needed_bytes
from support.runner.mirror_scenarios import WEIGHT_BYTES, mirrors_of
from support.runner.rank_processes import run
from support.worker.real_ranks import call, fingerprints, pids_of, ranks, sleep, wake

MIB = 1 << 20


def need(key: str, *sizes: int) -> Need:
    return Need(list(sizes), key, 0)


@pytest.mark.parametrize(
    ("needs", "leaders", "needed"),
    [
        ([need("a", 5 * MIB)] * 2, [0, 0], 5 * MIB),
        ([need("a", 5 * MIB), need("b", 5 * MIB)], [0, 1], 2 * 8 * MIB),
        ([need("", 5 * MIB)] * 2, [0, 1], 2 * 8 * MIB),
        ([need("a", MIB), need("b", MIB), need("a", MIB), need("b", MIB)], [0, 1, 0, 1], 2 * MIB),
        ([need("a", MIB), need("a", 2 * MIB)], [0, 1], 2 * 4 * MIB),
        ([need("a", 1, 4097)] * 3, [0, 0, 0], 4096 + 2 * 4096),
        ([need(""), need("")], [0, 1], 0),
    ],
)
def test_ranks_with_equal_weights_need_one_mirror_together(needs: list[Need], leaders: list[int], needed: int) -> None:
    assert (leaders_of(needs), needed_bytes(needs)) == (leaders, needed)


@pytest.mark.slow
def test_two_ranks_share_one_mirror_where_they_can_and_have_their_own_or_none_where_they_cannot(tmp_path: Path) -> None:
    slab = WEIGHT_BYTES + 4096
    own, shared = (own_bytes([slab]), 0, ""), (0, slab, "")
    for rank, found in enumerate(run("support.runner.mirror_scenarios:mirrors", folder=str(make_folder(tmp_path)))):
        mappings = {name.removesuffix(" mappings"): found.pop(name) for name in list(found) if name.endswith(" mappings")}
        refusals = {name: found.pop(name) for name in ("no room", "no room for two")}
        assert found == {
            "alike": shared,
            "other weights": own,
            "in parts": own,
            "not registered": own,
            "room for one": shared,
            "ended in the middle": (0, 0, "CallFailed"),
        }, rank
        assert [name for name, count in mappings.items() if count] == ["alike", "room for one"]
        needs = {"no room": shared_bytes([slab]), "no room for two": 2 * own_bytes([slab])}
        for name, (in_memory, in_shared, problem) in refusals.items():
            assert (in_memory, in_shared) == (0, 0)
            assert problem.startswith("InsufficientMemory: a mirror of the weights in host memory needs")
            assert f"needs {needs[name]} bytes for 2 ranks together" in problem


def make_folder(tmp_path: Path) -> Path:
    (folder := tmp_path / "cgroup").mkdir()
    return folder


@pytest.mark.slow
async def test_rank_processes_map_one_mirror_and_hold_the_same_weights_after_a_sleep_and_a_wake() -> None:
    async with ranks(worker_extension="support.worker.extensions:Mirrored") as executor:
        before = await fingerprints(executor)
        assert mapped(executor) == [[], []]
        assert [report.mirror_memory_bytes for report in reports(executor)] == [0, 0]
        for _ in range(2):  # a repeated call does nothing
            await call(executor, "mirror_weights")
            [one], [other] = mapped(executor)
            assert one == other
            assert [report.mirror_memory_bytes for report in reports(executor)] == [0, 0]
            assert all(report.mirror_shared_bytes > report.weights_bytes for report in reports(executor))
        await sleep(executor)
        assert [report.weights_resident_bytes for report in reports(executor)] == [0, 0]
        await wake(executor)
        assert await fingerprints(executor) == before
        await sleep(executor, "deeper", SleepLevel.DISCARD)
        assert mapped(executor) == [[], []]
        await wake(executor, "again")
        assert await fingerprints(executor) == before


def mapped(executor: Any) -> list[list[str]]:
    """Return, for each rank, the inodes of the mirrors that it has mapped, as the kernel lists them."""
    return [mirrors_of(Path(f"/proc/{pid}/maps").read_text()) for pid in pids_of(executor)]


def reports(executor: Any) -> list[Any]:
    return [document.memory for document in executor.documents()]
