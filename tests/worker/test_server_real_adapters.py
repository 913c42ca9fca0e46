# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters on the real model: given at start, put and deleted while it serves, and those that are none."""

import concurrent.futures
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from worker_process import DIGITS, WorkerProcess

# A start of a real worker imports torch for ten seconds.
pytestmark = pytest.mark.slow

STRIPES = DIGITS / "loras" / "stripes"
REQUEST = {"prompt": "a red digit seven", "seed": 3, "num_inference_steps": 4, "guidance_scale": 3.0}


def digest_of(folder: Path) -> str:
    return "sha256:" + hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(autouse=True)
def clean(worker: WorkerProcess) -> Iterator[None]:
    """Every test leaves the adapters of the start only."""
    yield
    for adapter in worker.state()["adapters"]:
        if adapter["name"] not in ("stripes", "frame", "broken"):
            worker.delete_adapter(adapter["name"])


def test_adapters_of_the_command_line_are_loaded_before_the_worker_is_ready(worker: WorkerProcess) -> None:
    adapters = {adapter["name"]: adapter for adapter in worker.state()["adapters"]}
    for name in ("stripes", "frame"):
        assert (adapters[name]["state"], adapters[name]["digest"]) == ("Loaded", digest_of(DIGITS / "loras" / name))
        assert adapters[name]["modules"] > 0 and adapters[name]["rank"] > 0
    base, stripes, frame = (worker.image(**REQUEST, model=model) for model in ("digits", "stripes", "frame"))
    assert len({picture.tobytes() for picture in (base, stripes, frame)}) == 3


def test_a_broken_adapter_of_the_command_line_is_failed_with_the_reason_and_the_base_serves(worker: WorkerProcess) -> None:
    [broken] = [adapter for adapter in worker.state()["adapters"] if adapter["name"] == "broken"]
    assert (broken["state"], broken["error"]["code"]) == ("Failed", "InvalidAdapter")
    assert "adapter_config.json" in broken["error"]["message"]
    answer = worker.images(**REQUEST, model="broken")
    assert (answer.status_code, answer.json()["code"]) == (503, "AdapterNotLoaded")


def test_an_adapter_is_put_used_and_deleted_while_the_worker_serves(worker: WorkerProcess) -> None:
    assert worker.images(**REQUEST, model="put").json()["code"] == "NotFound"
    answer = worker.put_adapter("put", STRIPES, digest=digest_of(STRIPES))
    assert (answer.status_code, answer.json()["state"], answer.json()["ranksLoaded"]) == (200, "Loaded", 1)
    assert worker.image(**REQUEST, model="put").tobytes() == worker.image(**REQUEST, model="stripes").tobytes()
    assert worker.delete_adapter("put").status_code == 200
    assert worker.images(**REQUEST, model="put").json()["code"] == "NotFound"
    assert worker.delete_adapter("put").status_code == 404


def test_the_base_is_bit_equal_before_during_and_after_an_adapter(worker: WorkerProcess) -> None:
    before = worker.image(**REQUEST).tobytes()
    worker.put_adapter("put", STRIPES)
    during = worker.image(**REQUEST).tobytes()
    worker.delete_adapter("put")
    assert before == during == worker.image(**REQUEST).tobytes()


def test_the_scale_of_an_adapter_counts_and_zero_is_the_base(worker: WorkerProcess) -> None:
    base = worker.image(**REQUEST).tobytes()
    worker.put_adapter("put", STRIPES, scale=0.0)
    assert worker.image(**REQUEST, model="put").tobytes() == base
    assert worker.image(**REQUEST, model="put", lora_scale=1.0).tobytes() == worker.image(**REQUEST, model="stripes").tobytes()
    worker.put_adapter("put", STRIPES, scale=1.0)
    assert worker.image(**REQUEST, model="put").tobytes() == worker.image(**REQUEST, model="stripes").tobytes()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("missing", "missing"),
        ("empty", "adapter_config.json"),
        ("no-config", "adapter_config.json"),
        ("no-weights", "adapter_model.safetensors"),
        ("garbage", "adapter_model.safetensors"),
        ("cut", "adapter_model.safetensors"),
        ("other-modules", "layers"),
        ("other-shapes", "expected"),
        ("huge-rank", "128"),
    ],
)
def test_a_lora_that_is_none_or_does_not_match_is_refused_and_changes_nothing(
    worker: WorkerProcess, bad_adapters: dict[str, Path], kind: str, says: str
) -> None:
    before = worker.image(**REQUEST).tobytes(), worker.image(**REQUEST, model="stripes").tobytes()
    answer = worker.put_adapter("bad", bad_adapters[kind])
    assert (answer.status_code, answer.json()["code"], answer.json()["retryable"]) == (400, "InvalidAdapter", False), answer.text
    assert says in answer.json()["message"]
    assert worker.images(**REQUEST, model="bad").json()["code"] == "AdapterNotLoaded"
    assert before == (worker.image(**REQUEST).tobytes(), worker.image(**REQUEST, model="stripes").tobytes())


def test_an_adapter_with_another_digest_is_refused(worker: WorkerProcess) -> None:
    answer = worker.put_adapter("put", STRIPES, digest="sha256:" + "0" * 64)
    assert (answer.status_code, answer.json()["code"]) == (409, "DigestMismatch")
    assert digest_of(STRIPES) in answer.json()["message"]


def test_refused_adapters_take_no_slots(worker: WorkerProcess, bad_adapters: dict[str, Path]) -> None:
    for _ in range(6):
        assert worker.put_adapter("bad", bad_adapters["other-shapes"]).status_code == 400
    assert worker.put_adapter("put", STRIPES).status_code == 200


def test_adapters_over_the_limit_are_refused_by_name(worker: WorkerProcess) -> None:
    assert [worker.put_adapter(f"put-{number}", STRIPES).status_code for number in range(3)] == [200, 200, 409]
    assert worker.put_adapter("put-3", STRIPES).json()["code"] == "CapacityExceeded"
    worker.delete_adapter("put-0")
    assert worker.put_adapter("put-3", STRIPES).status_code == 200


def test_different_adapters_and_the_base_at_once_equal_each_alone(worker: WorkerProcess) -> None:
    models = ["digits", "stripes", "frame", "digits", "stripes"]
    alone = {model: worker.image(**REQUEST, model=model) for model in set(models)}
    with concurrent.futures.ThreadPoolExecutor(len(models)) as threads:
        together = list(threads.map(lambda model: worker.image(**REQUEST, model=model), models))
    for model, picture in zip(models, together, strict=True):
        distance = max(abs(one - other) for one, other in zip(picture.tobytes(), alone[model].tobytes(), strict=True))
        assert distance <= 3, model


def test_an_adapter_loads_on_two_ranks_and_gives_the_picture_of_one(worker: WorkerProcess, worker_of_two: WorkerProcess) -> None:
    answer = worker_of_two.put_adapter("frame", DIGITS / "loras" / "frame")
    assert (answer.json()["ranksLoaded"], answer.json()["ranksTotal"]) == (2, 2)
    pictures = worker.image(**REQUEST, model="frame"), worker_of_two.image(**REQUEST, model="frame")
    assert max(abs(one - other) for one, other in zip(*(picture.tobytes() for picture in pictures), strict=True)) <= 3
    assert worker_of_two.delete_adapter("frame").status_code == 200


def test_adapter_calls_need_the_token_and_the_right_boot(worker: WorkerProcess) -> None:
    assert worker.control("PUT", "/v1/adapters/put", token="wrong", json={}).status_code == 401
    answer = worker.put_adapter("put", STRIPES, bootId="another")
    assert (answer.status_code, answer.json()["code"]) == (409, "WrongBoot")
    assert worker.boot_id in answer.json()["message"]
