# SPDX-License-Identifier: Apache-2.0
"""A worker whose ranks are spawned, from its start over a lost rank and a sleep to its end, and one whose ranks cannot use a GPU.

A spawned rank imports torch for itself, some seconds each, so there are few of them here.
"""

import concurrent.futures
import os
import re
import signal
from pathlib import Path

import pytest
import torch

from support.worker.process import WorkerProcess, descendants, process_exists

pytestmark = pytest.mark.slow

LONG = {"prompt": "a red digit seven", "seed": 3, "num_inference_steps": 30, "size": "32x32"}
STARTED = re.compile(r"rank=(\d) rank starts start_method=(\w+) device=(\w+)$", re.MULTILINE)


def test_a_worker_whose_ranks_are_spawned_imports_no_torch_replays_an_image_sleeps_and_takes_its_standby_along() -> None:
    with (
        WorkerProcess(options=("--start-method=spawn", "--standby-ranks=1")) as worker,
        concurrent.futures.ThreadPoolExecutor(1) as threads,
    ):
        worker.wait_ready()
        assert STARTED.findall(worker.output) == [("0", "spawn", "cpu")]
        mapped = Path(f"/proc/{worker.pid}/maps").read_text()
        assert [library for library in ("libtorch", "libcuda", "numpy") if library in mapped] == []
        assert "standbyRanks" in worker.state()
        assert "diffusion_worker_standby_ranks" in worker.get("/metrics").text
        # The first adapter need not wait for the fork server.
        assert any("forkserver" in command_of(pid) for pid in descendants(worker.pid))
        alone = worker.image(**LONG)
        running = threads.submit(worker.image, **LONG)
        worker.wait_for(lambda: worker.state()["inFlight"] == 1, what="working")
        (rank,) = worker.rank_pids()
        os.kill(rank, signal.SIGKILL)
        assert running.result(120).tobytes() == alone.tobytes()
        assert worker.rank_pids() != [rank] and not process_exists(rank)
        worker.sleep()
        worker.wake()
        assert worker.image(**LONG).tobytes() == alone.tobytes()

        def spare() -> list[int]:
            """Return the pids of the worker's spawned descendants that are no ranks; multiprocessing's tracker does not count."""
            return [pid for pid in descendants(worker.pid) if "spawn_main" in command_of(pid) and pid not in worker.rank_pids()]

        worker.wait_for(spare, what="making a standby")
        pids = worker.rank_pids() + descendants(worker.pid)
        assert worker.terminate() == 0
        worker.wait_until(lambda: not any(map(process_exists, pids)), what="gone", timeout_s=60)
        assert "Traceback" not in worker.output


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_worker_that_is_to_use_a_gpu_ends_with_the_reason_and_never_serves_on_the_cpu() -> None:
    """Ask for a GPU in ranks from the fork server. What it says where there is none is tested with `start_check` itself."""
    with WorkerProcess(options=("--start-method=forkserver",), env={"DIFFUSION_WORKER_DEVICE": "cuda"}) as worker:
        assert worker.wait_exit(600) == 1
        says = "--start-method forkserver: this rank cannot use a GPU, because the process that it was forked from"
        assert worker.termination_log.read_text().startswith(says)
        assert "Traceback" not in worker.output
