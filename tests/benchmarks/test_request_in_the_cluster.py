# SPDX-License-Identifier: Apache-2.0
"""The timed request of P11, against a real server."""

import pytest

from benchmarks.request_in_the_cluster import ask
from support.worker.process import DIGITS_MODEL, FAKE_PROGRAM, WorkerProcess


@pytest.mark.slow
def test_a_request_has_the_seconds_of_its_first_events_and_a_refused_one_its_code() -> None:
    body = {"prompt": "a red digit seven", "size": "64x64", "num_inference_steps": 2}
    with WorkerProcess(DIGITS_MODEL, program=FAKE_PROGRAM) as worker:
        worker.wait_ready()
        served, refused = ask(worker.url, body), ask(worker.url, body | {"size": "7x7"})
    assert served["status"] == 200 and 0 < served["progress"] <= served["completed"] <= served["seconds"]
    assert (refused["status"], refused["code"]) == (400, "InvalidRequest")
