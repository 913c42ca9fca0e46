# SPDX-License-Identifier: Apache-2.0
"""The OpenAI SDK on a real worker process over a real socket: every call of its images and models that the worker supports."""

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from openai import OpenAI
from openai.types import ImageGenCompletedEvent, ImageGenPartialImageEvent
from PIL import Image

from diffusion_worker.messages import RequestSpec
from support.worker.fake_rank_group import fake_pixels
from support.worker.process import FAKE_PROGRAM, WorkerProcess

# Starting a process and importing the SDK take longer than all of these tests.
pytestmark = pytest.mark.slow
KEY = "sk-of-the-worker"
PROGRESS = {"stream_options": {"include_progress": True}}
STREAMED = ("image_generation.partial_image", "image_generation.completed")


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """Start a server over fake ranks for the module. Clients need the key, a step takes 10 ms, and step caching is allowed."""
    key_path = tmp_path_factory.mktemp("key") / "key"
    key_path.write_text(KEY)
    env = {"FAKE_WORKER": json.dumps({"stepSeconds": 0.01})}
    with WorkerProcess(program=FAKE_PROGRAM, env=env, options=(f"--api-key-file={key_path}", "--step-cache=first-block")) as worker:
        worker.wait_ready()
        yield worker


@pytest.fixture
def client(worker: WorkerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{worker.url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


def image_of(b64_json: str | None) -> Image.Image:
    assert b64_json is not None
    image = Image.open(io.BytesIO(base64.b64decode(b64_json)))
    image.load()
    return image


def test_generate_answers_with_an_image(client: OpenAI) -> None:
    answer = client.images.generate(model="digits", prompt="a red seven kumquatfen", size="48x32", extra_body={"seed": 7})
    assert answer.data is not None and len(answer.data) == 1
    assert answer.created > 0
    assert (answer.output_format, answer.size, answer.quality, answer.background) == ("png", "48x32", "medium", "opaque")
    expected = fake_pixels(RequestSpec(request_id="", prompt="a red seven kumquatfen", seed=7, width=48, height=32))
    assert image_of(answer.data[0].b64_json).tobytes() == expected
    assert answer.data[0].model_extra is not None and answer.data[0].model_extra["provenance"]["seed"] == 7
    assert answer._request_id


def test_generate_makes_several_images_with_every_field_that_the_sdk_has_for_them(client: OpenAI) -> None:
    answer = client.images.generate(
        model="digits",
        prompt="a red seven kumquatfen",
        n=2,
        size="auto",
        quality="high",
        output_format="webp",
        output_compression=80,
        background="opaque",
        moderation="low",
        response_format="b64_json",
        user="somebody",
        style="vivid",
        safety_identifier="a hash",
        extra_body={"timings": True, "negative_prompt": "blur kumquatfen", "guidance_scale": 3.0, "num_inference_steps": 2, "exact": True},
    )
    assert answer.data is not None
    assert [image_of(item.b64_json).format for item in answer.data] == ["WEBP", "WEBP"]
    assert answer.quality == "high"
    assert all((item.model_extra or {})["timings"]["total"] > 0 for item in answer.data)
    assert answer.usage is not None and answer.usage.total_tokens == 0


def test_a_stream_hands_on_partial_images_and_the_completed_one_and_our_steps_if_asked_for_by_their_type(client: OpenAI) -> None:
    extra = {"num_inference_steps": 6, **PROGRESS}
    with client.images.generate(model="digits", prompt="p kumquatfen", stream=True, partial_images=2, extra_body=extra) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds.count("image_generation.partial_image") == 2
    assert [getattr(event, "step", None) for event in events if event.type not in STREAMED] == [1, 2, 3, 4, 5, 6]
    partial = next(event for event in events if event.type == "image_generation.partial_image")
    completed = events[-1]
    assert isinstance(partial, ImageGenPartialImageEvent) and partial.partial_image_index == 0
    assert isinstance(completed, ImageGenCompletedEvent) and completed.usage.total_tokens == 0
    assert image_of(partial.b64_json).size == image_of(completed.b64_json).size == (64, 64)


def test_a_stream_has_the_events_of_openai_alone_unless_asked(client: OpenAI) -> None:
    with client.images.generate(prompt="p kumquatfen", stream=True, partial_images=2, extra_body={"num_inference_steps": 6}) as stream:
        assert [event.type for event in stream] == [STREAMED[0]] * 2 + [STREAMED[1]]


def test_variations_have_no_route_and_the_answer_says_what_makes_them(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no such route; POST /v1/images/edits without a mask makes variations"):
        client.images.create_variation(image=b"an image")


def test_models_are_listed_and_retrieved_with_what_they_can(client: OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == "digits" and model == client.models.retrieve("digits")
    extra = model.model_extra or {}
    assert extra["tasks"] == ["generate"] and extra["limits"]["max_steps"] == 200
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_a_raw_answer_can_be_a_file(client: OpenAI, tmp_path: Path) -> None:
    path = tmp_path / "seven.jpeg"
    body = {"prompt": "p kumquatfen", "response_format": "file", "output_format": "jpeg"}
    client.post("/images/generations", cast_to=openai.HttpxBinaryResponseContent, body=body).write_to_file(path)
    assert Image.open(path).format == "JPEG"


@pytest.fixture(scope="module")
def sleepy_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """Start a server over fake ranks whose policy is OnIdle; its wake takes 0.5 s."""
    desired = tmp_path_factory.mktemp("desired") / "desired.json"
    desired.write_text(json.dumps({"sleep": {"policy": "OnIdle"}}))
    env = {"FAKE_WORKER": json.dumps({"wakeSeconds": 0.5})}
    with WorkerProcess(program=FAKE_PROGRAM, env=env, options=(f"--desired={desired}",)) as worker:
        worker.wait_ready()
        yield worker


def test_a_stream_of_a_sleeping_model_reads_on_over_the_events_of_its_wake(sleepy_worker: WorkerProcess) -> None:
    sleepy_worker.sleep()
    with OpenAI(base_url=f"{sleepy_worker.url}/v1", api_key="any", max_retries=0) as client:
        events = list(client.images.generate(prompt="p kumquatfen", stream=True, extra_body={"num_inference_steps": 2, **PROGRESS}))
    kinds = [event.type for event in events]
    held = [event for event, kind in zip(events, kinds, strict=True) if kind.endswith(".held")]
    assert {getattr(event, "state", None) for event in held} >= {"waking"} and {getattr(event, "ahead", None) for event in held} == {0}
    assert kinds[len(held) :] == ["image_generation.progress"] * 2 + ["image_generation.completed"]
    assert isinstance(events[-1], ImageGenCompletedEvent)


def test_a_request_without_a_stream_of_a_sleeping_model_just_takes_longer(sleepy_worker: WorkerProcess) -> None:
    sleepy_worker.sleep()
    with OpenAI(base_url=f"{sleepy_worker.url}/v1", api_key="any", max_retries=0) as client:
        answer = client.images.generate(prompt="p kumquatfen", extra_body={"timings": True})
    assert answer.data is not None and (answer.data[0].model_extra or {})["timings"]["queue"] >= 0.4
