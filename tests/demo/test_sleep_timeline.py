# SPDX-License-Identifier: Apache-2.0
"""The parts of tools/sleep_timeline.py and tools/service_load.py that need no cluster: when requests come, and how answers are counted."""

import itertools
from typing import Any

import pytest

from support.worker.process import DIGITS_MODEL, FAKE_PROGRAM, WorkerProcess
from tools import service_load
from tools.sleep_timeline import REQUESTS, SEED, bursts, draw, summary


def sample(at: float, state: str, weights: int, operation: tuple[str, str] | None = None) -> dict[str, Any]:
    last = operation and {"operationId": operation[0], "kind": operation[1], "error": None}
    return {"at": at, "state": state, "held": 0, "resident": 2**30 + weights, "weights": weights, "lastOperation": last}


FOUND = {
    "requests": [
        {"at": 0.0, "status": 200, "completed": 0.5, "seconds": 0.5},
        {"at": 20.0, "status": 200, "held": 0.1, "completed": 2.0, "seconds": 2.0},
        {"at": 21.0, "status": 503, "code": "Asleep", "seconds": 0.1},
    ],
    "samples": [
        sample(0, "ready", 2**25, ("before", "wake")),
        sample(10, "asleep", 0, ("a", "sleep")),
        sample(15, "asleep", 0, ("a", "sleep")),
        sample(21, "ready", 2**25, ("b", "wake")),
    ],
}


def test_the_requests_come_in_bursts_with_pauses_that_are_longer_than_the_idle_time_and_shorter_ones() -> None:
    times = list(bursts(SEED, REQUESTS))
    assert len(times) == REQUESTS and times == sorted(times) == list(bursts(SEED, REQUESTS))
    pauses = [after - before for before, after in itertools.pairwise(times) if after - before > 2]
    assert min(pauses) < 10 < 15 < max(pauses)


def test_refusals_sleeps_and_wakes_are_counted_once_each() -> None:
    told = summary(FOUND, ["Slept", "Woke", "ReplicaReady"])
    assert (told["requests"], told["served"], told["refused"], told["held"]) == (3, 2, 1, 1)
    assert (told["sleeps"], told["wakes"], told["events"]) == (1, 1, {"Slept": 1, "Woke": 1})
    assert (told["weights_awake_mib"], told["weights_asleep_mib"], told["asleep_fraction"]) == (32.0, 0.0, 0.5)
    assert told["seconds"]["held"]["max"] == 2.0


def test_the_image_has_something_in_every_panel() -> None:
    image = draw(FOUND, summary(FOUND, []))
    third = image.height // 3
    for top in (0, third, 2 * third):
        assert len(image.crop((100, top, image.width, top + third)).getcolors(maxcolors=100_000) or []) > 2


@pytest.mark.slow
def test_the_load_tells_what_became_of_every_request() -> None:
    body = {"prompt": "a red digit seven", "size": "64x64", "num_inference_steps": 2}
    with WorkerProcess(DIGITS_MODEL, program=FAKE_PROGRAM) as worker:
        worker.wait_ready()
        requests = [{"at": 0.3, "body": body}, {"at": 0.0, "body": body | {"size": "7x7"}}]
        served, refused = service_load.main({"url": worker.url, "requests": requests})["requests"]
    assert served["status"] == 200 and 0 < served["progress"] <= served["completed"] <= served["seconds"] and served["at"] >= 0.3
    assert (refused["status"], refused["code"]) == (400, "InvalidRequest")
