# SPDX-License-Identifier: Apache-2.0
"""Sleep frees the weights' memory, as the kernel counts it, and the image after waking is the same, bit for bit."""

import concurrent.futures
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.worker.process import DIGITS, WorkerProcess, resident_bytes
from support.worker.real_memory import HEADS, MemoryCgroup, make_big_model, why_not

# A start of a real worker imports torch for ten seconds.
pytestmark = pytest.mark.slow

REQUEST = {"prompt": "a red digit seven", "seed": 3, "num_inference_steps": 4, "guidance_scale": 3.0}
# A single row in a single step uses every weight; more would take seconds on the large model.
BRIEF = REQUEST | {"num_inference_steps": 1, "guidance_scale": 1.0}


def weights_resident(worker: WorkerProcess, document: dict[str, Any]) -> list[int]:
    return [resident_bytes(rank["pid"], rank["memory"]["mappings"]) for rank in document["ranks"]]


@pytest.mark.parametrize("level", ["HostMemory", "Discard"])
def test_sleep_frees_the_weights_and_wake_gives_the_same_images(worker_of_two: WorkerProcess, level: str) -> None:
    worker = worker_of_two
    before = [worker.image(**REQUEST, model=model).tobytes() for model in ("digits", "stripes")]
    document = worker.state()
    awake = weights_resident(worker, document)
    weights = [rank["memory"]["weightsBytes"] for rank in document["ranks"]]
    assert all(resident >= size > 10_000_000 for resident, size in zip(awake, weights, strict=True))

    document = worker.sleep(level=level)
    asleep = weights_resident(worker, document)
    assert all(now <= 0.02 * then for now, then in zip(asleep, awake, strict=True))
    assert [rank["state"] for rank in document["ranks"]] == ["asleep", "asleep"]
    memory = [rank["memory"] for rank in document["ranks"]]
    assert [of["weightsResidentBytes"] for of in memory] == asleep
    assert [(of["level"], sorted(of["asleep"])) for of in memory] == [(level, ["adapters", "caches", "weights"])] * 2
    assert [of["adapterSlotsResidentBytes"] + of["cacheBytes"] for of in memory] == [0, 0]
    if level == "Discard":
        assert [of["adapterHostBytes"] for of in memory] == [0, 0]
        # Only computed tensors are in no file as they are: the tables of positions.
        assert all(of["mirrorMemoryBytes"] < 0.02 * of["weightsBytes"] for of in memory), memory

    answer = worker.request_images(**REQUEST)
    assert (answer.status_code, answer.json()["error"]["code"], answer.json()["error"]["retryable"]) == (503, "Asleep", True)
    put = worker.put_adapter("put", DIGITS / "loras" / "frame")
    assert (put.status_code, put.json()["state"]) == (200, "Deferred"), put.text
    assert worker.get("/readyz").status_code == 200

    document = worker.wake()
    # The sizes need not be equal: the ends of a slab may or may not be in whole huge pages.
    assert all(resident >= size for resident, size in zip(weights_resident(worker, document), weights, strict=True))
    assert before == [worker.image(**REQUEST, model=model).tobytes() for model in ("digits", "stripes")]
    assert worker.image(**REQUEST, model="put").tobytes() not in before
    assert worker.delete_adapter("put").status_code == 200


def test_a_model_that_is_awake_in_part_serves_nothing_and_the_last_part_makes_it_ready(worker: WorkerProcess) -> None:
    before = worker.image(**REQUEST).tobytes()
    worker.sleep(level="Discard")
    for tags, left in ([["caches"], ["adapters", "weights"]], [["weights"], ["adapters"]]):
        assert worker.control("POST", "/v1/wake", json={"operationId": str(tags), "tags": tags}).status_code in (200, 202)
        worker.wait_for(lambda: worker.state()["operation"] is None, what="woken in part")
        document = worker.state()
        assert (document["state"], sorted(document["ranks"][0]["memory"]["asleep"])) == ("asleep", left)
        assert worker.request_images(**REQUEST).json()["error"]["code"] == "Asleep"
    assert weights_resident(worker, document)[0] >= document["ranks"][0]["memory"]["weightsBytes"]
    worker.wake(tags=["adapters"])
    assert worker.image(**REQUEST).tobytes() == before


def test_sleep_and_wake_many_times_leave_the_image_and_the_memory_as_they_were(worker: WorkerProcess) -> None:
    before = worker.image(**REQUEST).tobytes()
    pid = worker.rank_pids()[0]

    def rss() -> int:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096

    worker.sleep()
    worker.wake()
    start = rss()
    for _ in range(4):
        worker.sleep()
        worker.wake()
    assert worker.image(**REQUEST).tobytes() == before
    assert rss() - start < 8_000_000


def test_sleep_that_does_not_wait_any_longer_ends_the_running_image_with_a_code(worker: WorkerProcess) -> None:
    long = {**REQUEST, "num_inference_steps": 200}
    before = worker.image(**REQUEST).tobytes()
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        running = threads.submit(worker.request_images, **long)
        worker.wait_for(lambda: worker.state()["inFlight"] == 1, what="working")
        worker.sleep(deadlineSeconds=0.1)
        answer = running.result(60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "Asleep")
    worker.wake()
    assert worker.image(**REQUEST).tobytes() == before


@pytest.fixture(scope="module")
def cgroup() -> Iterator[MemoryCgroup | None]:
    """Provide a cgroup for the big worker, or None if the machine allows none."""
    if why_not() is not None:
        yield None
        return
    with MemoryCgroup() as found:
        yield found


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory, cgroup: MemoryCgroup | None) -> Iterator[WorkerProcess]:
    """Build a model with over 250 MB of float32 weights and serve it, inside the limited cgroup if there is one."""
    model = make_big_model(tmp_path_factory.mktemp("big") / "model", heads=HEADS // 2)
    with WorkerProcess(model, served_name="big", wrapper=cgroup.wrapper if cgroup else ()) as worker:
        worker.wait_ready()
        yield worker


def test_sleep_frees_the_memory_of_the_whole_process_and_wakes_a_large_model_bit_for_bit(big: WorkerProcess) -> None:
    before = big.image(**BRIEF).tobytes()
    document = big.state()
    [awake] = weights_resident(big, document)
    assert document["model"]["sizeBytes"] > 250_000_000 and awake >= document["model"]["sizeBytes"]
    anonymous = anonymous_bytes(big.rank_pids()[0])
    document = big.sleep()
    [asleep] = weights_resident(big, document)
    assert asleep <= 0.02 * awake
    # The memory is free in the whole process, not only where the worker reports its weights.
    assert anonymous - anonymous_bytes(big.rank_pids()[0]) >= 0.98 * document["model"]["sizeBytes"]
    assert document["lastOperation"]["freedBytes"] >= 0.98 * document["model"]["sizeBytes"]
    big.wake()
    assert big.image(**BRIEF).tobytes() == before


@pytest.mark.skipif(why_not() is not None, reason=f"memory cgroups: {why_not()}")
def test_a_wake_without_enough_memory_leaves_the_model_asleep_and_can_be_tried_again(
    big: WorkerProcess, cgroup: MemoryCgroup | None
) -> None:
    assert cgroup is not None
    before, restarts = big.image(**BRIEF).tobytes(), big.state()["restarts"]
    big.sleep()
    cgroup.limit(cgroup.anonymous_bytes + 125_000_000)
    try:
        assert big.control("POST", "/v1/wake", json={"operationId": "too-little"}).status_code == 202
        big.wait_for(lambda: big.state()["operation"] is None, what="done")
        document = big.state()
        error = document["lastOperation"]["error"]
        assert (document["state"], error["code"], error["retryable"]) == ("asleep", "InsufficientMemory", True)
        assert weights_resident(big, document)[0] <= 0.02 * document["model"]["sizeBytes"]
        assert sorted(document["ranks"][0]["memory"]["asleep"]) == ["adapters", "caches", "weights"]
    finally:
        cgroup.limit(None)
    assert big.wake()["restarts"] == restarts
    assert big.image(**BRIEF).tobytes() == before


def anonymous_bytes(pid: int) -> int:
    """Return the bytes of a process's memory that belong to no file."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"RssAnon:\s+(\d+) kB", status)[0]) * 1024
