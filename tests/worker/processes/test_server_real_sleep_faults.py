# SPDX-License-Identifier: Apache-2.0
"""Sleep and wake of real ranks that die, stop or overlap on the way; gates hold them there."""

import concurrent.futures
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from support.worker.extensions import Gates
from support.worker.process import DIGITS, WorkerProcess, descendants, process_exists, resident_bytes

pytestmark = pytest.mark.slow

REQUEST = {"prompt": "a red digit seven", "seed": 3, "num_inference_steps": 4, "guidance_scale": 3.0, "size": "32x32"}
LONG = {**REQUEST, "num_inference_steps": 200}
TESTS = Path(__file__).parents[2]


class Faulty(WorkerProcess):
    """A worker of two ranks with gates, which may be lost 100 times. It sleeps under OnIdle and records its sleep."""

    def __init__(self, folder: Path) -> None:
        self.gates = Gates(folder)
        desired = folder / "desired.json"
        desired.write_text(json.dumps({"sleep": {"policy": "OnIdle"}}))
        options = [f"--desired={desired}", f"--state-dir={folder / 'state'}", "--max-restarts=100"]
        super().__init__(
            ranks=2,
            loras={"stripes": DIGITS / "loras" / "stripes"},
            options=(*options, "--worker-extension=support.worker.extensions:Gated", "--drain-timeout-seconds=2"),
            env={"PYTHONPATH": str(TESTS), **self.gates.env},
        )
        self.alone = b""

    def begin(self, path: str, **body: Any) -> httpx2.Response:
        """Post to a path of the control port, for a sleep or a wake; return the answer, which comes before the operation ends."""
        return self.control("POST", path, json={"operationId": f"{path}-{time.monotonic()}", **body})

    def weights_resident(self) -> float:
        """Return the share of the weights of all ranks that the kernel counts in memory, from 0 to 1."""
        ranks = self.state()["ranks"]
        resident = sum(resident_bytes(rank["pid"], rank["memory"]["mappings"]) for rank in ranks)
        return float(resident / sum(rank["memory"]["weightsBytes"] for rank in ranks))

    def wait_over(self, state: str) -> dict[str, Any]:
        """Wait until no operation runs and the state is this one; return the document."""
        self.wait_for(lambda: self.state()["operation"] is None and self.state()["state"] == state, what=f"{state} for good")
        return self.state()

    def check_asleep_then_wake(self) -> None:
        """Assert that no more than 2 % of the weights are in memory, wake the worker, and assert that it makes the same image as before."""
        assert self.weights_resident() < 0.02
        self.wake()
        assert self.image(**REQUEST, model="stripes").tobytes() == self.alone


@pytest.fixture(scope="module")
def of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    with Faulty(tmp_path_factory.mktemp("faulty")) as worker:
        worker.wait_ready()
        worker.alone = worker.image(**REQUEST, model="stripes").tobytes()
        yield worker


@pytest.fixture
def faulty(of_all: Faulty) -> Iterator[Faulty]:
    """Provide the worker; after the test open all gates and wait until it is ready again."""
    yield of_all
    for gate in ("sleep", "wake", "adapter"):
        of_all.gates.open(gate)
    of_all.wait_over("ready")


@pytest.mark.parametrize("level", ["HostMemory", "Discard"])
def test_a_rank_killed_in_the_middle_of_a_sleep_leaves_the_model_asleep(faulty: Faulty, level: str) -> None:
    faulty.gates.close("sleep")
    assert faulty.begin("/v1/sleep", level=level).status_code == 202
    faulty.wait_state("sleeping")
    os.kill(faulty.rank_pids()[1], signal.SIGKILL)
    faulty.gates.open("sleep")
    faulty.wait_over("asleep")
    faulty.check_asleep_then_wake()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_killed_or_stopped_asleep_leaves_the_model_asleep(faulty: Faulty, number: signal.Signals) -> None:
    generation = faulty.sleep(level="Discard")["generation"]
    os.kill(faulty.rank_pids()[0], number)
    faulty.wait_for(lambda: faulty.state()["generation"] > generation, what="noticing", timeout_s=60)
    faulty.wait_over("asleep")
    faulty.check_asleep_then_wake()


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_rank_killed_or_stopped_in_the_middle_of_a_wake_leaves_the_model_awake(faulty: Faulty, rank: int, number: signal.Signals) -> None:
    faulty.sleep()
    faulty.gates.close("wake")
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        held = threads.submit(faulty.image, **REQUEST, model="stripes")
        faulty.wait_state("waking")
        os.kill(faulty.rank_pids()[rank], number)
        faulty.gates.open("wake")
        assert held.result(60).tobytes() == faulty.alone
    assert faulty.wait_over("ready")["lastLoss"]["message"].startswith(f"rank {rank} ")


@pytest.mark.parametrize("level", ["HostMemory", "Discard"])
def test_weights_that_come_back_spoiled_by_one_bit_are_never_served_from(faulty: Faulty, level: str) -> None:
    restarts = faulty.sleep(level=level)["restarts"]
    faulty.gates.close("spoil")
    assert faulty.image(**REQUEST, model="stripes").tobytes() == faulty.alone
    document = faulty.wait_over("ready")
    assert document["restarts"] == restarts + 1
    assert document["lastOperation"]["error"]["code"] == "VerificationFailed"
    assert "rank 1" in document["lastLoss"]["message"], document["lastLoss"]


def test_an_adapter_that_is_spoiled_in_memory_while_the_model_sleeps_is_never_served_from(faulty: Faulty) -> None:
    """Spoil the adapters of sleeping ranks, and ask for an image, which wakes the model.

    The wake has to find the fault and read the adapter from its file again, without a restart.
    """
    restarts = faulty.sleep()["restarts"]
    faulty.gates.close("spoil-adapters")
    assert faulty.image(**REQUEST, model="stripes").tobytes() == faulty.alone
    document = faulty.wait_over("ready")
    assert (document["restarts"], document["lastOperation"]["error"]) == (restarts, None)
    [loads] = re.findall(r'adapter_loads_total\{.*code="VerificationFailed".*\} (.*)', faulty.get("/metrics").text)
    assert float(loads) == 1


def test_one_operation_runs_at_a_time_and_a_call_in_conflict_names_it(faulty: Faulty) -> None:
    faulty.gates.close("sleep")
    call = {"operationId": "the-sleep", "level": "HostMemory"}
    assert faulty.control("POST", "/v1/sleep", json=call).status_code == 202
    faulty.wait_state("sleeping")
    assert faulty.control("POST", "/v1/sleep", json=call).status_code == 202
    conflict = faulty.begin("/v1/wake")
    assert (conflict.status_code, conflict.json()["code"]) == (409, "Conflict"), conflict.text
    assert conflict.json()["details"]["operationId"] == "the-sleep"
    faulty.gates.open("sleep")
    last = faulty.wait_over("asleep")["lastOperation"]
    assert (last["operationId"], last["kind"], last["error"], last["level"]) == ("the-sleep", "sleep", None, "HostMemory")
    assert last["freedBytes"] > 10_000_000 and 0 < last["seconds"] < 10
    assert faulty.control("POST", "/v1/sleep", json=call).status_code == 200
    faulty.check_asleep_then_wake()


def test_a_wake_while_the_model_drains_cancels_the_sleep(faulty: Faulty) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        running = threads.submit(faulty.request_images, **LONG)
        faulty.wait_for(lambda: faulty.state()["inFlight"] == 1, what="working")
        assert faulty.begin("/v1/sleep").status_code == 202
        faulty.wait_state("draining")
        assert faulty.begin("/v1/wake").status_code in (200, 202)
        faulty.wait_over("ready")
        assert running.result(60).status_code == 200
    assert faulty.state()["lastOperation"]["error"] is None or faulty.state()["lastOperation"]["error"]["code"] == "Cancelled"


def test_a_sleep_during_the_load_of_an_adapter_leaves_both_whole(faulty: Faulty) -> None:
    faulty.gates.close("adapter")
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        put = threads.submit(faulty.put_adapter, "frame", DIGITS / "loras" / "frame")
        faulty.wait_for(lambda: "frame" in [one["name"] for one in faulty.state()["adapters"]], what="loading an adapter")
        assert faulty.begin("/v1/sleep").status_code == 202
        faulty.gates.open("adapter")
        answer = put.result(60)
    assert answer.status_code == 200 or answer.json()["error"]["retryable"], answer.text
    faulty.wait_over("asleep")
    assert faulty.weights_resident() < 0.02
    assert faulty.put_adapter("frame", DIGITS / "loras" / "frame").status_code == 200
    faulty.wake()
    assert faulty.image(**REQUEST, model="frame").tobytes() != faulty.image(**REQUEST).tobytes()
    assert faulty.delete_adapter("frame").status_code == 200


@pytest.mark.parametrize("level", ["HostMemory", "Discard"])
def test_images_asked_for_while_the_model_sleeps_again_and_again_are_what_they_are_alone(faulty: Faulty, level: str) -> None:
    alone = [faulty.image(**{**REQUEST, "seed": seed}) for seed in range(4)]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        asked = []
        for number in range(24):
            asked.append(threads.submit(faulty.image, **{**REQUEST, "seed": number % 4}))
            if number % 4 == 3:
                faulty.begin("/v1/sleep", level=level)
        images = [one.result(90).tobytes() for one in asked]
    for number, image in enumerate(images):
        # A shared call rounds a sum in another order.
        assert all(abs(a - b) <= 1 for a, b in zip(image, alone[number % 4].tobytes(), strict=True))
    faulty.wait_for(lambda: faulty.state()["operation"] is None, what="done")
    faulty.wake()


def test_a_server_killed_while_asleep_comes_back_asleep_and_holds_nothing(faulty: Faulty) -> None:
    faulty.sleep()
    pids = [faulty.pid, *descendants(faulty.pid)]
    faulty.send_signal(signal.SIGKILL)
    faulty.wait_exit()
    faulty.wait_until(lambda: not any(process_exists(pid) for pid in pids), what="gone", timeout_s=60)
    faulty.start()
    seen = set[str]()
    faulty.wait_for(lambda: seen.add(faulty.state()["state"]) or "asleep" in seen, what="asleep")
    assert seen <= {"starting", "asleep"}
    faulty.wait_ready()  # the worker looks for the adapter's file while the model is still asleep
    assert all(rank["memory"]["weightsResidentBytes"] == 0 for rank in faulty.state()["ranks"])
    assert faulty.weights_resident() == 0
    # The request wakes the model, without an operator.
    assert faulty.image(**REQUEST, model="stripes").tobytes() == faulty.alone


def test_a_worker_terminated_while_it_drains_gives_what_runs_its_time_and_ends_with_0(faulty: Faulty) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        running = threads.submit(faulty.request_images, **LONG)
        faulty.wait_for(lambda: faulty.state()["inFlight"] == 1, what="working")
        faulty.begin("/v1/sleep")
        faulty.wait_state("draining")
        check_end(faulty)
        answer = running.result(60)
        assert answer.status_code == 200 or answer.json()["error"]["code"] == "Terminating", answer.text
    faulty.start()
    faulty.wait_ready()


def test_a_worker_terminated_while_it_sleeps_ends_with_0(of_all: Faulty) -> None:
    of_all.sleep()
    check_end(of_all)


def check_end(worker: WorkerProcess) -> None:
    """Send SIGTERM, and assert that the worker ends with code 0 within 10 s and that none of its processes stays."""
    pids, begun = [*worker.rank_pids(), *descendants(worker.pid)], time.monotonic()
    assert worker.terminate() == 0
    assert time.monotonic() - begun < 10
    worker.wait_until(lambda: not any(process_exists(pid) for pid in pids), what=f"gone: {pids}", timeout_s=45)
