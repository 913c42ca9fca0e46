# SPDX-License-Identifier: Apache-2.0
"""Images that a script starts from, as the engine takes them."""

from collections.abc import Sequence

from PIL import ImageOps
from PIL.Image import Image

from diffusion_worker.engine.requests.admission import InputImage
from diffusion_worker.errors import refused
from diffusion_worker.messages import Task
from diffusion_worker.server.encoding.input_images import decoded


def image_fields(image: Image | Sequence[Image] | None, mask: Image | None, strength: float | None) -> dict[str, object]:
    """Return the fields of a request that starts from images: task, images, mask and strength; an empty dict without an image.

    Raises:
        RequestError: InvalidRequest, for something else than images, or a mask or a strength without an image.
    """
    if image is None:
        for field, value in (("mask", mask), ("strength", strength)):
            if value is not None:
                raise refused(field, "an image with it", "none")
        return {}
    images = [image] if isinstance(image, Image) or not isinstance(image, Sequence) else list(image)
    return {
        "task": Task.EDIT if mask is None else Task.INPAINT,
        "images": [_image(one) for one in images],
        "mask": None if mask is None else _mask(mask),
        "strength": strength,
    }


def _image(image: object) -> InputImage:
    """Convert an image to its visible form: turned by its EXIF, transparent parts on white."""
    turned = ImageOps.exif_transpose(_required("image", image))
    return decoded(turned, turned.size).image


def _mask(image: object) -> InputImage:
    """Convert a mask to levels of grey, turned by its EXIF; white is to be painted again. Raise RequestError unless it is a PIL image."""
    grey = ImageOps.exif_transpose(_required("mask", image)).convert("L")
    return InputImage(grey.tobytes(), grey.height, grey.width, 1)


def _required(field: str, image: object) -> Image:
    if not isinstance(image, Image):
        raise refused(field, "a PIL image", type(image).__name__)
    return image
