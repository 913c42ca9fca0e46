# SPDX-License-Identifier: Apache-2.0
"""The parallel kinds through real servers with the digits model: images, adapters, sleep, refusals, and the end of a group or server."""

import concurrent.futures
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from support.runner.rig import levels_apart
from support.worker.process import DIGITS, WorkerProcess, descendants, process_exists

# A start of a real worker imports torch for ten seconds.
pytestmark = pytest.mark.slow

STRIPES = {"stripes": DIGITS / "loras" / "stripes"}
LONG = {"prompt": "a red digit seven", "seed": 3, "num_inference_steps": 200}
REQUEST = {"prompt": "a red digit seven", "seed": 1, "num_inference_steps": 6, "guidance_scale": 3.0}


class Sharded(WorkerProcess):
    """A worker whose temporary files are in `files`. A socket's path has at most 107 characters, so that folder's is short."""

    def __init__(self, files: Path) -> None:
        super().__init__(ranks=2, loras=STRIPES, options=("--shard=2",), env={"TMPDIR": str(files)})
        self.files = files


@pytest.fixture(scope="module")
def split_worker() -> Iterator[WorkerProcess]:
    """Start a worker whose two ranks share the tokens of an image."""
    with WorkerProcess(ranks=2, loras=STRIPES, options=("--sequence=2", "--vae-tiling", "--max-restarts=0")) as worker:
        worker.wait_ready()
        yield worker


@pytest.fixture(scope="module")
def sharded_worker() -> Iterator[Sharded]:
    """Provide a worker under --shard=2 with the stripes adapter. Every sharded tensor is split between its ranks."""
    with tempfile.TemporaryDirectory(prefix="worker-") as files, Sharded(Path(files)) as worker:
        worker.wait_ready()
        yield worker


@pytest.mark.parametrize("model", ["digits", "stripes"])
def test_two_ranks_that_share_tokens_make_the_image_of_one(worker: WorkerProcess, split_worker: WorkerProcess, model: str) -> None:
    asked = REQUEST | {"model": model}
    assert levels_apart(worker.image(**asked), split_worker.image(**asked)) <= 1


def test_an_image_of_many_tiles_comes_out_whole_after_a_sleep(split_worker: WorkerProcess) -> None:
    asked = REQUEST | {"size": "128x96"}
    before = split_worker.image(**asked)
    assert before.size == (128, 96)
    split_worker.sleep()
    split_worker.wake()
    assert split_worker.image(**asked).tobytes() == before.tobytes()


def test_a_size_that_the_model_cannot_make_is_refused_with_its_bound_before_a_rank_sees_it(split_worker: WorkerProcess) -> None:
    ranks, before = split_worker.rank_pids(), split_worker.image(**REQUEST)
    # The model has positions for 32 x 32 tokens of 8 pixels.
    answer = split_worker.request_images(**REQUEST, size="512x512")
    assert answer.status_code == 400
    assert "size: expected at most 256x256, the largest for which the model has positions, found 512x512" in answer.text
    assert split_worker.image(**REQUEST).tobytes() == before.tobytes()
    assert split_worker.rank_pids() == ranks


def test_a_size_whose_tokens_cannot_be_shared_is_refused_by_name(split_worker: WorkerProcess) -> None:
    # A token is 8 pixels wide and high: 5 x 5 tokens.
    answer = split_worker.request_images(**REQUEST, size="40x40")
    assert answer.status_code == 400
    assert "size: expected a size whose number of tokens, of 8x8 pixels each, is a multiple of 2 (--sequence), found 40x40" in answer.text


@pytest.mark.parametrize("model", ["digits", "stripes"])
def test_two_ranks_that_share_the_memory_make_the_image_of_one(worker: WorkerProcess, sharded_worker: WorkerProcess, model: str) -> None:
    asked = REQUEST | {"model": model}
    assert levels_apart(worker.image(**asked), sharded_worker.image(**asked)) <= 1
    weights = [rank["memory"]["weightsBytes"] for rank in sharded_worker.state()["ranks"]]
    whole = worker.state()["ranks"][0]["memory"]["weightsBytes"]
    assert all(part < 0.7 * whole for part in weights)


def test_sleep_with_sharded_weights_is_refused_at_once(sharded_worker: WorkerProcess) -> None:
    answer = sharded_worker.control("POST", "/v1/sleep", json={"operationId": "one", "bootId": sharded_worker.boot_id})
    assert answer.status_code == 400
    assert "sleep: not supported with --shard 2" in answer.text
    assert sharded_worker.state()["state"] == "ready"


def test_a_killed_server_takes_its_ranks_and_folders_with_it_even_in_the_middle_of_an_image(sharded_worker: Sharded) -> None:
    pids = sharded_worker.rank_pids() + descendants(sharded_worker.pid)

    def no_answer() -> bool:
        with pytest.raises(httpx2.TransportError):
            sharded_worker.request_images(**LONG)
        return True

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        running = threads.submit(no_answer)
        sharded_worker.wait_for(lambda: sharded_worker.state()["inFlight"] == 1, what="working")
        sharded_worker.send_signal(signal.SIGKILL)
        assert sharded_worker.wait_exit() == -signal.SIGKILL
        wait_until_gone(sharded_worker, pids)
        assert running.result(60)
    # Files that torch keeps there for itself do not count.
    assert [path for path in sharded_worker.files.iterdir() if path.name.startswith(("diffusion-worker", "pymp"))] == []


def test_a_rank_killed_once_too_often_ends_the_worker_with_70_the_reason_and_an_error_for_who_waits(split_worker: WorkerProcess) -> None:
    pids = split_worker.rank_pids()
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        running = threads.submit(split_worker.request_images, **LONG)
        split_worker.wait_for(lambda: split_worker.state()["inFlight"] == 1, what="working")
        os.kill(pids[1], signal.SIGKILL)
        answer = running.result(30)
    assert (answer.status_code, answer.json()["error"]["code"], answer.json()["error"]["retryable"]) == (500, "EngineFailed", True)
    assert split_worker.wait_exit(600) == 70
    for text in (split_worker.output, split_worker.termination_log.read_text(), answer.json()["error"]["message"]):
        assert f"rank 1 (pid {pids[1]}) was ended by SIGKILL" in text
    wait_until_gone(split_worker, pids)


def wait_until_gone(worker: WorkerProcess, pids: list[int]) -> None:
    worker.wait_until(lambda: not any(process_exists(pid) for pid in pids), what=f"gone: {pids}", timeout_s=60)
