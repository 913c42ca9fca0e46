# SPDX-License-Identifier: Apache-2.0
"""Real workers that are killed, terminated or given wrong options: clear exit codes, reasons, and nothing left behind."""

import concurrent.futures
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from support.worker.process import DIGITS_MODEL, WorkerProcess, descendants, process_exists

pytestmark = pytest.mark.slow

LONG = {"prompt": "a red digit seven", "seed": 3, "num_inference_steps": 200}


def wait_until_gone(worker: WorkerProcess, pids: list[int]) -> None:
    worker.wait_until(lambda: not any(process_exists(pid) for pid in pids), what=f"gone: {pids}", timeout_s=60)


def request_of(worker: WorkerProcess, **body: Any) -> httpx2.Response | None:
    try:
        return worker.request_images(**body)
    except httpx2.TransportError:
        return None


def test_a_rank_killed_once_too_often_ends_the_worker_with_70_the_reason_and_an_error_for_who_waits() -> None:
    options = ("--max-restarts=0",)
    with WorkerProcess(ranks=2, options=options) as worker, concurrent.futures.ThreadPoolExecutor(1) as threads:
        worker.wait_ready()
        pids = worker.rank_pids()
        running = threads.submit(worker.request_images, **LONG)
        worker.wait_for(lambda: worker.state()["inFlight"] == 1, what="working")
        os.kill(pids[1], signal.SIGKILL)
        answer = running.result(30)
        assert (answer.status_code, answer.json()["error"]["code"], answer.json()["error"]["retryable"]) == (500, "EngineFailed", True)
        assert worker.wait_exit(600) == 70
        for text in (worker.output, worker.termination_log.read_text(), answer.json()["error"]["message"]):
            assert f"rank 1 (pid {pids[1]}) was ended by SIGKILL" in text
        wait_until_gone(worker, pids)


def test_a_killed_server_takes_its_ranks_and_folders_with_it_even_in_the_middle_of_an_image(short_path: Path) -> None:
    env = {"TMPDIR": str(short_path)}
    with WorkerProcess(ranks=2, env=env) as worker, concurrent.futures.ThreadPoolExecutor(1) as threads:
        worker.wait_ready()
        pids = worker.rank_pids() + descendants(worker.pid)
        running = threads.submit(request_of, worker, **LONG)
        worker.wait_for(lambda: worker.state()["inFlight"] == 1, what="working")
        worker.send_signal(signal.SIGKILL)
        assert worker.wait_exit() == -signal.SIGKILL
        wait_until_gone(worker, pids)
        assert running.result(60) is None
        # Files that torch keeps there for itself do not count.
        assert [path for path in short_path.iterdir() if path.name.startswith(("diffusion-worker", "pymp"))] == []


def test_a_terminated_worker_finishes_its_image_and_leaves_no_process() -> None:
    with WorkerProcess() as worker, concurrent.futures.ThreadPoolExecutor(1) as threads:
        worker.wait_ready()
        pids = worker.rank_pids()
        alone = worker.image(**{**LONG, "num_inference_steps": 50})
        running = threads.submit(worker.image, **{**LONG, "num_inference_steps": 50})
        worker.wait_for(lambda: worker.state()["inFlight"] == 1, what="working")
        assert worker.terminate() == 0
        assert running.result(60).tobytes() == alone.tobytes()
        wait_until_gone(worker, pids)
        assert "Traceback" not in worker.output


def test_a_worker_terminated_while_its_ranks_start_leaves_no_process() -> None:
    with WorkerProcess(ranks=2) as worker:
        worker.wait_for(lambda: any(rank["pid"] for rank in worker.state()["ranks"]), what="starting ranks")
        pids = [pid for pid in worker.rank_pids() if pid]
        assert worker.terminate() == 0
        wait_until_gone(worker, pids)


def broken_model(folder: Path, kind: str) -> Path:
    """Return the folder of a copy of the digits model with a fault of this kind, which only loading can find.

    Tests of `runner/loading` have the other faults.
    """
    model = folder / kind
    shutil.copytree(DIGITS_MODEL, model)
    weights = model / "transformer" / "diffusion_pytorch_model.safetensors"
    if kind == "cut-weights":
        weights.write_bytes(weights.read_bytes()[:10_000])
    else:
        index = model / "model_index.json"
        index.write_text(index.read_text().replace("StableDiffusion3Pipeline", "NoSuchPipeline"))
    return model


# Each reason names the model's path and this.
BROKEN = {"cut-weights": "transformer", "unknown-class": "NoSuchPipeline"}


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[str, WorkerProcess]]]:
    """Start a worker for each kind of model that cannot be loaded, all at once, because each must import torch to find out.

    Provides, by kind, the model's folder and the worker.
    """
    folder = tmp_path_factory.mktemp("broken-models")
    with ExitStack() as stack:
        started = {}
        for kind in BROKEN:
            model = broken_model(folder, kind)
            worker = WorkerProcess(model, served_name="digits")
            stack.callback(worker.close)
            worker.launch()
            started[kind] = (str(model), worker)
        yield started


@pytest.mark.parametrize(("kind", "says"), BROKEN.items())
def test_a_model_that_cannot_be_loaded_is_a_configuration_error_with_a_reason(
    endings: dict[str, tuple[str, WorkerProcess]], kind: str, says: str
) -> None:
    model, worker = endings[kind]
    assert worker.wait_exit(600) == 1
    reason = worker.termination_log.read_text()
    assert model in reason and says in reason, reason


def test_a_start_over_its_time_limit_ends_with_70_and_says_so() -> None:
    with WorkerProcess(options=("--startup-timeout-seconds=0.5",)) as worker:
        assert worker.wait_exit(600) == 70
        assert "did not load the model within 0.5 s" in worker.termination_log.read_text()
