# SPDX-License-Identifier: Apache-2.0
"""Finished images as the body of an answer: the JSON that the OpenAI SDK reads, a file, or the events of a stream. Pure.

All of it is slow for large images, and is called in threads.
"""

import enum
import io
import zipfile
from collections.abc import Sequence

import msgspec

from diffusion_worker.engine.state.request_events import FinishedImage, Generation, Held, PreviewMade, StepTaken
from diffusion_worker.server.encoding.chunked import Pieces, cut, json_with_file
from diffusion_worker.server.encoding.images import OutputFormat, encode, metadata_of

ZIP_MEDIA_TYPE = "application/zip"
# OpenAI's clients require the numbers of tokens; a diffusion model counts none.
NO_TOKENS = {"image_tokens": 0, "text_tokens": 0}
USAGE = {"total_tokens": 0, "input_tokens": 0, "output_tokens": 0, "input_tokens_details": NO_TOKENS, "output_tokens_details": NO_TOKENS}


class Quality(enum.StrEnum):
    """The quality that an answer reports, in the SDK's words."""

    # A step cache was allowed to skip work.
    MEDIUM = "medium"
    # Every step was computed.
    HIGH = "high"


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A client's choice of the answer's form. `output_compression` is 0 to 100; `events` is the prefix of the names of its events."""

    output_format: OutputFormat = OutputFormat.PNG
    output_compression: int | None = None
    # True for the image itself instead of JSON; several are in a ZIP.
    as_file: bool = False
    # True for a data URL in place of the field `b64_json`.
    as_url: bool = False
    stream: bool = False
    # Add our own events, of steps and of waiting, to the stream.
    progress: bool = False
    # Add the seconds of each image's stages to the answer.
    timings: bool = False
    events: str = "image_generation"


def image_file(made: Generation, image: FinishedImage, options: AnswerOptions) -> bytes:
    """Return an image as a file of the chosen format, with its provenance in it."""
    return encode(
        image.pixels,
        image.height,
        image.width,
        output_format=options.output_format,
        compression=options.output_compression,
        metadata=metadata_of(made.provenance, image),
    )


def image_json(made: Generation, image: FinishedImage, options: AnswerOptions) -> Pieces:
    """Return an image as `ImageData`."""
    url_of = f"image/{options.output_format}" if options.as_url else None
    return json_with_file(image_file(made, image, options), _described(made, image, options), url_of=url_of)


def json_answer(made: Generation, images: Sequence[Pieces], options: AnswerOptions, *, created: int) -> Pieces:
    """Return the body of `ImagesAnswer`, made without pydantic, which would copy and check megabytes of base64."""
    first = made.images[0]
    form = _form(first.height, first.width, made.provenance.accelerated, options)
    body = [msgspec.json.encode({"created": created, "usage": USAGE} | form)[:-1] + b',"data":[']
    for image in images:
        body += [*image, b","]
    return [*body[:-1], b"]}"]


def file_answer(files: Sequence[bytes], options: AnswerOptions) -> tuple[Pieces, str]:
    """Return one file unchanged, or several as a ZIP, with the media type."""
    if len(files) == 1:
        return cut(files[0]), f"image/{options.output_format}"
    out = io.BytesIO()
    # Images do not compress a second time.
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for index, file in enumerate(files):
            archive.writestr(f"{index}.{options.output_format}", file)
    return cut(out.getvalue()), ZIP_MEDIA_TYPE


def progress_event(step: StepTaken, options: AnswerOptions) -> Pieces:
    """Format the event of a step that an image has taken. It is our own event."""
    return server_sent(f"{options.events}.progress", {"index": step.index, "attempt": step.attempt, "step": step.step, "steps": step.steps})


def held_event(held: Held, options: AnswerOptions) -> Pieces:
    """Format the event of a request that waits for the model, our own as well."""
    return server_sent(f"{options.events}.held", {"state": held.state, "ahead": held.ahead})


def preview_event(preview: PreviewMade, options: AnswerOptions, *, accelerated: bool, created: int) -> Pieces:
    """Format the event of an unfinished image. It has no provenance, as it is not the request's result."""
    height, width, compression = preview.height, preview.width, options.output_compression
    file = encode(preview.pixels, height, width, output_format=options.output_format, compression=compression)
    content = {"partial_image_index": preview.number, "index": preview.index, "attempt": preview.attempt, "created_at": created}
    return server_sent(f"{options.events}.partial_image", content | _form(height, width, accelerated, options), file)


def completed_event(made: Generation, index: int, options: AnswerOptions, *, created: int) -> Pieces:
    """Format the event of a finished image."""
    image = made.images[index]
    content: dict[str, object] = {"index": index, "created_at": created, "usage": USAGE}
    content |= _form(image.height, image.width, made.provenance.accelerated, options) | _described(made, image, options)
    return server_sent(f"{options.events}.completed", content, image_file(made, image, options))


def server_sent(kind: str, content: dict[str, object], file: bytes | None = None) -> Pieces:
    """Format a server-sent event; its type is in its data too, where the SDK looks."""
    head, data = b"event: " + kind.encode() + b"\ndata: ", {"type": kind} | content
    if file is None:
        return [head + msgspec.json.encode(data) + b"\n\n"]
    return [head, *json_with_file(file, data), b"\n\n"]


def _form(height: int, width: int, accelerated: bool, options: AnswerOptions) -> dict[str, object]:
    """Return the fields of an image's form, in the SDK's words. `quality` is the one that ran, not the requested one."""
    quality = Quality.MEDIUM if accelerated else Quality.HIGH
    return {"background": "opaque", "output_format": options.output_format, "quality": quality, "size": f"{width}x{height}"}


def _described(made: Generation, image: FinishedImage, options: AnswerOptions) -> dict[str, object]:
    """Return an image's provenance, and its timings if the client asked for them."""
    described: dict[str, object] = {"seed": image.seed, "provenance": metadata_of(made.provenance, image)}
    if options.timings:
        described |= {"timings": image.timings, "peak_memory_bytes": image.peak_bytes or None}
    return described
