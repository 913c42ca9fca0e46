# SPDX-License-Identifier: Apache-2.0
"""Real ranks that run out of memory: a request beside others is made alone, and a size is refused only if it failed alone."""

import concurrent.futures
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from support.worker.process import WorkerProcess

pytestmark = pytest.mark.slow

SMALL = {"prompt": "a red digit seven", "seed": 3, "num_inference_steps": 6, "size": "32x32"}
FITS_ALONE = {**SMALL, "size": "48x48"}
NEVER_FITS = {**SMALL, "size": "96x96"}


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    """Start a worker of two ranks whose memory is too small for some sizes."""
    with WorkerProcess(ranks=2, options=("--worker-extension=support.worker.extensions:Cramped", "--warmup-steps=0")) as worker:
        worker.wait_ready()
        yield worker


def code(answer: httpx2.Response) -> tuple[int, Any]:
    return answer.status_code, answer.json().get("error", {}).get("code")


def test_a_size_that_failed_in_company_works_a_moment_later_and_its_requests_get_their_images(worker: WorkerProcess) -> None:
    alone = worker.image(**FITS_ALONE).tobytes()
    pids = worker.rank_pids()
    two = worker.request_images(**FITS_ALONE, n=2)
    assert two.status_code == 200, two.text
    assert "ran out of memory beside others, and runs once more by itself" in worker.output
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda body: worker.request_images(**body), [SMALL, FITS_ALONE] * 2))
    assert [code(answer) for answer in answers] == [(200, None)] * 4
    # It needs no loss of the ranks, and changes nothing in the image.
    assert worker.image(**FITS_ALONE).tobytes() == alone
    assert worker.rank_pids() == pids


def test_a_size_that_failed_alone_is_refused_and_smaller_ones_are_made(worker: WorkerProcess) -> None:
    assert code(worker.request_images(**NEVER_FITS)) == (507, "InsufficientMemory")
    refused = worker.request_images(**NEVER_FITS)
    assert code(refused) == (400, "InvalidRequest")
    assert "which is what fits in memory" in refused.json()["error"]["message"]
    assert code(worker.request_images(**FITS_ALONE)) == (200, None)
