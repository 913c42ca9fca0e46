# SPDX-License-Identifier: Apache-2.0
"""Hooks of schemathesis: files to send, and checks of every answer beyond the OpenAPI documents."""

import base64
import io
import json
import struct
import zlib
from typing import Any

import schemathesis
from hypothesis import strategies
from PIL import Image

# Reasons for a temporary refusal; see docs/troubleshooting.md.
REFUSALS = {"Starting", "Asleep", "Busy", "Terminating", "AdapterNotLoaded", "SecretMissing"}
DATA_ROUTES = ("/v1/images/", "/v1/models", "/v1/requests/", "/v1/status", "/readyz", "/health", "/metrics")
# Any call of the control port is done within these seconds.
SHORT_S = 60.0


def _file(kind: str, mode: str = "RGB", size: tuple[int, int] = (32, 32)) -> bytes:
    """Return an image file of format `kind`; with mode RGBA its left half is transparent."""
    image, out = Image.linear_gradient("L").resize(size).convert(mode), io.BytesIO()
    if mode == "RGBA":
        image.putalpha(Image.linear_gradient("L").rotate(90).resize(size).point([0] * 128 + [255] * 128))
    image.save(out, kind)
    return out.getvalue()


def _bomb() -> bytes:
    """Return a small PNG whose IHDR chunk, checksum included, declares 100,000 by 100,000 pixels, as a decompression bomb does."""
    png = _file("PNG")
    head = png[12:16] + struct.pack(">II", 100_000, 100_000) + png[24:29]
    return png[:12] + head + struct.pack(">I", zlib.crc32(head)) + png[33:]


IMAGES = [
    *(_file("PNG", mode) for mode in ("RGB", "RGBA", "1", "I;16")),
    *(_file("PNG", mode, (48, 40)) for mode in ("RGB", "RGBA")),
    *(_file("PNG", size=size) for size in ((1, 1), (4000, 1))),
    *(_file("JPEG"), _file("JPEG", "CMYK"), _file("WEBP"), _file("GIF")),
]
NO_IMAGES = [IMAGES[0][:60], IMAGES[0][:-20], _bomb(), b"", b"GIF89a", b"\x89PNG\r\n\x1a\n"]
schemathesis.openapi.format("binary", strategies.sampled_from(IMAGES * 3 + NO_IMAGES) | strategies.binary(max_size=64))


def _problem(response: Any, case: Any) -> tuple[Any, set[str]]:
    """Return the error in an answer, and the names of all fields that errors have on its port."""
    fields = {"code", "message", "retryable", "details"}
    if case.path.startswith(DATA_ROUTES):
        return response.json()["error"], fields | {"type", "param", "retry_after_seconds"}
    return response.json(), fields | {"retryAfterSeconds"}


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Redirect an adapter's source on another machine to this machine, where nothing listens."""
    match case.body:
        case {"source": {"http": {"url": str(url)} as http}} if url.startswith(("http://", "https://")):
            http["url"] = "https://127.0.0.1:9/adapter.safetensors"
    match case.body:
        case {"source": {"s3": {"uri": str(uri)} as s3}} if uri.startswith("s3://"):
            s3["endpoint"] = "https://127.0.0.1:9"


@schemathesis.check
def a_server_error_is_a_documented_one(ctx: Any, response: Any, case: Any) -> None:
    """Check an answer of 502, 503 or 504; others pass. A 502 is about an adapter's source, a 503 can be tried again, a 504 follows a
    short deadline."""
    if response.status_code in (502, 503, 504):
        problem, _ = _problem(response, case)
        documented = {
            502: problem["code"] in ("NetworkError", "SourceUnauthorized") and case.path.startswith("/v1/"),
            503: problem["code"] in REFUSALS and problem["retryable"],
            504: problem["code"] == "Timeout" and case.body["deadlineSeconds"] < SHORT_S,
        }
        assert documented[response.status_code], f"undocumented: {response.status_code} {problem}"


@schemathesis.check
def an_error_names_what_was_wrong(ctx: Any, response: Any, case: Any) -> None:
    """Check that an answer of status 400 or more has exactly the error fields of its port, and a message. Others pass."""
    if response.status_code >= 400:
        problem, fields = _problem(response, case)
        assert set(problem) == fields and problem["message"], problem


@schemathesis.check
def images_are_images(ctx: Any, response: Any, case: Any) -> None:
    """Check that the images in an answer of 200 can be opened, and in JSON have the size that it claims. A stream must end with
    `.completed`; its images are not opened."""
    if response.status_code != 200 or "/v1/images/" not in case.path:
        return
    kind = response.headers["content-type"][0].partition(";")[0]
    if kind == "application/json":
        assert {_size(base64.b64decode(item["b64_json"])) for item in response.json()["data"]} == {response.json()["size"]}
    elif kind.startswith("image/"):
        _size(response.content)
    elif kind == "text/event-stream":
        last = response.content.decode().strip().rpartition("\ndata: ")[2]
        assert json.loads(last)["type"].endswith(".completed"), last[:500]


def _size(content: bytes) -> str:
    image = Image.open(io.BytesIO(content))
    image.load()
    return f"{image.width}x{image.height}"
