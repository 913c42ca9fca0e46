# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters on the real model: given at start, put and deleted while it serves, and files that are no adapters."""

import concurrent.futures
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from support.worker.process import DIGITS, WorkerProcess, decode_image

# A start of a real worker imports torch for ten seconds.
pytestmark = pytest.mark.slow

STRIPES = DIGITS / "loras" / "stripes"
REQUEST = {"prompt": "a red digit seven", "seed": 3, "num_inference_steps": 4, "guidance_scale": 3.0}


def digest_of(folder: Path) -> str:
    return "sha256:" + hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(autouse=True)
def clean(worker: WorkerProcess) -> Iterator[None]:
    """Remove the adapters that a test has put."""
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
    assert len({image.tobytes() for image in (base, stripes, frame)}) == 3


def test_a_broken_adapter_of_the_command_line_is_failed_with_the_reason_and_the_base_serves(worker: WorkerProcess) -> None:
    [broken] = [adapter for adapter in worker.state()["adapters"] if adapter["name"] == "broken"]
    assert (broken["state"], broken["error"]["code"]) == ("Failed", "InvalidAdapter")
    assert "adapter_config.json" in broken["error"]["message"]
    answer = worker.request_images(**REQUEST, model="broken")
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "AdapterNotLoaded")


def test_an_adapter_is_put_used_and_deleted_while_the_worker_serves(worker: WorkerProcess) -> None:
    assert worker.request_images(**REQUEST, model="put").json()["error"]["code"] == "model_not_found"
    answer = worker.put_adapter("put", STRIPES, digest=digest_of(STRIPES))
    assert (answer.status_code, answer.json()["state"], answer.json()["ranksLoaded"]) == (200, "Loaded", 1)
    assert worker.image(**REQUEST, model="put").tobytes() == worker.image(**REQUEST, model="stripes").tobytes()
    assert worker.delete_adapter("put").status_code == 200
    assert worker.request_images(**REQUEST, model="put").json()["error"]["code"] == "model_not_found"
    assert worker.delete_adapter("put").status_code == 404


def test_an_adapter_is_loaded_between_the_steps_of_a_running_image_and_changes_nothing_of_it(worker: WorkerProcess) -> None:
    """Put and delete an adapter while a long image is made; the put must end before the image does, and the image stay the same."""
    long = {**REQUEST, "num_inference_steps": 60, "model": "stripes"}
    alone = worker.image(**long).tobytes()
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        running = threads.submit(worker.image, **long)
        worker.wait_for(lambda: worker.state()["inFlight"] == 1, what="working")
        assert worker.put_adapter("put", DIGITS / "loras" / "frame").status_code == 200
        assert worker.delete_adapter("put").status_code == 200
        assert worker.state()["inFlight"] == 1, "it was loaded while the image was made"
        assert running.result(60).tobytes() == alone


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
    ("kind", "code", "says"),
    [
        ("missing", "SourceNotFound", "missing"),
        ("empty", "InvalidAdapter", "*.safetensors"),
        ("no-config", "InvalidAdapter", "adapter_config.json"),
        ("no-weights", "InvalidAdapter", "*.safetensors"),
        ("garbage", "InvalidAdapter", "adapter_model.safetensors"),
        ("cut", "InvalidAdapter", "adapter_model.safetensors"),
        ("other-modules", "NoMatchingModules", "transformer.layers"),
        ("other-shapes", "InvalidAdapter", "expected"),
        ("huge-rank", "RankTooLarge", "128"),
    ],
)
def test_a_lora_that_is_none_or_does_not_match_is_refused_and_changes_nothing(
    worker: WorkerProcess, bad_adapters: dict[str, Path], kind: str, code: str, says: str
) -> None:
    before = worker.image(**REQUEST).tobytes(), worker.image(**REQUEST, model="stripes").tobytes()
    answer = worker.put_adapter("bad", bad_adapters[kind])
    status = 404 if code == "SourceNotFound" else 400
    assert (answer.status_code, answer.json()["code"], answer.json()["retryable"]) == (status, code, False), answer.text
    assert says in answer.json()["message"]
    assert worker.request_images(**REQUEST, model="bad").json()["error"]["code"] == "AdapterNotLoaded"
    assert before == (worker.image(**REQUEST).tobytes(), worker.image(**REQUEST, model="stripes").tobytes())


def test_an_adapter_with_another_digest_is_refused(worker: WorkerProcess) -> None:
    answer = worker.put_adapter("put", STRIPES, digest="sha256:" + "0" * 64)
    assert (answer.status_code, answer.json()["code"]) == (409, "DigestMismatch")
    assert digest_of(STRIPES) in answer.json()["message"]


def test_refused_adapters_take_no_slots(worker: WorkerProcess, bad_adapters: dict[str, Path]) -> None:
    for _ in range(6):
        assert worker.put_adapter("bad", bad_adapters["other-shapes"]).status_code == 400
    assert worker.put_adapter("put", STRIPES).status_code == 200


def test_the_openai_sdk_asks_for_several_adapters_each_with_its_strength(worker: WorkerProcess) -> None:
    asked = {"seed": 3, "num_inference_steps": 4, "guidance_scale": 3.0}

    def made(**body: Any) -> tuple[bytes, list[dict[str, Any]]]:
        answer = worker.openai().images.generate(model="digits", prompt="a red digit seven", extra_body={**asked, **body})
        assert answer.data is not None and answer.data[0].model_extra is not None
        image = decode_image(str(answer.data[0].b64_json))
        found = answer.data[0].model_extra["provenance"]
        # The image's file has the same provenance.
        assert json.loads(image.info["provenance"]) == found
        return image.tobytes(), found["adapters"]

    uses = [
        {"name": name, "digest": digest_of(DIGITS / "loras" / name), "scale": scale} for name, scale in (("stripes", 0.5), ("frame", 1.0))
    ]
    both, adapters = made(lora=[{"name": "stripes", "scale": 0.5}, {"lora_name": "frame", "lora_path": str(DIGITS / "loras" / "frame")}])
    assert all(use.pop("identity").startswith("v1:") for use in adapters) and adapters == uses
    other_order, _ = made(lora=[{"adapter": "frame"}, {"name": "stripes", "lora_scale": 0.5}])
    assert max(abs(one - other) for one, other in zip(both, other_order, strict=True)) <= 3
    one, adapters = made(lora={"name": "stripes", "scale": 0.5})
    assert [use.pop("identity")[:3] for use in adapters] == ["v1:"]
    assert adapters == uses[:1] and one == worker.image(**REQUEST, model="stripes", lora_scale=0.5).tobytes()
    nothing, _ = made(lora={"name": "stripes", "scale": 0})
    base, adapters = made()
    assert adapters == [] and nothing == base
    assert len({both, one, base}) == 3
    card = worker.openai().models.retrieve("stripes")
    listed = [model.id for model in worker.openai().models.list().data]
    assert listed[:1] == ["digits"] and {"stripes", "frame"} <= set(listed) and "broken" not in listed
    assert (card.model_extra or {})["digest"] == uses[0]["digest"] and (card.model_extra or {})["rank"] > 0


def test_a_request_for_what_is_no_adapter_here_never_reads_its_path(worker: WorkerProcess) -> None:
    answer = worker.request_images(**REQUEST, lora={"name": "stripes", "path": str(DIGITS / "loras" / "frame")})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora[0].path")
    assert worker.request_images(**REQUEST, lora={"name": "mine", "path": str(STRIPES)}).json()["error"]["code"] == "model_not_found"


def test_vllms_routes_load_and_unload(worker: WorkerProcess) -> None:
    told = {"lora_name": "put", "lora_path": str(STRIPES)}
    answer = worker.control("POST", "/v1/load_lora_adapter", json=told)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'put' added successfully.")
    assert worker.image(**REQUEST, model="put").tobytes() == worker.image(**REQUEST, model="stripes").tobytes()
    assert worker.control("POST", "/v1/load_lora_adapter", json=told).status_code == 400
    answer = worker.control("POST", "/v1/unload_lora_adapter", json={"lora_name": "put"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'put' removed successfully.")
    assert worker.request_images(**REQUEST, model="put").json()["error"]["code"] == "model_not_found"


def test_different_adapters_and_the_base_at_once_equal_each_alone(worker: WorkerProcess) -> None:
    models = ["digits", "stripes", "frame", "digits", "stripes"]
    alone = {model: worker.image(**REQUEST, model=model) for model in set(models)}
    with concurrent.futures.ThreadPoolExecutor(len(models)) as threads:
        together = list(threads.map(lambda model: worker.image(**REQUEST, model=model), models))
    for model, image in zip(models, together, strict=True):
        distance = max(abs(one - other) for one, other in zip(image.tobytes(), alone[model].tobytes(), strict=True))
        assert distance <= 3, model


def test_an_adapter_loads_on_two_ranks_and_gives_the_image_of_one(worker: WorkerProcess, worker_of_two: WorkerProcess) -> None:
    answer = worker_of_two.put_adapter("frame", DIGITS / "loras" / "frame")
    assert (answer.json()["ranksLoaded"], answer.json()["ranksTotal"]) == (2, 2)
    images = worker.image(**REQUEST, model="frame"), worker_of_two.image(**REQUEST, model="frame")
    assert max(abs(one - other) for one, other in zip(*(image.tobytes() for image in images), strict=True)) <= 3
    assert worker_of_two.delete_adapter("frame").status_code == 200


def test_adapter_calls_need_the_token_and_the_right_boot(worker: WorkerProcess) -> None:
    assert worker.control("PUT", "/v1/adapters/put", token="wrong", json={}).status_code == 401
    answer = worker.put_adapter("put", STRIPES, bootId="another")
    assert (answer.status_code, answer.json()["code"]) == (409, "WrongBoot")
    assert worker.boot_id in answer.json()["message"]


def test_a_rank_reads_nothing_of_an_adapter_and_a_pattern_that_takes_for_ever_costs_its_own_put_alone(
    worker_of_two: WorkerProcess, tmp_path: Path
) -> None:
    worker = worker_of_two
    worker.put_adapter("first", STRIPES)
    ranks = [rank["pid"] for rank in worker.state()["ranks"]]

    def read_by_ranks() -> list[int]:
        """Return the bytes that each rank has read from files and sockets."""
        return [int(Path(f"/proc/{pid}/io").read_text().split()[1]) for pid in ranks]

    large = tmp_path / "large"
    large.mkdir()
    tensors = {}
    for name, tensor in load_file(STRIPES / "adapter_model.safetensors").items():
        tensors[name] = tensor.repeat(8, 1) if "lora_A" in name else tensor.repeat(1, 8)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, large / "style.safetensors")
    before, size = read_by_ranks(), (large / "style.safetensors").stat().st_size
    answer = worker.put_adapter("put", large)
    assert (answer.status_code, answer.json()["ranksLoaded"]) == (200, 2), answer.text
    assert all(now - then < size / 2 for now, then in zip(read_by_ranks(), before, strict=True))
    costly = Path(shutil.copytree(STRIPES, tmp_path / "costly"))
    config = json.loads((costly / "adapter_config.json").read_text())
    config["alpha_pattern"] = {r"(\w|\w\w|[\w.])+\d!": 3}
    (costly / "adapter_config.json").write_text(json.dumps(config))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        refused = pool.submit(worker.put_adapter, "bad", costly)
        images = 0
        while not refused.done() or not images:
            worker.image(**REQUEST)
            images += 1
    assert (refused.result().status_code, refused.result().json()["code"]) == (400, "InvalidAdapter")
    assert "patterns of its configuration" in refused.result().text
    for name in ("put", "first", "bad"):
        worker.delete_adapter(name)
