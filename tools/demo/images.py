# SPDX-License-Identifier: Apache-2.0
"""Images, asked for with the OpenAI SDK as any application would, and the sheet that shows them side by side."""

import base64
import io
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import openai
from PIL import Image, ImageChops, ImageDraw, ImageFont, ImageStat

from .errors import DemoFailed

# A Service's rules may lag a pod's readiness by some seconds.
CONNECT_S = 20.0
TILE, MARGIN, CAPTION = 192, 16, 34


@dataclass(frozen=True)
class Request:
    prompt: str
    seed: int
    model: str
    size: str = "64x64"
    steps: int = 12
    guidance_scale: float = 4.0
    adapters: tuple[tuple[str, float], ...] = ()
    """Mixed into one image, each with its scale."""


@dataclass(frozen=True)
class DemoImage:
    png: bytes

    def image(self) -> Image.Image:
        return Image.open(io.BytesIO(self.png)).convert("RGB")


@dataclass(frozen=True)
class Refusal:
    status: int
    code: str
    message: str


def client_for(url: str) -> openai.OpenAI:
    """Return an OpenAI client for the model at `url`. It never retries, so that a caller sees every refusal; it times out after 120 s."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="not-needed", max_retries=0, timeout=120.0)


def ask(client: openai.OpenAI, request: Request) -> DemoImage:
    """Make an image; try again for up to 20 s while there is no connection, but not after a timeout or a refusal.

    Raises:
        DemoFailed: there was no connection, or the answer has no image.
    """
    end = time.monotonic() + CONNECT_S
    while True:
        try:
            return ask_once(client, request)
        except openai.APITimeoutError:
            raise
        except openai.APIConnectionError as error:
            if time.monotonic() > end:
                raise DemoFailed(f"no connection to {client.base_url} for {CONNECT_S:g} s: {error.__cause__ or error}") from error
            time.sleep(0.5)


def ask_and_be_refused(client: openai.OpenAI, request: Request) -> Refusal:
    try:
        ask_once(client, request)
    except openai.APIStatusError as error:
        body = error.body if isinstance(error.body, dict) else {}
        return Refusal(error.status_code, str(body.get("code", "")), str(body.get("message", error.message)))
    raise DemoFailed(f"a request for model {request.model!r} was answered with an image, expected a refusal")


def ask_once(client: openai.OpenAI, request: Request) -> DemoImage:
    """Make an image by one request; raise the SDK's error if it is refused, and DemoFailed if the answer has no image."""
    lora = {"lora": [{"name": name, "scale": scale} for name, scale in request.adapters]} if request.adapters else {}
    answer = client.images.generate(
        model=request.model,
        prompt=request.prompt,
        n=1,
        size=request.size,
        response_format="b64_json",
        extra_body={"seed": request.seed, "num_inference_steps": request.steps, "guidance_scale": request.guidance_scale, **lora},
    )
    if not answer.data or answer.data[0].b64_json is None:
        raise DemoFailed(f"the answer for model {request.model!r} holds no image")
    return DemoImage(base64.b64decode(answer.data[0].b64_json))


def same_bits(first: DemoImage, second: DemoImage) -> bool:
    return first.png == second.png


def mean_difference(first: DemoImage, second: DemoImage) -> float:
    """Return the mean difference of two images' RGB values, from 0 for equal images to 255."""
    return float(sum(ImageStat.Stat(ImageChops.difference(first.image(), second.image())).mean) / 3)


def contact_sheet(columns: Sequence[tuple[str, Sequence[DemoImage]]], rows: Sequence[str]) -> Image.Image:
    """Draw a sheet with a titled column of images for each stage and a caption from `rows` for each row.

    Images are resized to equal squares without smoothing; a column may have fewer images than there are rows.
    """
    step = TILE + MARGIN
    sheet = Image.new("RGB", (MARGIN + step * len(columns), CAPTION + (step + CAPTION) * len(rows)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=15)
    for column, (title, images) in enumerate(columns):
        left = MARGIN + step * column
        draw.text((left, MARGIN // 2), title, fill="black", font=font)
        for row, image in enumerate(images):
            top = CAPTION + (step + CAPTION) * row
            sheet.paste(image.image().resize((TILE, TILE), Image.Resampling.NEAREST), (left, top))
            if column == 0:
                draw.text((left, top + TILE + 4), rows[row], fill="dimgray", font=font)
    return sheet


def save(folder: Path, name: str, image: DemoImage) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    path.write_bytes(image.png)
    return path
