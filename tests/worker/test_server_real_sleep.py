# SPDX-License-Identifier: Apache-2.0
"""Sleep gives the weights' memory back, as the kernel counts it, and the picture after waking is the same, bit for bit."""

import concurrent.futures
import json
import time
from pathlib import Path
from typing import Any

import pytest

from big_model import make_big_model
from worker_process import DIGITS, WorkerProcess, resident_bytes

# A start of a real worker imports torch for ten seconds.
pytestmark = pytest.mark.slow

REQUEST = {"prompt": "a red digit seven", "seed": 3, "num_inference_steps": 4, "guidance_scale": 3.0}


def weights_resident(worker: WorkerProcess, document: dict[str, Any]) -> list[int]:
    return [resident_bytes(rank["pid"], rank["memory"]["mappings"]) for rank in document["ranks"]]


def test_sleep_frees_the_weights_and_wake_gives_the_same_pictures(worker_of_two: WorkerProcess) -> None:
    worker = worker_of_two
    before = [worker.image(**REQUEST, model=model).tobytes() for model in ("digits", "stripes")]
    document = worker.state()
    awake = weights_resident(worker, document)
    weights = [rank["memory"]["weightsBytes"] for rank in document["ranks"]]
    assert all(resident >= size > 10_000_000 for resident, size in zip(awake, weights, strict=True))

    document = worker.sleep()
    asleep = weights_resident(worker, document)
    assert all(now <= 0.02 * then for now, then in zip(asleep, awake, strict=True))
    assert [rank["state"] for rank in document["ranks"]] == ["asleep", "asleep"]
    assert [rank["memory"]["weightsResidentBytes"] for rank in document["ranks"]] == asleep

    answer = worker.images(**REQUEST)
    assert (answer.status_code, answer.json()["code"], answer.json()["retryable"]) == (503, "Asleep", True)
    assert worker.put_adapter("put", DIGITS / "loras" / "frame").json()["code"] == "Asleep"
    assert worker.get("/readyz").status_code == 200

    document = worker.wake()
    # Not equal to what it was: whole huge pages may or may not back the ends of a slab.
    assert all(resident >= size for resident, size in zip(weights_resident(worker, document), weights, strict=True))
    assert before == [worker.image(**REQUEST, model=model).tobytes() for model in ("digits", "stripes")]


def test_sleep_and_wake_many_times_leave_the_picture_and_the_memory_as_they_were(worker: WorkerProcess) -> None:
    before = worker.image(**REQUEST).tobytes()
    pid = worker.rank_pids()[0]

    def rss() -> int:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096

    worker.sleep()
    worker.wake()
    start = rss()
    for _ in range(8):
        worker.sleep()
        worker.wake()
    assert worker.image(**REQUEST).tobytes() == before
    assert rss() - start < 8_000_000


def test_sleep_waits_for_the_running_picture(worker: WorkerProcess) -> None:
    long = {**REQUEST, "num_inference_steps": 100}
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        running = threads.submit(worker.images, **long)
        worker.wait_for(lambda: worker.state()["inFlight"] == 1, what="working")
        worker.sleep(mode="Wait")
        assert running.result(60).status_code == 200
    worker.wake()


def test_sleep_with_abort_ends_the_running_picture_with_a_code(worker: WorkerProcess) -> None:
    long = {**REQUEST, "num_inference_steps": 200}
    before = worker.image(**REQUEST).tobytes()
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        running = threads.submit(worker.images, **long)
        worker.wait_for(lambda: worker.state()["inFlight"] == 1, what="working")
        worker.sleep(mode="Abort")
        answer = running.result(60)
    assert (answer.status_code, answer.json()["code"]) == (503, "Asleep")
    worker.wake()
    assert worker.image(**REQUEST).tobytes() == before


def test_the_desired_file_names_adapters_and_lets_the_worker_fall_asleep_by_itself(tmp_path: Path, bad_adapters: dict[str, Path]) -> None:
    desired = {
        "sleep": {"policy": "Asleep"},
        "adapters": [
            {"name": "stripes", "source": {"path": str(DIGITS / "loras" / "stripes")}, "digest": None, "scale": 0.5},
            {"name": "broken", "source": {"path": str(bad_adapters["garbage"])}, "digest": None, "scale": 1.0},
        ],
    }
    path = tmp_path / "desired.json"
    path.write_text(json.dumps(desired))
    with WorkerProcess(options=(f"--desired={path}",)) as worker:
        worker.wait_ready()
        document = worker.wait_state("asleep")
        assert {adapter["name"]: (adapter["state"], adapter["scale"]) for adapter in document["adapters"]} == {
            "stripes": ("Loaded", 0.5),
            "broken": ("Failed", 1.0),
        }
        assert worker.images(**REQUEST).json()["code"] == "Asleep"
        worker.wake()
        assert worker.images(**REQUEST, model="stripes").status_code == 200
        assert worker.terminate() == 0


def test_sleep_frees_a_model_of_a_gigabyte_and_wakes_it_bit_for_bit(tmp_path: Path) -> None:
    model = make_big_model(tmp_path / "big")
    with WorkerProcess(model, served_name="big") as worker:
        worker.wait_ready()
        before = worker.image(**REQUEST).tobytes()
        document = worker.state()
        [awake] = weights_resident(worker, document)
        assert document["model"]["sizeBytes"] > 1_000_000_000 and awake >= document["model"]["sizeBytes"]
        started = time.monotonic()
        [asleep] = weights_resident(worker, worker.sleep())
        slept = time.monotonic()
        assert asleep <= 0.02 * awake
        worker.wake()
        woken = time.monotonic()
        assert worker.image(**REQUEST).tobytes() == before
        print(f"resident={awake} asleep={asleep} sleep_s={slept - started:.2f} wake_s={woken - slept:.2f}")
