# SPDX-License-Identifier: Apache-2.0
"""A small sample of `make soak`, with fixed seeds: generated requests, wrong ones, aborted ones, and ranks that die meanwhile."""

from pathlib import Path

import pytest

from soak import run_both
from soak_traffic import BAD, pool, traffic


def test_traffic_is_the_same_from_the_same_seed_and_has_all_kinds() -> None:
    bodies = pool(1, 20, most_steps=5)
    one, again, other = (traffic(seed, 300, bodies, bad=0.1, aborted=0.1) for seed in (1, 1, 2))
    assert one == again != other
    assert {request.status for request in one} == {200, *(status for _, status in BAD)}
    assert any(request.gone_after_s is not None for request in one)


@pytest.mark.slow
async def test_generated_requests_leave_nothing_behind_and_killed_ranks_cost_no_picture(tmp_path: Path) -> None:
    soak, killed = await run_both(tmp_path, seed=1, requests=80, kill_requests=30, kill_every_s=4.0, limit_s=60, pictures=12)
    assert (soak.wrong, killed.wrong) == ([], [])
    assert soak.answered > 10 and soak.refused_as_they_should > 1
    assert killed.answered > 5 and killed.restarts > 0
