# SPDX-License-Identifier: Apache-2.0
"""Checks of ours that schemathesis makes of every answer, beside its own; named as `hooks` in its configuration."""

import base64
import io
import json
from typing import Any

import schemathesis
from PIL import Image

# Why a worker may refuse for now; see docs/troubleshooting.md.
REFUSALS = {"Starting", "Asleep", "Busy", "Terminating", "AdapterNotLoaded"}


@schemathesis.check
def a_503_has_a_documented_code(ctx: Any, response: Any, case: Any) -> None:
    """No other error of a server's is documented, and this one can be tried again."""
    if response.status_code == 503:
        problem = response.json()
        assert problem["code"] in REFUSALS and problem["retryable"], f"undocumented refusal: {problem}"


@schemathesis.check
def an_error_names_what_was_wrong(ctx: Any, response: Any, case: Any) -> None:
    """One form for all errors; what is wrong with a request is never without words."""
    if response.status_code >= 400:
        problem = response.json()
        assert set(problem) == {"code", "message", "retryable", "retryAfterSeconds", "details"}, problem
        assert problem["message"], problem


@schemathesis.check
def pictures_are_pictures(ctx: Any, response: Any, case: Any) -> None:
    """Every picture of an answer can be opened, and is of the size that the answer says."""
    if response.status_code != 200 or "/v1/images/" not in case.path:
        return
    kind = response.headers["content-type"][0].partition(";")[0]
    if kind == "application/json":
        answer = response.json()
        for item in answer["data"]:
            assert _size(base64.b64decode(item["b64_json"])) == answer["size"]
    elif kind.startswith("image/"):
        _size(response.content)
    elif kind == "text/event-stream":
        last = response.content.decode().strip().rpartition("\ndata: ")[2]
        assert json.loads(last)["type"].endswith(".completed"), last[:500]


def _size(content: bytes) -> str:
    with Image.open(io.BytesIO(content)) as picture:
        picture.load()
        return f"{picture.width}x{picture.height}"
