# SPDX-License-Identifier: Apache-2.0
"""Finished pictures as the body of an answer: the JSON that the OpenAI SDK reads, a file, or the events of a stream. Pure.

All of it is slow for large pictures and is called in threads; msgspec writes the bytes of a file as base64 by itself.
"""

import enum
import io
import zipfile
from collections.abc import Sequence

import msgspec

from diffusion_worker.engine.results import Generation, Picture, PreviewMade, StepTaken
from diffusion_worker.server.encoding import OutputFormat, encode, metadata_of

ZIP_MEDIA_TYPE = "application/zip"


class Quality(enum.StrEnum):
    """What an answer says of how its pictures were made, in the SDK's words."""

    # A step cache was allowed to skip work.
    MEDIUM = "medium"
    # Every step was computed.
    HIGH = "high"


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a client wants its pictures. `output_compression` is 0 to 100; `events` is the first part of its events' names."""

    output_format: OutputFormat = OutputFormat.PNG
    output_compression: int | None = None
    # The picture itself in place of JSON; several are in a ZIP.
    as_file: bool = False
    stream: bool = False
    # What each stage of each picture took goes into the answer.
    timings: bool = False
    events: str = "image_generation"


def picture_file(made: Generation, picture: Picture, options: AnswerOptions) -> bytes:
    """One picture as the file that was asked for, with its provenance in it."""
    return encode(
        picture.pixels,
        picture.height,
        picture.width,
        output_format=options.output_format,
        compression=options.output_compression,
        metadata=metadata_of(made.provenance, picture),
    )


def json_answer(made: Generation, files: Sequence[bytes], options: AnswerOptions, *, created: int) -> bytes:
    """The body of `schemas.ImagesAnswer`; past pydantic, which would copy and check megabytes of base64."""
    pictures = [{"b64_json": file} | _described(made, picture, options) for file, picture in zip(files, made.pictures, strict=True)]
    first = made.pictures[0]
    form = _form(first.height, first.width, made.provenance.accelerated, options)
    return msgspec.json.encode({"created": created} | form | {"data": pictures})


def file_answer(files: Sequence[bytes], options: AnswerOptions) -> tuple[bytes, str]:
    """One file as it is, several as a ZIP; and the media type."""
    if len(files) == 1:
        return files[0], f"image/{options.output_format}"
    out = io.BytesIO()
    # Pictures do not compress a second time.
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for index, file in enumerate(files):
            archive.writestr(f"{index}.{options.output_format}", file)
    return out.getvalue(), ZIP_MEDIA_TYPE


def progress_event(step: StepTaken, options: AnswerOptions) -> bytes:
    """A step that a picture has taken; an event of ours, which the SDK hands on with its `type`."""
    return server_sent(f"{options.events}.progress", {"index": step.index, "step": step.step, "steps": step.steps})


def preview_event(preview: PreviewMade, options: AnswerOptions, *, accelerated: bool, created: int) -> bytes:
    """What a picture looks like on its way. It has no provenance: it is not yet what the request makes."""
    height, width, compression = preview.height, preview.width, options.output_compression
    file = encode(preview.pixels, height, width, output_format=options.output_format, compression=compression)
    content = {"b64_json": file, "partial_image_index": preview.number, "index": preview.index, "created_at": created}
    return server_sent(f"{options.events}.partial_image", content | _form(height, width, accelerated, options))


def completed_event(made: Generation, index: int, options: AnswerOptions, *, created: int) -> bytes:
    """A finished picture."""
    picture = made.pictures[index]
    file = picture_file(made, picture, options)
    # The SDK's type has `usage`; tokens are not what a diffusion model counts.
    content = {"b64_json": file, "index": index, "created_at": created, "usage": None}
    content |= _form(picture.height, picture.width, made.provenance.accelerated, options)
    return server_sent(f"{options.events}.completed", content | _described(made, picture, options))


def server_sent(kind: str, content: dict[str, object]) -> bytes:
    """One server-sent event; its type is in its data too, as the SDK looks there."""
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode({"type": kind} | content) + b"\n\n"


def _form(height: int, width: int, accelerated: bool, options: AnswerOptions) -> dict[str, object]:
    """What an answer and its events say of a picture's form, in the SDK's words. `quality` is what ran, not what was asked."""
    quality = Quality.MEDIUM if accelerated else Quality.HIGH
    return {"background": "opaque", "output_format": options.output_format, "quality": quality, "size": f"{width}x{height}"}


def _described(made: Generation, picture: Picture, options: AnswerOptions) -> dict[str, object]:
    """What a picture was made by, and what it took where that was asked for."""
    described: dict[str, object] = {"seed": picture.seed, "provenance": metadata_of(made.provenance, picture)}
    if options.timings:
        described |= {"timings": picture.timings, "peak_memory_bytes": picture.peak_bytes or None}
    return described
