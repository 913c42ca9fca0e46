# SPDX-License-Identifier: Apache-2.0
"""Answers with images: formats, files, quality, timings, provenance, and fields of OpenAI that have no effect here."""

import asyncio
import base64
import io
import json
import random
import zipfile
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai.types import ImagesResponse
from openai.types.image_edit_params import ImageEditParamsStreaming
from openai.types.image_generate_params import ImageGenerateParamsStreaming
from PIL import Image

from diffusion_worker.config import RequestDefaults, RequestLimits, StepCache
from diffusion_worker.messages import ModelInfo, Recipe, RequestSpec
from diffusion_worker.server.encoding.chunked import PIECE_BYTES, PiecedResponse, cut, json_with_file
from diffusion_worker.server.images.edits import EditRequest
from diffusion_worker.server.schemas.images import OURS, REFUSED, ImagesRequest
from support.worker.fake_rank_group import FAKE_STAGES, FakeRankGroup, fake_digest, fake_identity, fake_pixels
from support.worker.process import decode_image
from support.worker.server_edge import Edge, serving_edge


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    async with serving_edge(max_batch_size=2) as edge:
        yield edge


def stored_provenance(image: Image.Image) -> dict[str, Any]:
    """Return the provenance in an image's own metadata: a text of a PNG, the Exif description of any other format."""
    text = image.info["provenance"] if image.format == "PNG" else image.getexif()[0x010E]
    found: dict[str, Any] = json.loads(text)
    return found


# Formats


@pytest.mark.parametrize("output_format", ["png", "jpeg", "webp"])
async def test_each_output_format_is_answered_as_such(edge: Edge, output_format: str) -> None:
    answer = (await edge.request_images(prompt="p kumquatfen", seed=3, size="48x32", output_format=output_format)).json()
    image = decode_image(answer["data"][0]["b64_json"])
    assert (answer["output_format"], answer["size"], answer["background"]) == (output_format, "48x32", "opaque")
    assert (image.format, image.size) == (output_format.upper(), (48, 32))


@pytest.mark.parametrize("output_format", ["jpeg", "webp"])
async def test_less_compression_makes_larger_files(edge: Edge, output_format: str) -> None:
    sizes = []
    for quality in (0, 50, 100):
        answer = await edge.request_images(prompt="p kumquatfen", seed=3, output_format=output_format, output_compression=quality)
        sizes.append(len(answer.json()["data"][0]["b64_json"]))
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        ({"output_compression": 50}, "output_compression", "100 for png, which is lossless"),
        ({"output_compression": 50, "output_format": "png"}, "output_compression", "jpeg or webp"),
        ({"output_compression": 101, "output_format": "jpeg"}, "output_compression", "found 101"),
        ({"output_compression": -1, "output_format": "jpeg"}, "output_compression", "found -1"),
        ({"output_format": "gif"}, "output_format", "'png', 'jpeg' or 'webp'"),
        ({"output_format": "svg"}, "output_format", "found 'svg'"),
        ({"quality": "best"}, "quality", "found 'best'"),
        ({"partial_images": 2}, "partial_images", "0 without stream"),
        ({"stream_options": {"include_progress": True}}, "stream_options", "none without stream"),
        ({"stream_options": {"include": True}, "stream": True}, "stream_options.include", "unknown field"),
        ({"partial_images": 4, "stream": True}, "partial_images", "found 4"),
        ({"response_format": "file", "stream": True}, "response_format", "b64_json with stream"),
        ({"response_format": "url", "stream": True}, "response_format", "b64_json with stream"),
        ({"stream": "yes"}, "stream", "found 'yes'"),
        ({"lora_scale": 0.5}, "lora_scale", "no adapter, only the base model"),
        ({"lora_scale": 5.0}, "lora_scale", "found 5.0"),
    ],
)
async def test_what_cannot_be_answered_is_refused_by_name(edge: Edge, body: dict[str, Any], field: str, says: str) -> None:
    answer = await edge.request_images(prompt="p kumquatfen", **body)
    assert (answer.status_code, answer.json()["error"]["code"], answer.json()["error"]["param"]) == (400, "InvalidRequest", field)
    assert says in answer.json()["error"]["message"]


async def test_a_file_is_the_image_itself(edge: Edge) -> None:
    answer = await edge.request_images(prompt="p kumquatfen", seed=3, response_format="file", output_format="webp")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "image/webp")
    image = Image.open(io.BytesIO(answer.content))
    assert (image.format, stored_provenance(image)["seed"]) == ("WEBP", 3)


async def test_several_files_are_a_zip_in_the_order_of_their_seeds(edge: Edge) -> None:
    answer = await edge.request_images(prompt="p kumquatfen", seed=3, n=2, response_format="file")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/zip")
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        assert archive.namelist() == ["0.png", "1.png"]
        images = [Image.open(io.BytesIO(archive.read(name))) for name in archive.namelist()]
    expected = [fake_pixels(RequestSpec(request_id="", prompt="p kumquatfen", seed=seed)) for seed in (3, 4)]
    assert [image.tobytes() for image in images] == expected


# Provenance, timings, quality


@pytest.mark.parametrize("output_format", ["png", "jpeg", "webp"])
async def test_the_answer_and_the_image_itself_say_what_made_it_and_not_from_which_words(edge: Edge, output_format: str) -> None:
    await edge.put_adapter("stripes", "/loras/stripes")
    body = {
        "prompt": "words of mine kumquatfen",
        "model": "stripes",
        "lora_scale": 0.5,
        "seed": 3,
        "num_inference_steps": 2,
        "guidance_scale": 1.5,
    }
    item = (await edge.request_images(**body, output_format=output_format)).json()["data"][0]
    provenance = item["provenance"]
    expected = {"model": "digits", "pipeline": "FakePipeline", "seed": 3, "steps": 2, "guidance_scale": 1.5, "width": 64, "height": 64}
    assert {name: provenance[name] for name in expected} == expected
    assert provenance["adapters"] == [
        {"name": "stripes", "digest": fake_digest("/loras/stripes"), "scale": 0.5, "identity": fake_identity("/loras/stripes")}
    ]
    assert stored_provenance(decode_image(item["b64_json"])) == provenance
    assert b"words of mine" not in base64.b64decode(item["b64_json"]) + json.dumps(provenance).encode()


async def test_timings_and_peak_memory_of_each_image_are_answered_on_request_only(edge: Edge) -> None:
    [plain] = (await edge.request_images(prompt="p kumquatfen")).json()["data"]
    assert not {"timings", "peak_memory_bytes"} & set(plain)
    for item in (await edge.request_images(prompt="p kumquatfen", n=2, timings=True)).json()["data"]:
        timings = item["timings"]
        assert list(timings) == ["queue", "encode", "denoise", "decode", "post", "total"]
        assert (timings["denoise"], timings["decode"]) == (FAKE_STAGES.denoise, FAKE_STAGES.decode)
        assert timings["total"] > 0 and timings["queue"] >= 0
        assert item["peak_memory_bytes"] == FAKE_STAGES.peak_bytes


@pytest.mark.parametrize(
    ("asked", "with_cache"),
    [
        *((name, "medium") for name in (None, "auto", "standard", "low", "medium")),
        *((name, "high") for name in ("high", "hd", "xhigh", "max")),
    ],
)
async def test_quality_chooses_the_accelerated_path_or_every_step_and_the_answer_says_which_ran(asked: str | None, with_cache: str) -> None:
    for step_cache, expected in ((StepCache.FIRST_BLOCK, with_cache), (StepCache.NONE, "high")):
        async with serving_edge(step_cache=step_cache) as edge:
            answer = (await edge.request_images(prompt="p kumquatfen", quality=asked)).json()
        assert (answer["quality"], answer["data"][0]["provenance"]["accelerated"]) == (expected, expected == "medium")


async def test_an_exact_request_is_never_accelerated() -> None:
    async with serving_edge(step_cache=StepCache.FIRST_BLOCK) as edge:
        answer = (await edge.request_images(prompt="p kumquatfen", quality="low", exact=True)).json()
    assert answer["quality"] == "high"


@pytest.mark.parametrize(
    ("body", "exact"), [({"quality": "max"}, True), ({"quality": "max", "exact": False}, False), ({"quality": "xhigh"}, False)]
)
async def test_the_highest_quality_is_exact_unless_the_request_says_otherwise(edge: Edge, body: dict[str, Any], exact: bool) -> None:
    answer = (await edge.request_images(prompt="p kumquatfen", **body)).json()
    assert answer["data"][0]["provenance"]["exact"] is exact


# OpenAI's own fields


@pytest.mark.parametrize(
    "body",
    [
        {"user": "somebody"},
        {"safety_identifier": "a hash"},
        {"background": "auto"},
        {"background": "opaque"},
        {"moderation": "low"},
        {"moderation": "auto"},
        {"partial_images": 0},
        {"style": "vivid"},
        {"style": "natural"},
        {"complexity": "high"},
        {"output_compression": 100},
        {"output_compression": 100, "output_format": "png"},
        {name: None for name in ImagesRequest.model_fields if name != "prompt"},
    ],
)
async def test_fields_that_ask_for_nothing_that_could_be_missed_are_accepted(edge: Edge, body: dict[str, Any]) -> None:
    assert (await edge.request_images(prompt="p kumquatfen", **body)).status_code == 200


# Requests of programs, by what their sources show (docs/clients.md).
PROGRAMS: dict[str, dict[str, Any]] = {
    "Home Assistant": {"n": 1, "quality": "standard", "style": "vivid", "size": "1024x1024", "response_format": "url"},
    "LibreChat": {"n": 1, "background": "auto", "output_format": "png", "quality": "auto", "size": "auto"},
    "n8n": {"response_format": "b64_json", "quality": "hd", "size": "1024x1024", "style": "natural"},
    "Spring AI": {"n": 1, "quality": "standard", "response_format": "b64_json", "size": "1024x1024", "style": "vivid", "user": "u"},
}


@pytest.mark.parametrize("program", PROGRAMS)
async def test_the_request_of_a_program_makes_an_image(edge: Edge, program: str) -> None:
    answer = await edge.request_images(prompt="p kumquatfen", model="digits", **PROGRAMS[program])
    found = answer.json()["data"][0]
    assert decode_image(found.get("b64_json") or found["url"].removeprefix("data:image/png;base64,")).format == "PNG"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("svg", {"model": "m"}),
        ("frame_count", 4),
        ("frame_duration_ms", 100),
        ("background", "transparent"),
        ("input_fidelity", "high"),
        ("image", "an image"),
        ("mask", "an image"),
    ],
)
async def test_fields_that_mean_nothing_here_are_refused_with_what_is_possible(edge: Edge, field: str, value: object) -> None:
    answer = await edge.request_images(prompt="p kumquatfen", **{field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert REFUSED[field] in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "ours"),
    [
        ("steps", "num_inference_steps"),
        ("cfg_scale", "guidance_scale"),
        ("guidance", "guidance_scale"),
        ("width", "size"),
        ("height", "size"),
    ],
)
async def test_a_field_by_another_programs_name_is_refused_with_ours(edge: Edge, field: str, ours: str) -> None:
    answer = await edge.request_images(prompt="p kumquatfen", **{field: 5})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert answer.json()["error"]["message"] == f"{field}: unknown field; use {ours}"


def test_every_other_name_stands_for_a_field_of_ours_and_is_none_itself() -> None:
    assert set(OURS.values()) <= set(EditRequest.model_fields)
    assert not set(OURS) & (set(EditRequest.model_fields) | set(REFUSED))


async def test_a_seed_of_minus_one_is_random(edge: Edge) -> None:
    seeds = {(await edge.request_images(prompt="p kumquatfen", seed=-1)).json()["data"][0]["seed"] for _ in range(3)}
    assert len(seeds) == 3 and min(seeds) >= 0


async def test_a_whole_answer_counts_no_tokens_in_all_of_the_sdks_fields(edge: Edge) -> None:
    answer = ImagesResponse.model_validate((await edge.request_images(prompt="p kumquatfen")).json())
    assert answer.usage is not None and answer.usage.output_tokens_details is not None
    usage = answer.usage.model_dump()
    numbers = [*usage.pop("input_tokens_details").values(), *usage.pop("output_tokens_details").values(), *usage.values()]
    assert numbers == [0] * 7


def test_no_field_of_the_sdk_is_unknown_here() -> None:
    edits = set(ImageEditParamsStreaming.__annotations__) - set(ImageGenerateParamsStreaming.__annotations__)
    for field in ImageGenerateParamsStreaming.__annotations__:
        assert field in ImagesRequest.model_fields, field
    assert edits - {"markup"} <= set(REFUSED)


@pytest.mark.parametrize("field", ["negative_prompt", "model", "user", "safety_identifier", "prompt", "size", "quality"])
async def test_half_of_a_surrogate_pair_is_no_text(edge: Edge, field: str) -> None:
    content = json.dumps({"prompt": "p kumquatfen"} | {field: "\ud800"})
    answer = await edge.data.post("/v1/images/generations", content=content, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


# Defaults and limits of the worker's options


async def test_what_a_request_leaves_open_is_taken_from_the_options() -> None:
    defaults = RequestDefaults(steps=3, guidance_scale=2.5, width=48, height=32)
    async with serving_edge(defaults=defaults) as edge:
        [item] = (await edge.request_images(prompt="p kumquatfen", seed=1)).json()["data"]
        [own] = (await edge.request_images(prompt="p kumquatfen", seed=1, size="32x32", num_inference_steps=1, guidance_scale=0.0)).json()[
            "data"
        ]
    spec = RequestSpec(request_id="", prompt="p kumquatfen", seed=1, steps=3, guidance_scale=2.5, width=48, height=32)
    assert decode_image(item["b64_json"]).tobytes() == fake_pixels(spec)
    assert (item["provenance"]["steps"], item["provenance"]["guidance_scale"]) == (3, 2.5)
    assert (own["provenance"]["steps"], own["provenance"]["guidance_scale"], own["provenance"]["width"]) == (1, 0.0, 32)


@pytest.mark.parametrize(
    ("body", "field", "limit"),
    [
        ({"n": 3}, "n", "1 to 2"),
        ({"num_inference_steps": 6}, "num_inference_steps", "1 to 5"),
        ({"size": "64x72"}, "size", "at most 4096 pixels"),
        ({"prompt": "p kumquatfen?"}, "prompt", "at most 12 characters"),
    ],
)
async def test_a_request_over_a_limit_of_the_options_is_refused_with_the_limit(body: dict[str, Any], field: str, limit: str) -> None:
    limits = RequestLimits(max_images=2, max_steps=5, max_pixels=4096, max_prompt_chars=12)
    async with serving_edge(limits=limits) as edge:
        refused = await edge.request_images(**{"prompt": "p kumquatfen", **body})
        fits = await edge.request_images(prompt="p kumquatfen", n=2, num_inference_steps=5, size="64x64")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    assert limit in refused.json()["error"]["message"]
    assert fits.status_code == 200


OWN_DEFAULTS = ModelInfo("P", "float32", size_multiple=8, weights_bytes=1, default_width=64, default_height=48, default_steps=50)


@pytest.mark.parametrize(("max_steps", "made"), [(20, 20), (50, 50), (200, 50)])
async def test_a_request_that_says_no_steps_never_gets_more_than_the_limit(max_steps: int, made: int) -> None:
    async with serving_edge(model=OWN_DEFAULTS, limits=RequestLimits(max_steps=max_steps)) as edge:
        [item] = (await edge.request_images(prompt="p kumquatfen", seed=1, size="32x32")).json()["data"]
        card = (await edge.data.get("/v1/models/digits")).json()
    spec = RequestSpec(request_id="", prompt="p kumquatfen", seed=1, steps=made, width=32, height=32)
    assert decode_image(item["b64_json"]).tobytes() == fake_pixels(spec), "so many were asked of the ranks"
    assert (item["provenance"]["steps"], card["defaults"]["num_inference_steps"]) == (made, made)


async def test_a_recipe_of_more_steps_than_the_limit_is_refused() -> None:
    group = FakeRankGroup()
    group.adapter_recipes["/loras/stripes"] = Recipe(steps=8)
    edge = Edge(group, limits=RequestLimits(max_steps=7))
    await edge.engine.start()
    await edge.put_adapter("stripes", "/loras/stripes")
    refused = await edge.request_images(prompt="p kumquatfen", model="stripes")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "num_inference_steps")
    await edge.engine.terminate()


# Large answers


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 2])
def test_a_file_in_pieces_is_the_same_file_and_no_piece_is_large(size: int) -> None:
    file = random.Random(size).randbytes(size)
    pieces = json_with_file(file, {"seed": 3})
    document = json.loads(b"".join(pieces))
    assert (base64.b64decode(document["b64_json"], validate=True), document["seed"]) == (file, 3)
    assert max(map(len, pieces)) <= PIECE_BYTES * 4 // 3
    assert b"".join(cut(file)) == file


async def test_a_large_answer_says_its_length_and_lets_the_loop_turn_between_its_pieces() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    pieces = [b"x" * 1000] * 50
    counting = asyncio.create_task(count())
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    await PiecedResponse(pieces, "image/png")({"type": "http"}, receive, send)
    counting.cancel()
    assert (b"content-length", b"50000") in sent[0]["headers"]
    assert b"".join(message["body"] for message in sent[1:]) == b"".join(pieces)
    assert turns >= 50
