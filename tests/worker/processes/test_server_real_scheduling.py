# SPDX-License-Identifier: Apache-2.0
"""The scheduler's policy on a real rank: a small image overtakes a large one, and a cancelled one leaves."""

import concurrent.futures

import httpx2
import pytest

from support.worker.process import WorkerProcess

# A start of a real worker imports torch for ten seconds.
pytestmark = pytest.mark.slow

LARGE = {"prompt": "a red digit seven", "seed": 1, "size": "192x192", "num_inference_steps": 24}
SMALL = {"prompt": "a blue digit four", "seed": 2, "size": "64x64", "num_inference_steps": 2}


def send(worker: WorkerProcess, body: dict[str, object], request_id: str = "") -> httpx2.Response:
    return httpx2.post(
        f"{worker.url}/v1/images/generations", json=body, headers={"x-request-id": request_id} if request_id else {}, timeout=120
    )


def image(answer: httpx2.Response) -> object:
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def test_a_small_image_is_there_long_before_the_large_one_that_runs_and_both_are_as_alone(worker: WorkerProcess) -> None:
    alone = [image(send(worker, body)) for body in (LARGE, SMALL)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        large = pool.submit(send, worker, LARGE)
        worker.wait_for(lambda: worker.state()["inFlight"] == 1, what="the large image runs")
        small = image(send(worker, SMALL))
        assert not large.done()
        assert [image(large.result()), small] == alone


def test_a_cancelled_image_leaves_the_ranks_and_the_next_one_is_made(worker: WorkerProcess) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        running = pool.submit(send, worker, LARGE, "to-cancel")
        worker.wait_for(lambda: worker.state()["inFlight"] == 1, what="the image runs")
        assert httpx2.delete(f"{worker.url}/v1/requests/to-cancel").status_code == 204
        assert running.result(30).json()["error"]["code"] == "Cancelled"
    assert send(worker, SMALL).status_code == 200
    worker.wait_for(lambda: worker.state()["inFlight"] == 0, what="nothing runs")
