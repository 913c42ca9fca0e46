# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/images/edits`: images made from images, as `client.images.edit(...)` of the OpenAI SDK requests them.

The body is a form whose images are files (`image`, or several `image[]`) or `data:` URLs (`url`). No other URL is fetched.
"""

import asyncio
import base64
import binascii
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ConfigDict, Field, ValidationError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.responses import Response

from diffusion_worker.engine.engine import Engine
from diffusion_worker.engine.requests.admission import GenerationParams, check_form, check_served, only_inpaints
from diffusion_worker.errors import refused
from diffusion_worker.messages import Task
from diffusion_worker.server.encoding.decode_job import DecodeJob
from diffusion_worker.server.encoding.decoders import Decoders
from diffusion_worker.server.encoding.input_images import MAX_FILE_BYTES, DecodedImage
from diffusion_worker.server.http.running_requests import ClientGone, run_cancellable
from diffusion_worker.server.images.generation import answer_generation
from diffusion_worker.server.schemas.images import ERRORS, IMAGE_ANSWERS, Finite, ImageRequest
from diffusion_worker.server.schemas.lora import LoRAText, require_own_paths
from diffusion_worker.server.schemas.problems import client_gone, shortened

# OpenAI's most images, and a mask.
MAX_FILES = 17
MAX_FIELDS = 64
# Most bytes of a text field: the largest image in base64, a third longer than its file, with the head of a `data:` URL.
MAX_TEXT_BYTES = MAX_FILE_BYTES * 4 // 3 + 64
IMAGES = ("image", "image[]", "url", "url[]")

router = APIRouter()


class EditRequest(ImageRequest):
    """The fields of an edit beside its images. A form has only texts, so each is converted to its field's type."""

    model_config = ConfigDict(extra="forbid", strict=False)

    lora: LoRAText = None
    strength: Annotated[
        Finite | None,
        Field(
            gt=0,
            le=1,
            description="Distance of the result from the given image, up to 1; for models that start from it. The model's own if absent.",
        ),
    ] = None
    input_fidelity: Annotated[
        Literal["low"] | None, Field(description="Accepted and ignored; strength sets how close an edit stays to its image.")
    ] = None


class EditForm(NamedTuple):
    """An edit's form, sorted: texts by field; the images in order, each with its field's name; and the mask if there is any."""

    texts: dict[str, str]
    images: list[tuple[str, UploadFile | str]]
    mask: UploadFile | None


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a nullable field for a form, which has no null, without its default. Return any other schema unchanged."""
    kinds = [kind for kind in schema.get("anyOf", []) if kind.get("type") != "null"]
    rest = {key: value for key, value in schema.items() if key not in ("anyOf", "default")}
    return rest | kinds[0] if len(kinds) == 1 else schema


def form_schema() -> dict[str, Any]:
    """Return the body's schema for the OpenAPI document. A form has no null, so nullable fields may be absent instead."""
    fields = EditRequest.model_json_schema()["properties"]
    properties = {name: _without_null(schema) for name, schema in fields.items() if schema.get("type") != "null"}
    file = {"type": "string", "format": "binary", "description": "An image in PNG, JPEG or WebP."}
    properties["image"] = file
    properties["image[]"] = {"type": "array", "items": file, "description": "Several images, for a model that takes several."}
    properties["url"] = {"type": "string", "pattern": "^data:image/(png|jpeg|webp);base64,", "description": "An image as a data: URL."}
    properties["mask"] = file | {
        "description": "A mask of the image's size. The fully transparent part is painted again, or the white part of an opaque mask."
    }
    return {"type": "object", "properties": properties, "required": ["prompt"], "additionalProperties": False}


BODY = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form_schema()}}}}


@router.post("/v1/images/edits", response_model=None, openapi_extra=BODY, responses=IMAGE_ANSWERS | ERRORS)
async def edit_images(request: Request) -> Response:
    """Make `n` images from a prompt and at least one input image. With a mask, only a part of the first input image changes."""
    form = await _read_form(request)
    try:
        fields = _fields(form.texts)
        options = msgspec.structs.replace(fields.options(), events="image_edit")
        require_own_paths(request.app.state.engine, fields.adapters())
        params = await run_cancellable(request, _with_images(request, form, fields.params(), fields.strength))
    except ClientGone:
        return client_gone(request)
    finally:
        for file in [form.mask, *(sent for _, sent in form.images)]:
            if isinstance(file, UploadFile):
                await file.close()
    return await answer_generation(request, params, options)


async def _read_form(request: Request) -> EditForm:
    """Read the body as a form and return its parts, sorted; large files are kept on disk, without a name, and the caller closes them.

    Raises:
        RequestError: InvalidRequest, the body is no form, or has parts that no edit has.
    """
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "multipart/form-data":
        raise refused(
            "body",
            "a form, sent as multipart/form-data",
            f"the content type {shortened(content_type)!r}" if content_type else "no content type",
        )
    parser = MultiPartParser(request.headers, request.stream(), max_files=MAX_FILES, max_fields=MAX_FIELDS, max_part_size=MAX_TEXT_BYTES)
    try:
        parsed = await parser.parse()
    except MultiPartException as error:
        raise refused("body", "a form, sent as multipart/form-data", f"a form that cannot be read: {error.message}") from None
    try:
        return _sorted(parsed.multi_items())
    except BaseException:
        await parsed.close()
        raise


def _sorted(items: list[tuple[str, UploadFile | str]]) -> EditForm:
    """Return the parts of a form, sorted into texts, images and mask.

    Raises:
        RequestError: InvalidRequest for a text in place of a file or the reverse, a second mask, a second text of a name, or `markup`.
    """
    texts: dict[str, str] = {}
    images: list[tuple[str, UploadFile | str]] = []
    mask = None
    for field, value in items:
        root, is_file = field.partition("[")[0], isinstance(value, UploadFile)
        if field in IMAGES:
            if is_file != (root == "image"):
                if is_file:
                    raise refused("url", "a data: URL", "a file")
                raise refused("image", "a file", "a text")
            images.append((root, value))
        elif field == "markup":
            raise refused("markup", "no such field, because only the prompt and a mask change an image", "one")
        elif field == "mask":
            if mask is not None or not isinstance(value, UploadFile):
                raise refused("mask", "a single file", "a text" if mask is None else "a second one")
            mask = value
        elif isinstance(value, UploadFile):
            raise refused(shortened(field), "a text, as only image, image[] and mask are files", "a file")
        elif root == "lora" and field != root:  # the SDK's form of an object in a form
            raise refused("lora", "a JSON text, as a form has no objects", f"the field {shortened(field)}")
        elif root == "svg":  # svg[model] and the like
            texts[root] = value
        elif field in texts:
            raise refused(shortened(field), "a single value", "a second one")
        else:
            texts[field] = value
    return EditForm(texts, images, mask)


def _fields(texts: dict[str, str]) -> EditRequest:
    """Return the fields of a form; raise RequestValidationError, which is answered as for any other body."""
    try:
        return EditRequest.model_validate(texts)
    except ValidationError as error:
        raise RequestValidationError([{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors()]) from None


async def _with_images(request: Request, form: EditForm, params: GenerationParams, strength: float | None) -> GenerationParams:
    """Return the request with its task, strength, images and mask, if there is one; files are decoded one after the other.

    Raises:
        RequestError: InvalidRequest: no image, a file that cannot be used, a mask that does not fit the first image, or a refused field
            or task. Other codes: see `Decoders.decode`.
    """
    engine: Engine = request.app.state.engine
    decoders: Decoders = request.app.state.decoders
    if not form.images:
        raise refused("image", "an image", "none")
    # Checked before an image is decoded, since that costs seconds; the engine checks all else.
    check_form(params, engine.config.limits)
    if engine.model is not None and not (form.mask is None and only_inpaints(engine.model)):
        check_served(Task.EDIT if form.mask is None else Task.INPAINT, engine.model)
    names = [name if len(form.images) == 1 else f"{name}[{index}]" for index, (name, _) in enumerate(form.images)]
    most = engine.config.limits.max_pixels
    images = [
        await decoders.decode(await _content(name, sent), DecodeJob(field=name, max_pixels=most))
        for name, (_, sent) in zip(names, form.images, strict=True)
    ]
    mask = None
    if form.mask is not None:
        # In a mask without transparency the light part is to be made again, since other tools write masks so.
        job = DecodeJob(field="mask", max_pixels=most, as_mask=True)
        mask = _usable_mask(await decoders.decode(await _content("mask", form.mask), job), images[0])
    return msgspec.structs.replace(
        params,
        task=Task.EDIT if mask is None else Task.INPAINT,
        images=[image.image for image in images],
        mask=mask,
        own_mask=images[0].mask if mask is None else None,
        strength=strength,
    )


def _usable_mask(mask: DecodedImage, image: DecodedImage) -> Any:
    if (mask.height, mask.width) != (image.height, image.width):
        raise refused("mask", f"the size of the first image, {image.width}x{image.height}", f"{mask.width}x{mask.height}")
    if mask.mask is None or 255 not in mask.mask.pixels:
        raise refused("mask", "fully transparent pixels, or white ones in an opaque mask, for the part to paint again", "none")
    return mask.mask


async def _content(field: str, sent: UploadFile | str) -> bytes:
    content = await (asyncio.to_thread(_content_of_url, field, sent) if isinstance(sent, str) else sent.read(MAX_FILE_BYTES + 1))
    if len(content) > MAX_FILE_BYTES:
        raise refused(field, f"a file of at most {MAX_FILE_BYTES} bytes", "a larger one")
    return content


def _content_of_url(field: str, url: str) -> bytes:
    head, comma, content = url.partition(",")
    if not head.startswith("data:"):
        raise refused(field, "a data: URL (the worker fetches no others)", "another URL")
    if not comma or not head.endswith(";base64"):
        raise refused(field, "a data: URL in base64", "another encoding")
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError):
        raise refused(field, "a data: URL in base64", "invalid base64") from None
