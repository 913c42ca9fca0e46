# SPDX-License-Identifier: Apache-2.0
"""Rank processes that start by either method: they serve, die, serve again, sleep and wake. A missing GPU is an error.

A spawned rank imports torch for itself, some seconds each, so there are few of them here.
"""

import asyncio
import concurrent.futures
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diffusion_worker.config import StartMethod
from diffusion_worker.errors import Fault, GroupFailed
from support.worker.process import DIGITS_MODEL, WorkerProcess, descendants, process_exists
from support.worker.real_ranks import image, pids_of, ranks, sleep, wake

pytestmark = pytest.mark.slow

METHODS = [StartMethod.FORKSERVER, StartMethod.SPAWN]
LONG = {"prompt": "a red digit seven", "seed": 3, "num_inference_steps": 50}
STARTED = re.compile(r"rank=(\d) rank starts start_method=(\w+) device=(\w+)$", re.MULTILINE)
# A user's script has no guard around its main part, so a child that imports it would start ranks of its own.
SCRIPT = """
import sys
from diffusion_worker import DiffusionEngine
print("once")
with DiffusionEngine(sys.argv[1], start_method="spawn") as engine:
    print(len(engine.generate("a red digit seven", seed=1, steps=2)), sorted({"torch", "diffusers", "numpy"} & set(sys.modules)))
"""


@pytest.mark.parametrize("method", METHODS)
async def test_ranks_serve_die_serve_again_sleep_and_wake_however_they_are_started(method: StartMethod) -> None:
    async with ranks(limit_s=300, start_method=method, worker_extension="support.worker.extensions:Polite") as executor:
        before = await image(executor)
        old = pids_of(executor)
        os.kill(old[1], signal.SIGKILL)
        loss = await executor.failed()
        assert loss.fault is Fault.DIED and f"rank 1 (pid {old[1]}) was ended by SIGKILL" in loss.reason
        await executor.restart()
        assert [pid for pid in old if process_exists(pid)] == []
        assert await image(executor) == before
        assert [ack.freed_bytes > 0 for ack in await sleep(executor)] == [True, True]
        await wake(executor)
        assert await image(executor) == before
        leaving = asyncio.create_task(executor.call("leave", timeout_s=30, code=3))
        loss = await executor.failed()
        assert loss.fault is Fault.DIED and "exited with code 3" in loss.reason
        with pytest.raises(GroupFailed):
            await leaving
        ended = pids_of(executor)
        await executor.stop()
        assert [pid for pid in ended if process_exists(pid)] == []


def test_a_worker_whose_ranks_are_spawned_imports_no_torch_and_makes_the_image_that_a_killed_rank_was_at() -> None:
    env = {"DIFFUSION_WORKER_START_METHOD": "spawn"}
    with WorkerProcess(env=env) as worker, concurrent.futures.ThreadPoolExecutor(1) as threads:
        worker.wait_ready()
        assert STARTED.findall(worker.output) == [("0", "spawn", "cpu")]
        mapped = Path(f"/proc/{worker.pid}/maps").read_text()
        assert [library for library in ("libtorch", "libcuda", "numpy") if library in mapped] == []
        alone = worker.image(**LONG)
        running = threads.submit(worker.image, **LONG)
        worker.wait_for(lambda: worker.state()["inFlight"] == 1, what="working")
        (rank,) = worker.rank_pids()
        os.kill(rank, signal.SIGKILL)
        assert running.result(120).tobytes() == alone.tobytes()
        assert worker.rank_pids() != [rank] and not process_exists(rank)
        pids = worker.rank_pids() + descendants(worker.pid)
        assert worker.terminate() == 0
        worker.wait_until(lambda: not any(process_exists(pid) for pid in pids), what="gone", timeout_s=60)
        assert "Traceback" not in worker.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "DeviceUnavailable: --device cuda: expected a GPU that torch can use, found none: "),
        (
            ("--start-method=forkserver",),
            "--start-method forkserver: this rank cannot use a GPU, because the process that it was forked from",
        ),
    ],
    ids=["no GPU", "forked"],
)
def test_a_worker_that_is_to_use_a_gpu_ends_with_the_reason_and_never_serves_on_the_cpu(options: tuple[str, ...], says: str) -> None:
    with WorkerProcess(options=options, env={"DIFFUSION_WORKER_DEVICE": "cuda"}) as worker:
        assert worker.wait_exit(600) == 1
        assert worker.termination_log.read_text().startswith(says)
        assert "Traceback" not in worker.output


def test_a_script_without_a_guard_may_spawn_its_ranks_and_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", str(DIGITS_MODEL)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["once", "1 []"]
