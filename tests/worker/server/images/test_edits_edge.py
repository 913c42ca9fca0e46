# SPDX-License-Identifier: Apache-2.0
"""`/v1/images/edits` over a fake rank group: requests of the OpenAI SDK, the inputs of the ranks, and refusals by name."""

import base64
import io
import json
import struct
import time
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import msgspec
import openai
import pytest
from PIL import Image

from diffusion_worker.config import RequestLimits
from diffusion_worker.engine.requests.admission import InputImage, size_of_edit
from diffusion_worker.errors import ErrorCode
from diffusion_worker.messages import ErrorReport, ImageInput, ModelInfo, RequestSpec, Task
from diffusion_worker.server.encoding.decoders import Decoders
from diffusion_worker.server.encoding.input_images import MAX_FILE_BYTES, MAX_FILE_PIXELS, decode
from support.encoding.hostile_images import png_of
from support.worker.fake_rank_group import fake_pixels
from support.worker.process import decode_image
from support.worker.server_edge import Edge, serving_edge

SECRET = "a prompt that nobody else may read"
EVERY_TASK = [Task.GENERATE, Task.EDIT, Task.INPAINT]


def model(*tasks: Task, **fields: Any) -> ModelInfo:
    """Describe a fake model for these tasks, by default all of EVERY_TASK, with up to three input images; `fields` override the rest."""
    told: dict[str, Any] = {"pipeline": "FakePipeline", "dtype": "float32", "size_multiple": 8, "weights_bytes": 1}
    return ModelInfo(**told | {"tasks": list(tasks) or EVERY_TASK, "max_input_images": 3} | fields)


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    async with serving_edge(model=model()) as edge:
        yield edge


def red(width: int = 48, height: int = 32, form: str = "PNG", mode: str = "RGB", **saved: Any) -> bytes:
    """Encode a plain red image, 48x32 pixels unless the test needs another size; `saved` are options of Pillow's `save`."""
    return file_of(Image.new(mode, (width, height), "red"), form, **saved)


def file_of(image: Image.Image, form: str = "PNG", **saved: Any) -> bytes:
    """Encode an image in a format that Pillow knows by the name `form`; `saved` are options of Pillow's `save`."""
    out = io.BytesIO()
    image.save(out, form, **saved)
    return out.getvalue()


def half_mask(width: int = 48, height: int = 32) -> bytes:
    """Return a mask in OpenAI's form: the left half is fully transparent."""
    image = Image.new("RGBA", (width, height), (0, 0, 0, 255))
    image.paste((9, 9, 9, 0), (0, 0, width // 2, height))
    return file_of(image)


def huge_png(width: int, height: int) -> bytes:
    """Make a PNG whose header claims `width` x `height` pixels, although no row of pixels follows."""
    return png_of(width, height, zlib.compress(b""))


async def edit(edge: Edge, files: Any = None, **fields: Any) -> httpx2.Response:
    """Post an edit of a red image, or of these files, and return the answer; a field that is None is not sent."""
    sent = files if files is not None else {"image": ("red.png", red(), "image/png")}
    texts = {name: str(value) for name, value in ({"prompt": "p kumquatfen", "seed": 1} | fields).items() if value is not None}
    return await edge.data.post("/v1/images/edits", data=texts, files=sent)


def image_of(answer: httpx2.Response) -> Image.Image:
    assert answer.status_code == 200, answer.text
    return decode_image(answer.json()["data"][0]["b64_json"])


def refusal(answer: httpx2.Response, field: str) -> str:
    """Assert that an answer refuses this field by name with status 400 and is short; return its message."""
    assert answer.status_code == 400, answer.text
    problem = answer.json()["error"]
    assert (problem["code"], problem["param"]) == ("InvalidRequest", field)
    assert field in problem["message"] or (field == "body" and "the body" in problem["message"])
    assert len(answer.text) < 600
    return str(problem["message"])


@asynccontextmanager
async def sdk(edge: Edge) -> AsyncIterator[openai.AsyncOpenAI]:
    """Provide the OpenAI SDK as a client of the edge's application."""
    client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=edge.data_application))
    async with openai.AsyncOpenAI(base_url="http://worker/v1", api_key="none", http_client=client, max_retries=0) as found:
        yield found


async def test_a_field_that_is_wrong_in_any_case_is_refused_before_an_image_is_decoded(edge: Edge) -> None:
    no_image = {"image": ("red.png", b"no image at all", "image/png")}
    assert "1 to" in refusal(await edit(edge, no_image, num_inference_steps=100_000), "num_inference_steps")
    assert "a text" in refusal(await edit(edge, no_image, prompt=" "), "prompt")
    refusal(await edit(edge, no_image), "image")


async def test_an_edit_as_the_openai_sdk_sends_it_reaches_the_ranks_with_its_pixels(edge: Edge) -> None:
    async with sdk(edge) as client:
        made = await client.images.edit(
            image=io.BytesIO(red()), prompt="a blue one kumquatfen", model="digits", n=2, size="64x48", output_format="png", quality="high",
            response_format="b64_json", user="somebody", background="opaque", input_fidelity="low",
            extra_body={"seed": 7, "num_inference_steps": 3, "guidance_scale": 2.5, "negative_prompt": "blur kumquatfen", "strength": 0.5},
        )  # fmt: skip
    assert made.data is not None and len(made.data) == 2
    frame = Image.new("RGB", (48, 32), "red").tobytes()
    for seed, item in zip((7, 8), made.data, strict=True):
        spec = RequestSpec(
            request_id="", prompt="a blue one kumquatfen", seed=seed, width=64, height=48, steps=3, guidance_scale=2.5,
            negative_prompt="blur kumquatfen", task=Task.EDIT, images=[ImageInput(0, (32, 48, 3))], strength=0.5,
        )  # fmt: skip
        assert decode_image(str(item.b64_json)).tobytes() == fake_pixels(spec, frames=[frame])


async def test_several_images_and_a_mask_are_an_inpainting_of_the_first(edge: Edge) -> None:
    async with sdk(edge) as client:
        made = await client.images.edit(
            image=[red(), ("second.webp", red(16, 16, "WEBP", lossless=True))],
            mask=half_mask(),
            prompt="p kumquatfen",
            extra_body={"seed": 1},
        )
    mask = bytes([255] * 24 + [0] * 24) * 32
    frames = [Image.new("RGB", (48, 32), "red").tobytes(), Image.new("RGB", (16, 16), "red").tobytes(), mask]
    images = [ImageInput(0, (32, 48, 3)), ImageInput(1, (16, 16, 3))]
    spec = RequestSpec(
        request_id="", prompt="p kumquatfen", seed=1, width=48, height=32, task=Task.INPAINT, images=images, mask=ImageInput(2, (32, 48, 1))
    )
    assert made.data is not None
    assert decode_image(str(made.data[0].b64_json)).tobytes() == fake_pixels(spec, frames=frames)


@pytest.mark.parametrize("mode", ["1", "L", "RGB", "RGBA", "P"])
@pytest.mark.parametrize("form", ["PNG", "WEBP"])
async def test_a_mask_without_transparency_paints_its_white_part_again(edge: Edge, mode: str, form: str) -> None:
    mask = Image.new("RGB", (48, 32), "black")
    mask.paste("white", (0, 0, 24, 32))
    files = {"image": red(), "mask": file_of(mask.convert(mode), form, **({"lossless": True} if form == "WEBP" else {}))}
    by_alpha = await edit(edge, {"image": red(), "mask": half_mask()})
    assert image_of(await edit(edge, files)).tobytes() == image_of(by_alpha).tobytes()


@pytest.mark.parametrize(
    "lora", [{"name": "stripes", "scale": 0.5}, [{"lora_name": "stripes", "lora_scale": 0.5, "path": "/loras/stripes"}]]
)
async def test_the_adapters_of_an_edit_are_json_in_the_form(edge: Edge, lora: Any) -> None:
    await edge.put_adapter("stripes", "/loras/stripes")
    async with sdk(edge) as client:
        made = await client.images.edit(image=red(), prompt="p kumquatfen", extra_body={"lora": json.dumps(lora)})
    assert made.data is not None and made.data[0].model_extra is not None
    (adapter,) = made.data[0].model_extra["provenance"]["adapters"]
    assert (adapter["name"], adapter["scale"]) == ("stripes", 0.5)


@pytest.mark.parametrize(
    ("field", "lora"),
    [
        ("lora", "stripes"),
        ("lora", "{"),
        ("lora", "[1e999]"),
        ("lora", "[" * 100_000),
        ("lora", '{"name":' * 100_000),
        ("lora[0].scale", '{"name": "stripes", "scale": "0.5"}'),
        ("lora[0].scale", '{"name": "stripes", "scale": 5}'),
        ("lora[0].name", "[{}]"),
        ("lora[0].path", '{"name": "stripes", "path": "/etc/passwd"}'),
    ],
)
async def test_wrong_adapters_of_an_edit_are_refused_by_name(edge: Edge, field: str, lora: str) -> None:
    await edge.put_adapter("stripes", "/loras/stripes")
    refusal(await edit(edge, lora=lora), field)


async def test_an_edit_by_an_adapter_that_is_not_there_is_never_the_bases(edge: Edge) -> None:
    edge.ranks.adapter_errors["/loras/broken"] = ErrorReport(ErrorCode.INVALID_ADAPTER, "no config")
    await edge.put_adapter("broken", "/loras/broken")
    for name, expected in (("nobody", (404, "model_not_found")), ("broken", (422, "AdapterNotLoaded"))):
        for fields in ({"model": name}, {"lora": json.dumps({"name": name})}, {"model": name, "stream": "true"}):
            answer = await edit(edge, **fields)
            assert (answer.status_code, answer.json()["error"]["code"]) == expected, fields


async def test_adapters_that_an_sdk_took_apart_into_fields_are_refused_with_what_to_do(edge: Edge) -> None:
    async with sdk(edge) as client:
        with pytest.raises(openai.BadRequestError, match="lora: expected a JSON text"):
            await client.images.edit(image=red(), prompt="p kumquatfen", extra_body={"lora": {"name": "stripes"}})


@pytest.mark.parametrize(
    ("width", "height", "size"),
    [(48, 32, (48, 32)), (50, 39, (48, 32)), (3, 5, (8, 8)), (4096, 2048, (1448, 720)), (9000, 2, (9000, 8)), (400_000, 1, (131072, 8))],
)
async def test_an_edit_without_a_size_takes_that_of_its_image_within_limits(width: int, height: int, size: tuple[int, int]) -> None:
    found = size_of_edit(InputImage(b"", height, width), RequestLimits(max_pixels=1_048_576), model())
    assert found == size[::-1]


async def test_an_image_of_more_pixels_than_the_limit_is_scaled_down_before_it_is_sent_to_the_ranks() -> None:
    async with serving_edge(model=model(), limits=RequestLimits(max_pixels=64 * 64)) as edge:
        for form in ("PNG", "JPEG", "WEBP"):
            answer = await edit(edge, {"image": red(512, 256, form)}, size="auto")
            assert image_of(answer).size == (88, 40)


async def test_a_photograph_is_seen_as_its_exif_turns_it(edge: Edge) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert image_of(await edit(edge, {"image": red(64, 32, "JPEG", exif=exif)})).size == (32, 64)


async def test_transparent_parts_of_an_image_are_white_to_a_model_that_edits_and_a_mask_to_one_that_only_inpaints(edge: Edge) -> None:
    image = half_mask()
    spec = RequestSpec(
        request_id="", prompt="p kumquatfen", seed=1, width=48, height=32, task=Task.EDIT, images=[ImageInput(0, (32, 48, 3))]
    )
    rgb = (b"\xff" * 24 * 3 + b"\x00" * 24 * 3) * 32
    assert image_of(await edit(edge, {"image": image})).tobytes() == fake_pixels(spec, frames=[rgb])
    async with serving_edge(model=model(Task.INPAINT)) as inpainting:
        masked = RequestSpec(
            request_id="",
            prompt="p kumquatfen",
            seed=1,
            width=48,
            height=32,
            task=Task.INPAINT,
            images=spec.images,
            mask=ImageInput(1, (32, 48, 1)),
        )
        frames = [rgb, bytes([255] * 24 + [0] * 24) * 32]
        assert image_of(await edit(inpainting, {"image": image})).tobytes() == fake_pixels(masked, frames=frames)


async def test_an_image_can_be_a_data_url_and_nothing_is_fetched_from_elsewhere(edge: Edge) -> None:
    url = data_url(red())
    by_url = await edge.data.post(
        "/v1/images/edits", files=[("prompt", (None, "p kumquatfen")), ("seed", (None, "1")), ("url", (None, url))]
    )
    assert image_of(by_url).tobytes() == image_of(await edit(edge)).tobytes()
    for other in ("http://169.254.169.254/latest", "https://example.com/a.png", "file:///etc/passwd", "data:image/png,abc", url + "!"):
        answer = await edge.data.post("/v1/images/edits", files=[("prompt", (None, "p kumquatfen")), ("url", (None, other))])
        assert "expected a data: URL" in refusal(answer, "url")


@pytest.mark.parametrize("spelling", ["image", "image[]", "image[{}]", "images", "images[]", "images[{}]"])
@pytest.mark.parametrize("mask", ["mask", "mask[]", "mask[0]"])
async def test_images_and_mask_are_taken_by_every_spelling_in_their_order(edge: Edge, spelling: str, mask: str) -> None:
    first, second, third = red(), red(16, 16), red(24, 24)
    expected = await edit(edge, [("image[]", first), ("image[]", second), ("image[]", third), ("mask", half_mask())])
    parts = [(spelling.format(index), file) for index, file in enumerate((first, second, third))]
    # An index counts more than the place in the form.
    parts = parts[::-1] if "{}" in spelling else parts
    assert image_of(await edit(edge, [(mask, half_mask()), *parts])).tobytes() == image_of(expected).tobytes()


def data_url(file: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(file).decode()


async def edit_in_json(edge: Edge, *images: Any, **fields: Any) -> httpx2.Response:
    """Post an edit of these images, bytes or what stands in `images`, as JSON."""
    sent = [{"image_url": data_url(image)} if isinstance(image, bytes) else image for image in images]
    return await edge.data.post("/v1/images/edits", json={"prompt": "p kumquatfen", "seed": 1, "images": sent} | fields)


async def test_an_edit_in_json_is_the_edit_of_the_form(edge: Edge) -> None:
    await edge.put_adapter("stripes", "/loras/stripes")
    of_form = await edit(
        edge, [("image[]", red()), ("image[]", red(16, 16)), ("mask", half_mask())], strength=0.5, lora='{"name": "stripes"}'
    )
    in_json = await edit_in_json(
        edge, red(), red(16, 16), mask={"image_url": data_url(half_mask())}, strength=0.5, lora={"name": "stripes"}, input_fidelity="high"
    )
    assert image_of(in_json).tobytes() == image_of(of_form).tobytes()
    streamed = await edit_in_json(edge, red(), stream=True, stream_options={"include_progress": True})
    assert "event: image_edit.progress" in streamed.text and "event: image_edit.completed" in streamed.text


@pytest.mark.parametrize(
    ("images", "fields", "field", "says"),
    [
        ([], {}, "images", "at least 1 item"),
        ([red()] * 4, {}, "image", "1 to 3 images for FakePipeline, found 4"),
        ([{"file_id": "file-1"}], {}, "images[0].file_id", "no files are kept here"),
        ([red(), {}], {}, "images[1].image_url", "expected a data: URL, found none"),
        ([{"image_url": "https://example.com/a.png"}], {}, "images[0].image_url", "the worker fetches no others"),
        ([{"url": "x"}], {}, "images[0].url", "unknown field"),
        ([b"hello"], {}, "images[0].image_url", "5 bytes of another format"),
        ([red()], {"mask": {"image_url": data_url(half_mask(48, 40))}}, "mask.image_url", "48x32, found 48x40"),
        ([red()], {"mask": {"image_url": data_url(red())}}, "mask.image_url", "fully transparent pixels"),
        ([red()], {"image": data_url(red())}, "image", "expected images, a list of objects"),
        ([red()], {"n": "2"}, "n", "found '2'"),
        ([red()], {"steps": 2}, "steps", "unknown field; use num_inference_steps"),
    ],
)
async def test_a_wrong_edit_in_json_is_refused_by_field(
    edge: Edge, images: list[Any], fields: dict[str, Any], field: str, says: str
) -> None:
    assert says in refusal(await edit_in_json(edge, *images, **fields), field)


@pytest.mark.parametrize("content", [b"", b"x", b"null", b"[]", b'"p"', b"\xff\xfe", b"[" * 100_000, b"{} {}"])
async def test_an_edit_that_is_no_json_object_is_refused(edge: Edge, content: bytes) -> None:
    refusal(await edge.data.post("/v1/images/edits", content=content, headers={"content-type": "application/json"}), "body")


@pytest.mark.parametrize(
    ("files", "fields", "status", "says"),
    [
        ([("image[]", red())] * 4, {}, 400, "1 to 3 images for FakePipeline, found 4"),
        ([("image[]", red()), ("image[]", huge_png(9000, 9000))], {}, 400, f"at most {MAX_FILE_PIXELS} pixels, found 9000x9000"),
        ([("image[]", red()), ("image[]", b"hello")], {}, 400, "5 bytes of another format"),
        ([("image", red()), ("mask", half_mask(48, 40))], {}, 400, "the size of the first image, 48x32, found 48x40"),
        ([("image", red())], {"size": "50x32"}, 400, "multiples of 8"),
        ([("image", red())], {"model": "nobody"}, 404, "'nobody' is not known"),
    ],
)
@pytest.mark.parametrize("in_json", [False, True])
async def test_what_a_number_or_a_header_shows_is_refused_before_any_decoding(
    edge: Edge, monkeypatch: pytest.MonkeyPatch, files: Any, fields: dict[str, Any], status: int, says: str, in_json: bool
) -> None:
    async def decoded(*_: object) -> None:
        pytest.fail("an image was decoded")

    monkeypatch.setattr(Decoders, "decode", decoded)
    if in_json:
        images = [file for name, file in files if name != "mask"]
        masks = [{"image_url": data_url(file)} for name, file in files if name == "mask"]
        answer = await edit_in_json(edge, *images, **fields, mask=masks[0] if masks else None)
    else:
        answer = await edit(edge, files, **fields)
    assert (answer.status_code, says in answer.json()["error"]["message"]) == (status, True), answer.text


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("turned", [False, True])
async def test_a_mask_of_the_upright_size_fits_an_image_that_its_exif_turns(edge: Edge, form: str, turned: bool) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6 if turned else 1
    mask = half_mask(32, 48) if turned else half_mask()
    assert image_of(await edit(edge, {"image": red(48, 32, form, exif=exif), "mask": mask})).size == ((32, 48) if turned else (48, 32))


def padded_png(size: int) -> bytes:
    """Return a red PNG of this many bytes, most of them in a chunk that no reader needs."""
    image, kind = red(), b"prVt"
    padding = bytes(size - len(image) - 12)
    return image[:-12] + struct.pack(">I", len(padding)) + kind + padding + struct.pack(">I", zlib.crc32(kind + padding)) + image[-12:]


async def test_a_data_url_may_have_the_largest_file_and_no_larger_one(edge: Edge) -> None:
    for size, status in ((MAX_FILE_BYTES, 200), (MAX_FILE_BYTES + 1, 400)):
        url = data_url(padded_png(size))
        answer = await edge.data.post("/v1/images/edits", files=[("prompt", (None, "p kumquatfen")), ("url", (None, url))])
        assert answer.status_code == status, answer.text[:200]


@pytest.mark.parametrize(
    ("image", "form", "seen"),
    [
        (Image.new("L", (8, 8), 200), "PNG", (200, 200, 200)),
        (Image.new("1", (8, 8), 1), "PNG", (255, 255, 255)),
        (Image.new("LA", (8, 8), (10, 255)), "PNG", (10, 10, 10)),
        (Image.new("RGBA", (8, 8), (200, 0, 0, 0)), "WEBP", (255, 255, 255)),
        (Image.new("RGB", (8, 8), (1, 2, 3)).quantize(4), "PNG", (1, 2, 3)),
        (Image.new("I;16", (8, 8), 65535), "PNG", (255, 255, 255)),
        (Image.new("I;16", (8, 8), 257 * 100), "PNG", (100, 100, 100)),
        (Image.new("CMYK", (8, 8), (0, 0, 0, 0)), "JPEG", (255, 255, 255)),
    ],
)
def test_every_kind_of_image_becomes_its_colours(image: Image.Image, form: str, seen: tuple[int, int, int]) -> None:
    decoded = decode("image", file_of(image, form, **({"lossless": True} if form == "WEBP" else {})), max_pixels=64).image
    assert decoded == InputImage(bytes(seen) * 64, 8, 8)


BROKEN_FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "no bytes"),
    "a text": (lambda: b"hello", "5 bytes of another format"),
    "a GIF": (lambda: red(form="GIF"), "PNG, JPEG or WebP"),
    "a truncated PNG": (lambda: red(form="PNG")[:-40], "a whole PNG file"),
    "a truncated JPEG": (lambda: red(form="JPEG")[:-40], "a whole JPEG file"),
    "a truncated WebP": (lambda: red(form="WEBP")[:-8], "a whole WebP file"),
    "a WebP without an image": (lambda: b"RIFF\x04\x00\x00\x00WEBP", "a whole WebP file"),
    "no more than a PNG's first bytes": (lambda: b"\x89PNG\r\n\x1a\n", "a whole PNG file"),
    "a wide PNG": (lambda: huge_png(100_000, 100_000), f"at most {MAX_FILE_PIXELS} pixels"),
    "a wide WebP": (
        lambda: b"RIFF\x16\x00\x00\x00WEBPVP8X\x0a\x00\x00\x00" + bytes(4) + b"\xff\xff\x00\xff\xff\x00" + bytes(4),
        "65536x65536",
    ),
    "a wide JPEG": (
        lambda: b"\xff\xd8\xff\xc0\x00\x11\x08\xff\xff\xff\xff\x03\x01\x22\x00\x02\x11\x01\x03\x11\x01\xff\xda\x00\x02", "65535x65535"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BROKEN_FILES))
async def test_a_file_that_is_no_usable_image_is_refused_at_once_by_its_field(edge: Edge, name: str) -> None:
    make, says = BROKEN_FILES[name]
    content = make()
    started = time.process_time()
    assert says in refusal(await edit(edge, {"image": content}), "image")
    assert says in refusal(await edit(edge, {"mask": content, "image": red()}), "mask")
    # Refused by their first bytes they cost half a second of an idle core; a decoder that reads on takes minutes.
    assert time.process_time() - started < 30
    several = await edit(edge, [("image[]", red()), ("image[]", content)])
    assert says in refusal(several, "image[1]")


@pytest.mark.parametrize(
    ("fields", "files", "field", "says"),
    [
        ({}, {}, "body", "multipart/form-data"),
        ({}, {"mask": half_mask()}, "image", "found none"),
        ({}, {"image": red(), "mask": half_mask(48, 40)}, "mask", "expected the size of the first image, 48x32, found 48x40"),
        ({}, {"image": red(), "mask": red()}, "mask", "fully transparent pixels, or white ones"),
        ({}, {"image": red(), "mask": red(mode="RGBA")}, "mask", "for the part to paint again, found none"),
        ({}, {"image": red(), "mask": file_of(Image.new("RGBA", (48, 32), (255, 255, 255, 1)))}, "mask", "to paint again, found none"),
        ({}, {"image": red(), "markup": red()}, "markup", "no such field"),
        ({}, {"image": red(), "prompt": b"p"}, "prompt", "found a file"),
        ({}, {"image": red(), "nobody": b"p"}, "nobody", "found a file"),
        ({"mask": "x"}, {"image": red()}, "mask", "found a text"),
        ({"image": "x"}, {"image": red()}, "image", "expected a file"),
        ({"prompt": None}, {"image": red()}, "prompt", "required"),
        ({"prompt": ""}, {"image": red()}, "prompt", "0 characters"),
        ({"strength": 0}, {"image": red()}, "strength", "greater than 0"),
        ({"strength": 1.5}, {"image": red()}, "strength", "less than or equal to 1"),
        ({"strength": "nan"}, {"image": red()}, "strength", "finite"),
        ({"n": "two"}, {"image": red()}, "n", "found 'two'"),
        ({"stream": "perhaps"}, {"image": red()}, "stream", "found 'perhaps'"),
        ({"size": "50x32"}, {"image": red()}, "size", "multiples of 8"),
        ({"svg[model]": "m", "svg[reasoning][effort]": "low"}, {"image": red()}, "svg", "not supported: images consist of pixels"),
        ({}, [("image", red()), ("n", (None, "1")), ("n", (None, "1"))], "n", "a second one"),
        ({"background": "transparent"}, {"image": red()}, "background", "no transparency"),
        ({"nonsense": "1"}, {"image": red()}, "nonsense", "unknown field"),
        ({"x" * 3000: "1"}, {"image": red()}, "x" * 80 + "…", "unknown field"),
        ({}, [("image[]", red())] * 4, "image", "1 to 3 images for FakePipeline, found 4"),
        ({}, [("image[]", red())] * 18, "body", "Too many files"),
        ({f"f{number}": "1" for number in range(70)}, {"image": red()}, "body", "Too many fields"),
        ({}, [("image", red()), ("mask", half_mask()), ("mask", half_mask())], "mask", "a second one"),
    ],
)  # fmt: skip
async def test_a_wrong_form_is_refused_by_field(edge: Edge, fields: dict[str, Any], files: Any, field: str, says: str) -> None:
    assert says in refusal(await edit(edge, files, **fields), field)


@pytest.mark.parametrize(
    ("kind", "content", "says"),
    [
        ("text/plain", b'{"prompt": "p kumquatfen"}', "found the content type 'text/plain'"),
        ("", b"", "no content type"),
        ("multipart/form-data", b"--x--", "Missing boundary"),
        ("multipart/form-data; boundary=x", b"nonsense", "cannot be read"),
        ("multipart/form-data; boundary=" + "x" * 5000, b"--x--", "cannot be read"),
        ("multipart/form-data; boundary=x", b"--x\r\nContent-Disposition: form-data\r\n\r\np\r\n--x--", "name"),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="' + b"n" * 9000 + b'"\r\n\r\n',
            "cannot be read",
        ),
    ],
)
async def test_a_body_that_is_no_form_is_refused(edge: Edge, kind: str, content: bytes, says: str) -> None:
    answer = await edge.data.post("/v1/images/edits", content=content, headers={"content-type": kind} if kind else {})
    assert says in refusal(answer, "body")


async def test_a_body_over_the_limit_of_the_route_is_refused_unread(edge: Edge) -> None:
    answer = await edge.data.post(
        "/v1/images/edits", content=b"", headers={"content-type": "multipart/form-data; boundary=x", "content-length": "100000000"}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (413, "body")


@pytest.mark.parametrize(
    ("tasks", "sent", "says"),
    [
        ([Task.GENERATE], "edit", "serves edit, found FakePipeline, which serves generate"),
        ([Task.GENERATE], "inpaint", "serves inpaint, found FakePipeline, which serves generate"),
        ([Task.EDIT], "inpaint", "this model takes no mask"),
        ([Task.INPAINT], "edit", "this model needs a mask beside the image"),
        ([Task.EDIT], "generate", "this model needs an image, send one to /v1/images/edits"),
        ([Task.INPAINT], "generate", "this model needs an image and a mask"),
        ([], "generate", "which serves no image route"),
    ],
)
async def test_a_route_that_the_model_cannot_serve_is_refused_with_the_reason(tasks: list[Task], sent: str, says: str) -> None:
    async with serving_edge(model=msgspec.structs.replace(model(), tasks=tasks)) as edge:
        if sent == "generate":
            answer = await edge.request_images(prompt=SECRET)
        else:
            answer = await edit(edge, {"image": red()} | ({"mask": half_mask()} if sent == "inpaint" else {}), prompt=SECRET)
        assert says in refusal(answer, "model")
        assert SECRET not in answer.text
        cards = (await edge.data.get("/v1/models")).json()["data"]
        assert cards[0]["tasks"] == tasks
