# SPDX-License-Identifier: Apache-2.0
"""Steps, previews, timings and provenance of images of the real model through the real server, one rank and two."""

import base64
import io
import json
import threading
from typing import Any

import numpy as np
import pytest
from PIL import Image

from diffusion_worker.engine.startup.model_digest import digest_of
from support.worker.process import DIGITS_MODEL, WorkerProcess

pytestmark = pytest.mark.slow

ASKED: dict[str, Any] = {"prompt": "a blue digit four", "seed": 5, "num_inference_steps": 6, "guidance_scale": 3.0, "size": "64x64"}
STAGES = ("queue", "encode", "denoise", "decode", "post")


def events(worker: WorkerProcess, **body: Any) -> list[dict[str, Any]]:
    """Post a streaming request and read the whole answer; return the parsed `data:` lines, without the final [DONE]."""
    text = worker.request_images(**{"stream": True, "stream_options": {"include_progress": True}} | body).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def pixels(b64_json: str) -> Any:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(b64_json))).convert("RGB"), np.int16)


def check_stream(worker: WorkerProcess) -> None:
    plain = worker.request_images(**ASKED).json()["data"][0]
    heard = events(worker, partial_images=2, **ASKED)
    kinds = [event["type"].rpartition(".")[2] for event in heard]
    assert kinds == ["progress", "progress", "partial_image", "progress", "progress", "partial_image", "progress", "progress", "completed"]
    told = [event for event, kind in zip(heard, kinds, strict=True) if kind == "progress"]
    assert [(event["step"], event["steps"]) for event in told] == [(step, 6) for step in range(1, 7)]
    image = pixels(plain["b64_json"])
    assert np.array_equal(pixels(heard[-1]["b64_json"]), image)
    off = [np.abs(pixels(heard[place]["b64_json"]) - image).mean() for place in (2, 5)]
    assert off[0] > off[1] > 0


def test_a_stream_tells_every_step_shows_the_way_and_ends_with_the_image_that_is_made_without_one(worker: WorkerProcess) -> None:
    check_stream(worker)


def test_two_ranks_tell_and_show_the_same(worker_of_two: WorkerProcess) -> None:
    check_stream(worker_of_two)


def test_the_stages_of_an_image_are_told_on_request_and_add_up_to_no_more_than_it_took(worker: WorkerProcess) -> None:
    first = worker.request_images(timings=True, **ASKED | {"prompt": "a green digit three that was never asked for", "n": 2}).json()["data"]
    again = worker.request_images(timings=True, **ASKED | {"prompt": "a green digit three that was never asked for"}).json()["data"]
    assert "timings" not in worker.request_images(**ASKED).json()["data"][0]
    for image in [*first, *again]:
        timings = image["timings"]
        assert set(timings) == {*STAGES, "total"}
        assert 0 < sum(timings[stage] for stage in STAGES) < timings["total"]
        assert timings["denoise"] > timings["decode"] > 0
        assert timings["post"] > 0
        assert image["peak_memory_bytes"] is None  # a CPU has no such figure
    assert first[0]["timings"]["encode"] > 0
    assert again[0]["timings"]["encode"] == 0  # the prompt is in the cache


def test_what_an_image_says_it_was_made_by_makes_it_again(worker: WorkerProcess) -> None:
    made = worker.request_images(**ASKED | {"seed": None, "model": "stripes", "lora_scale": 0.7}).json()["data"][0]
    told = made["provenance"]
    (adapter,) = told["adapters"]
    assert (adapter["name"], adapter["scale"]) == ("stripes", 0.7)
    worker.wait_until(lambda: worker.state()["model"]["digest"], what="the digest of the model")
    again = worker.request_images(
        prompt=ASKED["prompt"],
        model=adapter["name"],
        lora_scale=adapter["scale"],
        seed=made["seed"],
        num_inference_steps=told["steps"],
        guidance_scale=told["guidance_scale"],
        size=f"{told['width']}x{told['height']}",
        exact=told["exact"],
    ).json()["data"][0]
    assert np.array_equal(pixels(again["b64_json"]), pixels(made["b64_json"]))
    assert again["provenance"]["digest"] == worker.state()["model"]["digest"] == digest_of(DIGITS_MODEL, threading.Event())
