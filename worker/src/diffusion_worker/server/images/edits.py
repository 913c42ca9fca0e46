# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/images/edits`: images made from images, as `client.images.edit(...)` of the OpenAI SDK requests them.

The body is a form whose images are files (`image`, or several `image[]`) or `data:` URLs (`url`). Or it is JSON, whose `images` are
`data:` URLs. No other URL is fetched. All that can be judged by the number of images and by their headers is judged before any decoding.
"""

import asyncio
import base64
import binascii
import re
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.responses import Response

from diffusion_worker.engine.engine import Engine
from diffusion_worker.engine.requests import admission
from diffusion_worker.engine.requests.admission import GenerationParams, InputImage
from diffusion_worker.errors import RequestError, refused
from diffusion_worker.messages import Task
from diffusion_worker.server.encoding.decode_job import DecodeJob
from diffusion_worker.server.encoding.decoders import Decoders
from diffusion_worker.server.encoding.input_images import MAX_FILE_BYTES, DecodedImage, claimed_size, fitting
from diffusion_worker.server.http.running_requests import ClientGone, run_cancellable
from diffusion_worker.server.images.generation import answer_generation
from diffusion_worker.server.schemas.images import ERRORS, IMAGE_ANSWERS, Finite, ImageRequest, StreamOptions
from diffusion_worker.server.schemas.lora import LoRAText, require_own_paths
from diffusion_worker.server.schemas.problems import client_gone, shortened

# OpenAI's most images, and a mask.
MAX_IMAGES = 16
MAX_FILES = MAX_IMAGES + 1
MAX_FIELDS = 64
# Most bytes of a text field: the largest image in base64, a third longer than its file, with the head of a `data:` URL.
MAX_TEXT_BYTES = MAX_FILE_BYTES * 4 // 3 + 64
# Spellings of the fields of images and of the mask, as clients have them. An index sets the order.
IMAGE_FIELD = re.compile(r"(?P<root>image|url)s?(\[(?P<index>\d{0,3})\])?", re.ASCII)
MASK_FIELD = re.compile(r"mask(\[0?\])?")

router = APIRouter()


def _object_of_text(value: Any) -> Any:
    """Parse the JSON text of a form's field; raise PydanticCustomError if it is none."""
    try:
        return msgspec.json.decode(value) if isinstance(value, str) else value
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise PydanticCustomError("no_json", "expected a JSON object") from None


class EditRequest(ImageRequest):
    """The fields of an edit beside its images."""

    strength: Annotated[
        Finite | None,
        Field(
            gt=0,
            le=1,
            description="Distance of the result from the given image, up to 1; for models that start from it. The model's own if absent.",
        ),
    ] = None
    input_fidelity: Annotated[Literal["high", "low"] | None, Field(description="Accepted, without effect: see strength.")] = None


class EditForm(EditRequest):
    """The texts of a form, each of which is converted to its field's type."""

    model_config = ConfigDict(extra="forbid", strict=False)

    lora: LoRAText = None
    stream_options: Annotated[
        StreamOptions | None,
        BeforeValidator(_object_of_text),
        WithJsonSchema({"type": "string", "contentMediaType": "application/json", "description": "The object of JSON, as a text."}),
    ] = None


class ImageReference(BaseModel):
    """An image of an edit in JSON."""

    model_config = ConfigDict(extra="forbid", strict=True)

    image_url: Annotated[str | None, Field(max_length=MAX_TEXT_BYTES, description="A data: URL in base64; no other URL is fetched.")] = None
    file_id: Annotated[str | None, Field(description="Refused: no files are kept here.")] = None


_REFERENCE = ImageReference.model_json_schema()


class EditDocument(EditRequest):
    """An edit in JSON."""

    images: Annotated[
        list[ImageReference],
        Field(min_length=1, max_length=MAX_IMAGES),
        WithJsonSchema({"type": "array", "items": _REFERENCE, "minItems": 1, "maxItems": MAX_IMAGES}),
    ]
    mask: Annotated[ImageReference | None, WithJsonSchema(_REFERENCE)] = None


Fields = TypeVar("Fields", bound=EditRequest)
# An image as it was sent: its name in errors, and a file or a URL.
SentImage = tuple[str, UploadFile | str]
# The same with the file's content.
SentFile = tuple[str, bytes]


class SentEdit(NamedTuple):
    """An edit as it was sent: its fields, its images in order, and its mask, if there is one."""

    fields: EditRequest
    images: list[SentImage]
    masks: list[SentImage]

    async def close(self) -> None:
        """Close the files, whose content goes with that."""
        for _, file in [*self.images, *self.masks]:
            if isinstance(file, UploadFile):
                await file.close()


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a nullable field for a form, which has no null, without its default. Return any other schema unchanged."""
    kinds = [kind for kind in schema.get("anyOf", []) if kind.get("type") != "null"]
    rest = {key: value for key, value in schema.items() if key not in ("anyOf", "default")}
    return rest | kinds[0] if len(kinds) == 1 else schema


def form_schema() -> dict[str, Any]:
    """Return the body's schema for the OpenAPI document. A form has no null, so nullable fields may be absent instead."""
    fields = EditForm.model_json_schema()["properties"]
    properties = {name: _without_null(schema) for name, schema in fields.items() if schema.get("type") != "null"}
    file = {"type": "string", "format": "binary", "description": "An image in PNG, JPEG or WebP."}
    properties["image"] = file
    properties["image[]"] = {"type": "array", "items": file, "description": "Several images, for a model that takes several."}
    properties["url"] = {"type": "string", "pattern": "^data:image/(png|jpeg|webp);base64,", "description": "An image as a data: URL."}
    properties["mask"] = file | {
        "description": "A mask of the image's size. The fully transparent part is painted again, or the white part of an opaque mask."
    }
    return {"type": "object", "properties": properties, "required": ["prompt"], "additionalProperties": False}


FORMS = {"multipart/form-data": {"schema": form_schema()}, "application/json": {"schema": EditDocument.model_json_schema()}}
BODY = {"requestBody": {"required": True, "content": FORMS}}


@router.post("/v1/images/edits", response_model=None, openapi_extra=BODY, responses=IMAGE_ANSWERS | ERRORS)
async def edit_images(request: Request) -> Response:
    """Make `n` images from a prompt and at least one input image. With a mask, only a part of the first input image changes."""
    sent = await _read(request)
    try:
        options = msgspec.structs.replace(sent.fields.options(), events="image_edit")
        require_own_paths(request.app.state.engine, sent.fields.adapters())
        params = await run_cancellable(request, _with_images(request, sent))
    except ClientGone:
        return client_gone(request)
    finally:
        await sent.close()
    del sent  # texts may have megabytes, and the answer may take long
    return await answer_generation(request, params, options)


async def _read(request: Request) -> SentEdit:
    """Read the body as a form or as JSON; the caller closes the edit.

    Raises:
        RequestError, RequestValidationError: InvalidRequest, the body is neither, or has a field that no edit has.
    """
    content_type = request.headers.get("content-type", "")
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "application/json":
        return await _read_document(request)
    if kind != "multipart/form-data":
        expected = "a form, sent as multipart/form-data, or JSON, sent as application/json"
        raise refused("body", expected, f"the content type {shortened(content_type)!r}" if content_type else "no content type")
    return await _read_form(request)


async def _read_document(request: Request) -> SentEdit:
    try:
        document = await asyncio.to_thread(msgspec.json.decode, b"".join([part async for part in request.stream()]))
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise refused("body", "JSON", f"a body that cannot be parsed: {error}") from None
    if isinstance(document, dict) and "image" in document:
        raise refused("image", "images, a list of objects with an image_url, in a body of JSON", "image")
    fields = _validated(EditDocument, document)
    images = [_url_of(f"images[{index}]", reference) for index, reference in enumerate(fields.images)]
    return SentEdit(fields, images, [] if fields.mask is None else [_url_of("mask", fields.mask)])


def _url_of(field: str, reference: ImageReference) -> SentImage:
    if reference.file_id is not None:
        raise refused(f"{field}.file_id", "an image_url, as no files are kept here", "a file_id")
    if reference.image_url is None:
        raise refused(f"{field}.image_url", "a data: URL", "none")
    return f"{field}.image_url", reference.image_url


async def _read_form(request: Request) -> SentEdit:
    # Large files are kept on disk, without a name.
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


def _sorted(items: list[SentImage]) -> SentEdit:
    """Return the edit of a form's parts, whose images come in the order of their index, or of the form without one.

    Raises:
        RequestError: InvalidRequest for a text in place of a file or the reverse, a second mask, a second text of a name, or `markup`.
        RequestValidationError: a text is of no field, or wrong there.
    """
    texts: dict[str, str] = {}
    images: list[tuple[int, str, UploadFile | str]] = []
    masks: list[SentImage] = []
    for field, value in items:
        root, is_file = field.partition("[")[0], isinstance(value, UploadFile)
        if spelled := IMAGE_FIELD.fullmatch(field):
            root = spelled["root"]
            if is_file != (root == "image"):
                if is_file:
                    raise refused("url", "a data: URL", "a file")
                raise refused("image", "a file", "a text")
            images.append((int(spelled["index"] or len(images)), root, value))
        elif field == "markup":
            raise refused("markup", "no such field, because only the prompt and a mask change an image", "one")
        elif MASK_FIELD.fullmatch(field):
            if masks or not isinstance(value, UploadFile):
                raise refused("mask", "a single file", "a second one" if masks else "a text")
            masks.append(("mask", value))
        elif isinstance(value, UploadFile):
            raise refused(shortened(field), "a text, as only image, image[] and mask are files", "a file")
        elif root in ("lora", "stream_options") and field != root:  # the SDK's form of an object in a form
            raise refused(root, "a JSON text, as a form has no objects", f"the field {shortened(field)}")
        elif root == "svg":  # svg[model] and the like
            texts[root] = value
        elif field in texts:
            raise refused(shortened(field), "a single value", "a second one")
        else:
            texts[field] = value
    images.sort(key=lambda image: image[0])
    named = [(root if len(images) == 1 else f"{root}[{index}]", value) for index, (_, root, value) in enumerate(images)]
    return SentEdit(_validated(EditForm, texts), named, masks)


def _validated(kind: type[Fields], content: object) -> Fields:
    """Return the fields of an edit; raise RequestValidationError, which is answered as for any other body."""
    try:
        return kind.model_validate(content, from_attributes=True)
    except ValidationError as error:
        raise RequestValidationError([{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors()]) from None


async def _with_images(request: Request, sent: SentEdit) -> GenerationParams:
    """Return the request with its task, strength, images and mask, if there is one; files are decoded one after the other.

    Raises:
        RequestError: InvalidRequest: no image, a file that cannot be used, a mask that does not fit the first image, or a refused field
            or task. Other codes: see `Engine.check` and `Decoders.decode`.
    """
    engine: Engine = request.app.state.engine
    decoders: Decoders = request.app.state.decoders
    most = engine.config.limits.max_pixels
    params = sent.fields.params()
    params = msgspec.structs.replace(params, task=Task.INPAINT if sent.masks else Task.EDIT, strength=sent.fields.strength)
    _check_unread(engine, params, len(sent.images))
    images = [(name, await _content(name, file)) for name, file in sent.images]
    masks = [(name, await _content(name, file)) for name, file in sent.masks]
    _check_headers(engine, params, images, masks)
    decoded = [await decoders.decode(content, DecodeJob(field=name, max_pixels=most)) for name, content in images]
    mask = None
    for name, content in masks:
        # In a mask without transparency the light part is to be made again, since other tools write masks so.
        mask = _usable_mask(name, await decoders.decode(content, DecodeJob(field=name, max_pixels=most, as_mask=True)), decoded[0])
    own_mask = decoded[0].mask if mask is None else None
    return msgspec.structs.replace(params, images=[each.image for each in decoded], mask=mask, own_mask=own_mask)


def _check_unread(engine: Engine, params: GenerationParams, count: int) -> None:
    """Check what needs no look at the images, of which there are `count`; raise RequestError (InvalidRequest)."""
    if not count:
        raise refused("image", "an image", "none")
    admission.check_form(params, engine.config.limits)
    if engine.model is not None:
        if not (params.task is Task.EDIT and admission.only_inpaints(engine.model)):
            admission.check_served(params.task, engine.model)
        admission.check_image_count(count, engine.model)


def _check_headers(engine: Engine, params: GenerationParams, images: list[SentFile], masks: list[SentFile]) -> None:
    """Check the request with the sizes that the files' headers claim, since decoding costs seconds.

    Raises:
        RequestError: InvalidRequest, a header is wrong, or the mask cannot have the first image's size. Other codes: see `Engine.check`.
    """
    claimed = [claimed_size(name, content) for name, content in images]
    for name, content in masks:
        size, first = claimed_size(name, content), claimed[0]
        # EXIF may turn one of them.
        if size and first and sorted(size) != sorted(first):
            raise _other_size(name, size, first)
    # The smallest image stands for one of unknown size. A model that only inpaints may find its mask in the image's transparency.
    sizes = [fitting(*(size or (1, 1)), engine.config.limits.max_pixels) for size in claimed]
    inpaints = engine.model is not None and admission.only_inpaints(engine.model)
    seen = [InputImage(b"", height, width) for width, height in sizes]
    engine.check(msgspec.structs.replace(params, images=seen, task=Task.INPAINT if inpaints else params.task))


def _usable_mask(field: str, mask: DecodedImage, image: DecodedImage) -> InputImage:
    if (mask.height, mask.width) != (image.height, image.width):
        raise _other_size(field, (mask.width, mask.height), (image.width, image.height))
    if mask.mask is None or 255 not in mask.mask.pixels:
        raise refused(field, "fully transparent pixels, or white ones in an opaque mask, for the part to paint again", "none")
    return mask.mask


def _other_size(field: str, size: tuple[int, int], first: tuple[int, int]) -> RequestError:
    return refused(field, "the size of the first image, {}x{}".format(*first), "{}x{}".format(*size))


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
