# SPDX-License-Identifier: Apache-2.0
"""The OpenAI SDK's `images.edit` on a real worker of two ranks with the digits model."""

import io
import socket
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

from support.worker.process import WorkerProcess, decode_image

pytestmark = pytest.mark.slow

ASKED = {"prompt": "a green digit three", "extra_body": {"seed": 4, "num_inference_steps": 12, "guidance_scale": 3.0}}


@pytest.fixture(scope="module")
def editor(worker_of_two: WorkerProcess) -> WorkerProcess:
    return worker_of_two


@pytest.fixture(scope="module")
def seven(editor: WorkerProcess) -> Image.Image:
    """Provide a red seven that the model made."""
    return editor.image(prompt="a red digit seven", seed=1, num_inference_steps=12, guidance_scale=3.0)


def png(image: Image.Image) -> bytes:
    """Encode an image as PNG bytes, which the SDK uploads as a file."""
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def left_mask() -> bytes:
    """Return a 64 by 64 mask as PNG: the half to repaint, x below 32, has alpha 0, and the rest is opaque black."""
    image = Image.new("RGBA", (64, 64), "black")
    image.paste((0, 0, 0, 0), (0, 0, 32, 64))
    return png(image)


def asked(**extra: Any) -> dict[str, Any]:
    """Return keyword arguments for the SDK's edit call: the usual ones, with `extra` merged into their `extra_body`."""
    return ASKED | {"extra_body": {**ASKED["extra_body"], **extra}}  # type: ignore[dict-item]


def pixels(image: Image.Image) -> Any:
    return np.asarray(image).astype(int)


def apart(one: Image.Image, other: Image.Image, columns: slice = slice(None)) -> float:
    """Return the mean difference of the colours of two images, of 255, within these columns."""
    return float(np.abs(pixels(one) - pixels(other))[:, columns].mean())


def images_of(answer: Any) -> list[Image.Image]:
    return [decode_image(item.b64_json) for item in answer.data]


def test_the_sdk_edits_an_image_by_its_strength_and_with_an_adapter(editor: WorkerProcess, seven: Image.Image) -> None:
    with editor.openai() as client:
        [near] = images_of(client.images.edit(image=png(seven), **asked(strength=0.1)))
        [far] = images_of(client.images.edit(image=png(seven), size="64x64", **asked(strength=0.9)))
        [striped] = images_of(client.images.edit(image=[png(seven)], model="stripes", **asked(strength=0.9)))
        card = client.models.retrieve("digits")
    assert apart(near, seven) < 4 < 15 < apart(far, seven)
    assert apart(striped, far) > 5
    assert card.to_dict()["tasks"] == ["generate", "edit", "inpaint"]


def test_the_sdk_inpaints_what_its_mask_leaves_transparent(editor: WorkerProcess, seven: Image.Image) -> None:
    with editor.openai() as client:
        answer = client.images.edit(image=png(seven), mask=left_mask(), n=2, output_format="webp", **asked(strength=1.0))
        with pytest.raises(openai.BadRequestError, match="image: expected one image for StableDiffusion3Pipeline, found 2"):
            client.images.edit(image=[png(seven), png(seven)], **asked())
    for made in images_of(answer):
        assert made.format == "WEBP"
        assert apart(made, seven, slice(40, 64)) < 4
        assert apart(made, seven, slice(0, 32)) > 10


def test_the_sdk_streams_an_inpainting_with_previews_that_keep_what_the_mask_keeps(editor: WorkerProcess, seven: Image.Image) -> None:
    request = asked(strength=0.9) | {"image": png(seven), "mask": left_mask()}
    with editor.openai() as client:
        events = [event.to_dict() for event in client.images.edit(stream=True, partial_images=2, **request)]
        [alone] = images_of(client.images.edit(**request))
    previews = [decode_image(str(event["b64_json"])) for event in events if event["type"] == "image_edit.partial_image"]
    assert len(previews) == 2
    for preview in previews:
        assert apart(preview, seven, slice(40, 64)) < 5
    assert events[-1]["type"] == "image_edit.completed"
    assert decode_image(str(events[-1]["b64_json"])).tobytes() == alone.tobytes()


def test_uploads_that_end_before_they_are_whole_leave_nothing(editor: WorkerProcess, seven: Image.Image) -> None:
    def open_files() -> int:
        return len(list(Path(f"/proc/{editor.pid}/fd").iterdir()))

    before = open_files()
    host, _, port = editor.url.removeprefix("http://").partition(":")
    head = b"POST /v1/images/edits HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    head += b"Content-Length: 9000000\r\n\r\n"
    part = b'--b\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n' + bytes(3_000_000)
    for _ in range(5):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(head + part)
    editor.wait_for(lambda: open_files() <= before, what="rid of what was sent to it", timeout_s=20)
    with editor.openai() as client:
        assert len(images_of(client.images.edit(image=png(seven), **asked()))) == 1
