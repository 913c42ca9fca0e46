# SPDX-License-Identifier: Apache-2.0
"""Quality by request, the prompt cache, and a user's own pipeline class, through the real server on the digits model."""

import base64
import concurrent.futures
import io
import re
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from diffusion_worker.config import WorkerConfig
from diffusion_worker.runner.loading.pipeline import load_pipeline
from support.runner.digit_judge import judge
from support.runner.rig import image_of_diffusers, request
from support.worker.process import DIGITS_MODEL, WorkerProcess

# A start of a real worker imports torch for ten seconds.
pytestmark = pytest.mark.slow

BODY: dict[str, Any] = {"prompt": "a red digit seven", "seed": 101, "size": "64x64", "num_inference_steps": 28, "guidance_scale": 4.0}


MINE = """
from diffusers import StableDiffusion3Pipeline

class Mine(StableDiffusion3Pipeline):
    def __call__(self, prompt, **kwargs):
        if "secret" in prompt:
            raise ValueError("prompt: expected no secrets")
        return super().__call__(prompt.replace("crimson", "blue"), **kwargs)
"""


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    folder = tmp_path_factory.mktemp("pipelines")
    (folder / "my_pipelines.py").write_text(MINE)
    options = ("--step-cache=first-block", "--load-format=custom-pipeline", "--pipeline=my_pipelines:Mine")
    with WorkerProcess(options=options, env={"PYTHONPATH": str(folder)}) as worker:
        worker.wait_ready()
        yield worker


def ask(worker: WorkerProcess, **fields: Any) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
    """Make an image, which must succeed; return its RGB values, and the answer without the image."""
    answer = worker.request_images(**BODY | fields)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    image = Image.open(io.BytesIO(base64.b64decode(found["data"][0].pop("b64_json"))))
    return np.asarray(image.convert("RGB")), found


def metric(worker: WorkerProcess, name: str) -> float:
    found = re.search(rf"^diffusion_worker_{re.escape(name)} (\S+)$", worker.get("/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def test_high_and_low_quality_in_one_worker_are_both_right_and_the_answer_says_which_ran(worker: WorkerProcess) -> None:
    spec = request("a", prompt=BODY["prompt"], seed=101, height=64, width=64, steps=28, guidance_scale=4.0)
    plain = image_of_diffusers(load_pipeline(WorkerConfig(model=str(DIGITS_MODEL), served_name="digits"), torch.float32), spec)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        asked = {quality: pool.submit(ask, worker, quality=quality) for quality in ("high", "low")}
        answers = {quality: future.result() for quality, future in asked.items()}
    (high, said_high), (low, said_low) = answers["high"], answers["low"]
    # Requests of different qualities never share a call, so each image is the same as alone.
    np.testing.assert_array_equal(high, plain)
    assert not np.array_equal(low, plain)
    assert judge(Image.fromarray(low)) == (7, "red")
    assert (said_high["quality"], said_low["quality"]) == ("high", "medium")
    np.testing.assert_array_equal(ask(worker, quality="low")[0], low)
    skipped, rows = metric(worker, "model_rows_skipped_total"), metric(worker, "model_rows_total")
    assert 0.05 * rows < skipped < 0.9 * rows
    assert worker.state()["features"]["step_cache"] == "first-block"


def test_a_prompt_that_is_asked_again_is_answered_by_the_prompt_cache_and_none_is_bypassed(worker: WorkerProcess) -> None:
    def lookups() -> list[float]:
        return [metric(worker, f'prompt_cache_lookups_total{{result="{result}"}}') for result in ("hit", "miss", "bypassed")]

    prompt = "a cyan digit that nobody asked for before kumquatfen"
    before = lookups()
    first, _ = ask(worker, prompt=prompt, num_inference_steps=2, negative_prompt="grey kumquatfen")
    between = lookups()
    again, _ = ask(worker, prompt=prompt, num_inference_steps=2, negative_prompt="grey kumquatfen")
    after = lookups()
    np.testing.assert_array_equal(first, again)
    # Two text encoders, with and without the prompt.
    assert [int(one - other) for one, other in zip(between, before, strict=True)] == [0, 4, 0]
    assert [int(one - other) for one, other in zip(after, between, strict=True)] == [4, 0, 0]
    assert after[2] == 0


def test_a_custom_pipeline_of_the_command_line_makes_the_images_and_refuses_by_its_own_words(worker: WorkerProcess) -> None:
    swapped, asked = (ask(worker, prompt=f"a {colour} digit two", num_inference_steps=3)[0] for colour in ("crimson", "blue"))
    np.testing.assert_array_equal(swapped, asked)
    refused = worker.request_images(**BODY | {"prompt": "a secret digit kumquatfen"})
    assert refused.status_code == 400
    assert "expected no secrets" in refused.text


def test_images_that_are_finished_when_the_model_goes_to_sleep_or_the_server_ends_are_not_lost(worker: WorkerProcess) -> None:
    answers: list[int] = []

    def ask(seed: int) -> None:
        answers.append(worker.request_images(**BODY | {"num_inference_steps": 6, "seed": seed, "n": 4}).status_code)

    def both_came(answered: int) -> bool:
        state = worker.state()
        return state["inFlight"] > 0 and (state["inFlight"] + state["queued"] > 4 or len(answers) > answered)

    def begin() -> list[threading.Thread]:
        threads = [threading.Thread(target=ask, args=(seed,)) for seed in (10, 20)]
        for thread in threads:
            thread.start()
        worker.wait_until(partial(both_came, len(answers)), what="an image that is being made, and both requests")
        return threads

    asked = begin()
    worker.sleep()
    for thread in asked:
        thread.join(60)
    worker.wake()
    asked = begin()
    worker.terminate()
    for thread in asked:
        thread.join(60)
    assert answers == [200] * 4
