# SPDX-License-Identifier: Apache-2.0
"""A small sample of `make soak`, with fixed seeds: generated requests, wrong ones, aborted ones, and ranks that die meanwhile."""

from pathlib import Path

import pytest

from leftovers import footprint, left_over
from soak import run_both
from soak_edge import EdgeSoak
from soak_traffic import BAD, pool, traffic
from worker_process import FAKE_PROGRAM, WorkerProcess


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


@pytest.mark.slow
async def test_schemathesis_finds_nothing_at_either_port_and_rude_clients_leave_nothing_behind(tmp_path: Path) -> None:
    with WorkerProcess(program=FAKE_PROGRAM, options=("--max-steps=12", "--max-pixels=16384")) as worker:
        worker.wait_ready()
        worker.images(prompt="p")
        before = footprint(worker)
        soak = EdgeSoak(worker, tmp_path, seed=1, examples=12, phases="fuzzing")
        await soak.run_round(rude=40)
        outcome = soak.outcome
        outcome.wrong += left_over(worker, before)
        assert "Traceback" not in worker.output
    assert outcome.wrong == []
    assert outcome.data_requests >= 40 and outcome.control_requests >= 10
