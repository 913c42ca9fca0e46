# SPDX-License-Identifier: Apache-2.0
"""Requests that meet a sleeping model: a real worker, whose rank waits in the middle of a wake until a test lets it go on."""

import concurrent.futures
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from support.worker.extensions import Gates
from support.worker.process import WorkerProcess, process_exists

pytestmark = pytest.mark.slow

REQUEST = {"prompt": "a red digit seven", "seed": 3, "num_inference_steps": 4, "guidance_scale": 3.0, "size": "32x32"}


class Sleepy:
    """A worker whose desired state a test rewrites, and whose extension stops at gates in files.

    A batch has one request, so that images end in order.
    """

    def __init__(self, folder: Path) -> None:
        self.gates = Gates(folder)
        self.desired = folder / "desired.json"
        self.declare()
        # With a batch of one, images end in the order of their requests.
        options = (f"--desired={self.desired}", "--worker-extension=support.worker.extensions:Gated", "--max-batch-size=1")
        self.worker = WorkerProcess(options=options, env={"PYTHONPATH": str(Path(__file__).parents[2]), **self.gates.env})

    def declare(self, policy: str = "OnIdle", **cold: Any) -> None:
        """Replace the worker's desired file in one step, with this policy and these limits of held requests."""
        limits = {"mode": "Hold", "maxHeld": 64, "holdTimeoutSeconds": 300.0, **cold}
        replacement = self.desired.with_suffix(".new")
        replacement.write_text(json.dumps({"sleep": {"policy": policy}, "coldRequests": limits}))
        replacement.rename(self.desired)

    def held(self) -> int:
        current: int = self.worker.state()["held"]["current"]
        return current

    def wait_held(self, count: int) -> None:
        self.worker.wait_for(lambda: self.held() == count, what=f"holding {count}", timeout_s=60)


@pytest.fixture(scope="module")
def of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sleepy]:
    sleepy = Sleepy(tmp_path_factory.mktemp("sleepy"))
    with sleepy.worker:
        yield sleepy


@pytest.fixture
def sleepy(of_all: Sleepy) -> Iterator[Sleepy]:
    """Provide the worker asleep under OnIdle, without held requests."""
    of_all.declare()
    of_all.worker.wait_ready()
    of_all.worker.sleep()
    yield of_all
    of_all.gates.open("wake")
    of_all.declare()
    of_all.wait_held(0)
    of_all.worker.wake()


@pytest.fixture
def threads() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        yield pool


def test_a_request_while_the_model_loads_is_held_and_served(of_all: Sleepy) -> None:
    worker = of_all.worker
    assert worker.state()["state"] == "starting"
    # The model's sizes are known only after the load, but the limit of steps is known before.
    wrong = worker.request_images(**{**REQUEST, "num_inference_steps": 100_000})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "InvalidRequest")
    assert worker.state()["state"] == "starting"
    assert worker.request_images(**REQUEST).status_code == 200


def test_a_held_request_wakes_the_model_by_itself_and_its_image_is_the_same(sleepy: Sleepy) -> None:
    sleepy.worker.wake()
    before = sleepy.worker.image(**REQUEST).tobytes()
    for level in ("HostMemory", "Discard"):
        sleepy.worker.sleep(level=level)
        assert sleepy.worker.image(**REQUEST).tobytes() == before
        assert sleepy.worker.state()["state"] == "ready"


def test_twenty_requests_are_held_and_served_in_the_order_in_which_they_came(
    sleepy: Sleepy, threads: concurrent.futures.ThreadPoolExecutor
) -> None:
    ended: list[int] = []

    def ask(number: int) -> bytes:
        image = sleepy.worker.image(**{**REQUEST, "seed": number % 3}).tobytes()
        ended.append(number)
        return image

    sleepy.gates.close("wake")
    asked = []
    for number in range(20):
        asked.append(threads.submit(ask, number))
        sleepy.wait_held(number + 1)
    document = sleepy.worker.state()
    assert (document["state"], document["inFlight"], document["held"]["current"]) == ("waking", 0, 20)
    assert document["held"]["oldestAgeSeconds"] > 0
    sleepy.gates.open("wake")
    images = [one.result(60) for one in asked]
    alone = [sleepy.worker.image(**{**REQUEST, "seed": seed}).tobytes() for seed in range(3)]
    assert images == [alone[number % 3] for number in range(20)]
    # Two requests that end together may be noted in either order by the clients' threads.
    assert max(abs(place - number) for place, number in enumerate(ended)) <= 2


def test_past_max_held_requests_get_429_and_a_client_that_goes_away_frees_its_place(
    sleepy: Sleepy, threads: concurrent.futures.ThreadPoolExecutor
) -> None:
    sleepy.declare(maxHeld=2)
    sleepy.gates.close("wake")
    first = threads.submit(sleepy.worker.request_images, **REQUEST)
    sleepy.wait_held(1)
    with httpx2.Client() as client, client.stream("POST", f"{sleepy.worker.url}/v1/images/generations", json={**REQUEST, "stream": True}):
        sleepy.wait_held(2)
        over = sleepy.worker.request_images(**REQUEST)
        assert (over.status_code, over.json()["error"]["code"], over.json()["error"]["retryable"]) == (429, "Overloaded", True)
        assert int(over.headers["Retry-After"]) >= 1
        wrong = sleepy.worker.request_images(**{**REQUEST, "num_inference_steps": 100_000})
        assert wrong.status_code == 400
    sleepy.wait_held(1)
    third = threads.submit(sleepy.worker.request_images, **REQUEST)
    sleepy.wait_held(2)
    sleepy.gates.open("wake")
    assert [one.result(30).status_code for one in (first, third)] == [200, 200]


def test_a_request_that_was_held_for_too_long_gets_503_and_when_to_come_back(sleepy: Sleepy) -> None:
    sleepy.declare(holdTimeoutSeconds=0.5)
    sleepy.gates.close("wake")
    begun = time.monotonic()
    answer = sleepy.worker.request_images(**REQUEST)
    assert (answer.status_code, answer.json()["error"]["retryable"]) == (503, True), answer.text
    assert int(answer.headers["Retry-After"]) >= 1
    assert time.monotonic() - begun >= 0.5
    assert sleepy.held() == 0


def test_cold_requests_are_refused_at_once_where_the_mode_says_so(sleepy: Sleepy) -> None:
    sleepy.declare(mode="Reject")
    sleepy.gates.close("wake")
    answer = sleepy.worker.request_images(**REQUEST)
    assert (answer.status_code, answer.json()["error"]["retryable"]) == (503, True)
    assert int(answer.headers["Retry-After"]) >= 1


def test_a_stream_tells_that_it_is_held_and_why_and_ends_with_the_image(
    sleepy: Sleepy, threads: concurrent.futures.ThreadPoolExecutor
) -> None:
    sleepy.gates.close("wake")
    first = threads.submit(sleepy.worker.request_images, **REQUEST, stream=True, stream_options={"include_progress": True})
    sleepy.wait_held(1)
    second = threads.submit(sleepy.worker.request_images, **REQUEST, stream=True, stream_options={"include_progress": True})
    sleepy.wait_held(2)
    sleepy.worker.wait_state("waking")
    sleepy.gates.open("wake")
    heard = [events(one.result(30).text) for one in (first, second)]
    held = [[(event["state"], event["ahead"]) for event in of if event["type"] == "image_generation.held"] for of in heard]
    assert held[0][-1] == ("waking", 0) and held[1][0] == ("waking", 1), held
    for of in heard:
        kinds = [event["type"].rpartition(".")[2] for event in of]
        assert kinds[-5:] == ["progress"] * 4 + ["completed"]
    assert heard[0][-1]["b64_json"] == heard[1][-1]["b64_json"]


def test_under_policy_asleep_requests_are_refused_at_once_and_wrong_ones_with_their_own_code(sleepy: Sleepy) -> None:
    sleepy.declare(policy="Asleep")
    answer = sleepy.worker.request_images(**REQUEST)
    assert (answer.status_code, answer.json()["error"]["code"], answer.json()["error"]["retryable"]) == (422, "Asleep", False)
    assert sleepy.worker.request_images(**{**REQUEST, "size": "33x32"}).status_code == 400
    assert sleepy.worker.request_images(**REQUEST, model="nobody").status_code == 404
    assert sleepy.worker.state()["state"] == "asleep"


def test_requests_that_are_held_at_the_end_are_told_so_and_the_worker_ends_with_0(
    of_all: Sleepy, threads: concurrent.futures.ThreadPoolExecutor
) -> None:
    worker = of_all.worker
    worker.sleep()
    of_all.gates.close("wake")
    held = threads.submit(worker.request_images, **REQUEST)
    stream = threads.submit(worker.request_images, **REQUEST, stream=True, stream_options={"include_progress": True})
    of_all.wait_held(2)
    pids = worker.rank_pids()
    assert worker.terminate() == 0
    answer = held.result(60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "Terminating")
    assert "Terminating" in stream.result(60).text
    assert [pid for pid in pids if process_exists(pid)] == []


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
