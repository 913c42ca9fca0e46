# SPDX-License-Identifier: Apache-2.0
"""A real worker whose ranks are killed and stopped at every moment: the same server goes on, with the same images and no loss."""

import concurrent.futures
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from support.worker.process import DIGITS, WorkerProcess, process_exists

pytestmark = pytest.mark.slow

SHORT = {"prompt": "a red digit seven", "seed": 3, "num_inference_steps": 4}
LONG = {"prompt": "a red digit seven", "seed": 3, "num_inference_steps": 60}
STRIPES = DIGITS / "loras" / "stripes"


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    """Start a worker with two ranks and the stripes adapter. It permits 100 restarts, so that each test may kill ranks."""
    with WorkerProcess(ranks=2, loras={"stripes": STRIPES}, options=("--max-restarts=100",)) as worker:
        worker.wait_ready()
        yield worker


def lose(worker: WorkerProcess, rank: int, number: signal.Signals = signal.SIGKILL) -> dict[str, Any]:
    """Signal a rank, and check that the same server soon has the next generation and no process of the last; return the new state."""
    before = worker.state()
    pids = worker.rank_pids()
    os.kill(pids[rank], number)
    worker.wait_for(lambda: worker.state()["restarts"] > before["restarts"], what="noticing", timeout_s=60)
    worker.wait_for(lambda: worker.state()["state"] != "restarting", what="restarted", timeout_s=60)
    after = worker.state()
    assert (after["bootId"], after["generation"]) == (before["bootId"], before["generation"] + 1)
    assert f"rank {rank} (pid {pids[rank]})" in after["lastLoss"]["message"]
    assert [pid for pid in pids if process_exists(pid)] == []
    assert worker.get("/readyz").status_code == 200
    return after


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_rank_lost_while_idle_is_replaced_before_the_next_request(worker: WorkerProcess, rank: int, number: signal.Signals) -> None:
    before = [worker.image(**SHORT, model=model).tobytes() for model in ("digits", "stripes")]
    state = lose(worker, rank, number)
    assert (state["state"], state["adapters"][0]["state"]) == ("ready", "Loaded")
    assert [worker.image(**SHORT, model=model).tobytes() for model in ("digits", "stripes")] == before


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_rank_lost_in_the_middle_of_images_costs_time_and_no_image(worker: WorkerProcess, rank: int, number: signal.Signals) -> None:
    alone = [worker.image(**{**LONG, "seed": seed}).tobytes() for seed in range(2)]
    replayed = worker.get("/metrics").text
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        running = [threads.submit(worker.image, **{**LONG, "seed": seed}) for seed in range(2)]
        # The scheduler decides to run them together or one after the other.
        worker.wait_for(lambda: worker.state()["inFlight"] > 0, what="working")
        lose(worker, rank, number)
        # A shared call rounds a sum in another order.
        for seed, found in enumerate(running):
            assert all(abs(a - b) <= 1 for a, b in zip(found.result(60).tobytes(), alone[seed], strict=True))
    # At least one request was under way when its rank was lost.
    assert count(worker.get("/metrics").text, "images_replayed_total") > count(replayed, "images_replayed_total")


def test_a_rank_lost_while_an_adapter_loads_fails_that_load_only(worker: WorkerProcess) -> None:
    def put() -> int:
        return worker.put_adapter("frame", DIGITS / "loras" / "frame").status_code

    outcomes = set()
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        loading = threads.submit(put)
        lose(worker, 1)
        outcomes.add(loading.result(60))
    # The put was over before the kill, was under way, or met the restart.
    assert outcomes <= {200, 500, 503}
    assert put() == 200
    assert worker.image(**SHORT, model="frame").tobytes() != worker.image(**SHORT).tobytes()
    assert worker.delete_adapter("frame").status_code == 200


def test_a_rank_lost_asleep_leaves_the_model_asleep_and_it_wakes(worker: WorkerProcess) -> None:
    before = worker.image(**SHORT, model="stripes").tobytes()
    worker.sleep()
    state = lose(worker, 0)
    assert state["state"] == "asleep"
    assert [rank["memory"]["weightsResidentBytes"] for rank in state["ranks"]] == [0, 0]
    worker.wake()
    assert worker.image(**SHORT, model="stripes").tobytes() == before


def test_requests_that_come_during_a_restart_are_answered_after_it(worker: WorkerProcess) -> None:
    before = worker.image(**SHORT).tobytes()
    os.kill(worker.rank_pids()[1], signal.SIGKILL)
    worker.wait_for(lambda: worker.state()["state"] == "restarting", what="restarting")
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda _: worker.image(**SHORT).tobytes(), range(2)))
    assert len(found) == 2
    assert all(abs(a - b) <= 1 for image in found for a, b in zip(image, before, strict=True))


def test_a_worker_ends_with_0_after_all_of_that_and_leaves_no_process(worker: WorkerProcess) -> None:
    pids = worker.rank_pids()
    assert worker.terminate() == 0
    assert [pid for pid in pids if process_exists(pid)] == []


def count(metrics: str, name: str) -> float:
    return next(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(f"diffusion_worker_{name}"))
