# SPDX-License-Identifier: Apache-2.0
"""Adapters that change while the real model sleeps, and sleep by the routes of other servers: images before and after."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.worker.process import DIGITS, WorkerProcess

# A start of a real worker imports torch for ten seconds.
pytestmark = pytest.mark.slow

STRIPES, FRAME = (DIGITS / "loras" / name for name in ("stripes", "frame"))
REQUEST = {"prompt": "a red digit seven", "seed": 3, "num_inference_steps": 4, "guidance_scale": 3.0}
LEVELS = ["HostMemory", "Discard"]


@pytest.fixture(autouse=True)
def clean(worker: WorkerProcess) -> Iterator[None]:
    """Undo what a test did to the shared worker: wake it, and delete each adapter that is not among those of the start."""
    yield
    worker.wake()
    for adapter in worker.state()["adapters"]:
        if adapter["name"] not in ("stripes", "frame", "broken"):
            worker.delete_adapter(adapter["name"])


def image(worker: WorkerProcess, model: str) -> bytes:
    return worker.image(**REQUEST, model=model).tobytes()


def states(worker: WorkerProcess) -> list[tuple[str, str]]:
    return [(adapter["name"], adapter["state"]) for adapter in worker.state()["adapters"] if adapter["name"] != "broken"]


def digest_of(folder: Path) -> str:
    return "sha256:" + hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_put_replaced_and_deleted_while_the_model_sleeps_is_what_its_images_are_made_with(
    worker: WorkerProcess, level: str
) -> None:
    base, stripes, frame = (image(worker, model) for model in ("digits", "stripes", "frame"))
    assert len({base, stripes, frame}) == 3
    worker.put_adapter("replaced", STRIPES)
    worker.put_adapter("deleted", STRIPES, scale=0.5)
    assert image(worker, "replaced") == stripes

    worker.sleep(level=level)
    was = "Loaded" if level == "HostMemory" else "Deferred"
    for name in ("put", "replaced"):
        answer = worker.put_adapter(name, FRAME, digest=digest_of(FRAME))
        assert (answer.status_code, answer.json()["state"], answer.json()["digest"]) == (200, "Deferred", digest_of(FRAME)), answer.text
    assert worker.delete_adapter("deleted").status_code == 200
    assert worker.request_images(**REQUEST, model="deleted").json()["error"]["code"] == "model_not_found"
    expected = {("stripes", was), ("frame", was), ("replaced", was), ("replaced", "Deferred"), ("put", "Deferred")}
    assert expected <= set(states(worker))

    worker.wake()
    assert sorted(states(worker)) == [(name, "Loaded") for name in ("frame", "put", "replaced", "stripes")]
    assert [image(worker, model) for model in ("digits", "stripes", "frame")] == [base, stripes, frame]
    assert [image(worker, model) for model in ("put", "replaced")] == [frame, frame]
    assert worker.request_images(**REQUEST, model="deleted").json()["error"]["code"] == "model_not_found"


def test_a_replacement_whose_file_is_gone_at_the_wake_leaves_the_old_one_serving(worker: WorkerProcess, tmp_path: Path) -> None:
    stripes = image(worker, "stripes")
    worker.put_adapter("style", STRIPES)
    shutil.copytree(FRAME, tmp_path / "frame")
    worker.sleep(level="Discard")
    assert worker.put_adapter("style", tmp_path / "frame").json()["state"] == "Deferred"
    shutil.rmtree(tmp_path / "frame")
    worker.wake()
    [record] = [adapter for adapter in worker.state()["adapters"] if adapter["name"] == "style"]
    assert (record["state"], record["digest"], record["error"] is not None) == ("Loaded", digest_of(STRIPES), True)
    assert image(worker, "style") == stripes


@pytest.mark.parametrize(("kind", "code"), [("missing", "SourceNotFound"), ("garbage", "InvalidAdapter")])
def test_what_is_no_adapter_is_refused_while_the_model_sleeps(
    worker: WorkerProcess, bad_adapters: dict[str, Path], kind: str, code: str
) -> None:
    worker.sleep()
    answer = worker.put_adapter("bad", bad_adapters[kind])
    assert answer.json()["code"] == code, answer.text
    answer = worker.put_adapter("other", STRIPES, digest=digest_of(FRAME))
    assert (answer.status_code, answer.json()["code"]) == (409, "DigestMismatch")
    worker.wake()
    assert {"bad", "other"} <= {name for name, state in states(worker) if state == "Failed"}


def test_what_only_the_ranks_can_tell_is_told_at_the_wake(worker: WorkerProcess, bad_adapters: dict[str, Path]) -> None:
    base = image(worker, "digits")
    worker.sleep()
    assert worker.put_adapter("bad", bad_adapters["other-modules"]).json()["state"] == "Deferred"
    worker.wake()
    [record] = [adapter for adapter in worker.state()["adapters"] if adapter["name"] == "bad"]
    assert (record["state"], record["error"]["code"]) == ("Failed", "NoMatchingModules")
    assert image(worker, "digits") == base


def test_the_routes_of_other_servers_sleep_and_wake_the_real_model(worker: WorkerProcess) -> None:
    before = image(worker, "stripes")

    def post(path: str, **options: Any) -> Any:
        answer = worker.control("POST", path, **options)
        assert answer.status_code == 200, answer.text
        return json.loads(answer.text) if answer.text else None

    post("/sleep?level=1&mode=wait")
    assert worker.control("GET", "/is_sleeping").json() == {"is_sleeping": True}
    assert post("/wake_up") is None
    assert image(worker, "stripes") == before
    slept = post("/v1/omni/sleep", json={"stage_ids": [0]})
    [ack] = slept["acks"]
    assert (slept["status"], ack["status"], ack["rank"]) == ("SUCCESS", "SUCCESS", 0)
    assert ack["freed_bytes"] > 0.98 * worker.state()["model"]["sizeBytes"]
    assert post("/v1/omni/wakeup", json={"stage_ids": [0]})["status"] == "SUCCESS"
    assert post("/v1/omni/wakeup", json={"stage_ids": [0]})["status"] == "SKIPPED"
    assert image(worker, "stripes") == before


def test_a_probe_of_the_real_model_is_the_same_before_and_after_a_sleep(worker: WorkerProcess) -> None:
    def probed() -> Any:
        answer = worker.control("POST", "/v1/probe", json={"operationId": "p"})
        assert answer.status_code == 200, answer.text
        return answer.json()["ranks"]

    before = probed()
    known = {record["name"]: record["identity"] for record in worker.state()["adapters"]}
    assert {told.split()[0] for told in before[0]["adapters"]} == {known["stripes"], known["frame"]}
    assert before[0]["probe"] is not None
    for level in LEVELS:
        worker.sleep(level=level)
        worker.wake()
        assert probed() == before
