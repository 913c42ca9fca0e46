# SPDX-License-Identifier: Apache-2.0
"""Images of the real model through the real server: the OpenAI SDK, one rank and two, alone and in company."""

import base64
import concurrent.futures
import re
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

from support.worker.process import WorkerProcess, decode_image

# A start of a real worker imports torch for ten seconds.
pytestmark = pytest.mark.slow

# Another batch size or another split over the ranks rounds otherwise: a level or two of 255 in a few pixels.
MAX_LEVELS = 3

REQUESTS: list[dict[str, Any]] = [
    {"prompt": "a red digit seven", "seed": 1, "num_inference_steps": 6, "guidance_scale": 3.0},
    {"prompt": "a green digit two", "seed": 2, "num_inference_steps": 4, "guidance_scale": 5.0},
    {"prompt": "a blue digit four", "seed": 3, "num_inference_steps": 8, "guidance_scale": 1.0},
    {"prompt": "a white digit nine", "seed": 4, "num_inference_steps": 5, "guidance_scale": 7.5, "model": "stripes"},
    {"prompt": "a yellow digit one", "seed": 5, "num_inference_steps": 3, "guidance_scale": 2.0, "size": "48x64"},
]


def levels_apart(one: Image.Image, other: Image.Image) -> int:
    """Return the greatest absolute difference between two images of equal size, 0 to 255, over all channels."""
    assert one.size == other.size
    return int(np.abs(np.asarray(one, np.int16) - np.asarray(other, np.int16)).max())


def metric(worker: WorkerProcess, name: str) -> float:
    found = re.search(rf"^diffusion_worker_{name} (\S+)$", worker.get("/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def test_the_openai_sdk_gets_an_image(worker: WorkerProcess) -> None:
    answer = worker.openai().images.generate(
        model="digits",
        prompt="a red digit seven",
        n=2,
        size="64x64",
        response_format="b64_json",
        extra_body={"seed": 11, "num_inference_steps": 4, "guidance_scale": 3.0},
    )
    assert answer.data is not None and len(answer.data) == 2
    images = [decode_image(str(item.b64_json)) for item in answer.data]
    assert [image.size for image in images] == [(64, 64), (64, 64)]
    assert levels_apart(*images) > MAX_LEVELS
    assert [item.model_extra["seed"] for item in answer.data if item.model_extra] == [11, 12]


def test_the_openai_sdk_lists_the_model_and_its_adapters(worker: WorkerProcess) -> None:
    models = list(worker.openai().models.list())
    assert [model.id for model in models] == ["digits", "frame", "stripes"]
    assert {model.model_extra["parent"] for model in models[1:] if model.model_extra} == {"digits"}


def test_the_openai_sdk_raises_its_own_error_for_an_unknown_model(worker: WorkerProcess) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody"):
        worker.openai().images.generate(model="nobody", prompt="a red digit seven")


def test_the_same_request_alone_gives_the_same_image_bit_for_bit(worker: WorkerProcess) -> None:
    first, again = (worker.image(**REQUESTS[0]) for _ in range(2))
    assert first.tobytes() == again.tobytes()


def test_other_seeds_prompts_steps_and_guidance_give_other_images(worker: WorkerProcess) -> None:
    base = worker.image(**REQUESTS[0])
    for change in ({"seed": 2}, {"prompt": "a blue digit one"}, {"num_inference_steps": 5}, {"guidance_scale": 6.0}):
        assert levels_apart(base, worker.image(**{**REQUESTS[0], **change})) > MAX_LEVELS


def test_a_size_is_width_times_height(worker: WorkerProcess) -> None:
    assert worker.image(prompt="a red digit seven", seed=1, num_inference_steps=2, size="96x64").size == (96, 64)


def test_different_requests_at_once_share_model_calls_and_equal_their_images_alone(worker: WorkerProcess) -> None:
    started = metric(worker, "model_calls_total")
    alone = [worker.image(**request) for request in REQUESTS]
    calls_alone = metric(worker, "model_calls_total") - started
    with concurrent.futures.ThreadPoolExecutor(len(REQUESTS)) as threads:
        together = list(threads.map(lambda request: worker.image(**request), REQUESTS))
    calls_together = metric(worker, "model_calls_total") - started - calls_alone
    assert [levels_apart(*pair) <= MAX_LEVELS for pair in zip(alone, together, strict=True)] == [True] * len(REQUESTS)
    assert calls_together < calls_alone


def test_an_exact_request_gives_the_same_bits_in_company(worker: WorkerProcess) -> None:
    exact = {**REQUESTS[0], "exact": True}
    alone = worker.image(**REQUESTS[0])
    with concurrent.futures.ThreadPoolExecutor(len(REQUESTS)) as threads:
        together = list(threads.map(lambda request: worker.image(**request), [exact, *REQUESTS[1:]]))
    assert together[0].tobytes() == alone.tobytes()


def test_two_ranks_give_the_images_of_one(worker: WorkerProcess, worker_of_two: WorkerProcess) -> None:
    for request in REQUESTS:
        assert levels_apart(worker.image(**request), worker_of_two.image(**request)) <= MAX_LEVELS


def test_two_ranks_give_the_same_image_again_bit_for_bit(worker_of_two: WorkerProcess) -> None:
    first, again = (worker_of_two.image(**REQUESTS[0]) for _ in range(2))
    assert first.tobytes() == again.tobytes()


def test_more_requests_than_fit_the_batch_are_all_served(worker: WorkerProcess) -> None:
    request = {"prompt": "a red digit seven", "num_inference_steps": 2}
    with concurrent.futures.ThreadPoolExecutor(24) as threads:
        answers = list(threads.map(lambda seed: worker.request_images(**request, seed=seed), range(24)))
    assert [answer.status_code for answer in answers] == [200] * 24
    assert len({answer.json()["data"][0]["b64_json"] for answer in answers}) == 24
    assert worker.state()["inFlight"] == 0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"size": "60x60"}, "size"),
        ({"size": "8192x8192"}, "size"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"num_inference_steps": 100_000}, "num_inference_steps"),
        ({"n": 100}, "n"),
        ({"seed": -2}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"guidance_scale": -1}, "guidance_scale"),
        ({"background": "transparent"}, "background"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(worker: WorkerProcess, change: dict[str, Any], field: str) -> None:
    answer = worker.request_images(**{"prompt": "a red digit seven", **change})
    assert (answer.status_code, answer.json()["error"]["code"], answer.json()["error"]["param"]) == (400, "InvalidRequest", field)


@pytest.mark.parametrize("seed", [0, 2**32, 2**63 - 100])
def test_every_seed_in_range_makes_an_image(worker: WorkerProcess, seed: int) -> None:
    answer = worker.request_images(prompt="a red digit seven", seed=seed, num_inference_steps=1)
    assert answer.status_code == 200, answer.text
    assert answer.json()["data"][0]["seed"] == seed


def test_an_unusual_prompt_is_a_prompt(worker: WorkerProcess) -> None:
    for prompt in ("\u0000", "🙂" * 50, "a" * 8000, "<|endoftext|>", "digit\n\n\ttwo"):
        answer = worker.request_images(prompt=prompt, seed=1, num_inference_steps=1)
        assert answer.status_code == 200, answer.text


def test_the_server_process_maps_no_torch_and_stays_small(worker: WorkerProcess) -> None:
    maps = Path(f"/proc/{worker.pid}/maps").read_text()
    assert "torch" not in maps and "numpy" not in maps
    status = Path(f"/proc/{worker.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None and int(found[1]) < 120 * 1024


def test_the_metrics_count_what_was_done(worker: WorkerProcess) -> None:
    names = ("images_total", "steps_total", re.escape('requests_total{code="OK",route="generations"}'))
    before = [metric(worker, name) for name in names]
    worker.image(prompt="a red digit seven", n=2, num_inference_steps=3)
    after = [metric(worker, name) for name in names]
    assert (after[0] - before[0], after[2] - before[2]) == (2, 1)
    assert after[1] - before[1] >= 3


def test_an_image_is_a_whole_png(worker: WorkerProcess) -> None:
    answer = worker.request_images(prompt="a red digit seven", seed=1, num_inference_steps=1)
    assert base64.b64decode(answer.json()["data"][0]["b64_json"]).startswith(b"\x89PNG\r\n\x1a\n")
