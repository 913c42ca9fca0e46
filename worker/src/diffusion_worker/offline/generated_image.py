# SPDX-License-Identifier: Apache-2.0
"""A finished image in a script."""

from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path

from PIL import Image

from diffusion_worker.engine.state.request_events import FinishedImage, Provenance, Timings
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.server.encoding.images import OutputFormat, encode, metadata_of

FORMATS = {".png": OutputFormat.PNG, ".jpg": OutputFormat.JPEG, ".jpeg": OutputFormat.JPEG, ".webp": OutputFormat.WEBP}


@dataclass(frozen=True)
class GeneratedImage:
    """An image with its prompt and provenance: with these and the seed it can be made again."""

    prompt: str
    provenance: Provenance
    made: FinishedImage = field(repr=False)

    @property
    def seed(self) -> int:
        """The seed from which this image was made."""
        return self.made.seed

    @property
    def timings(self) -> Timings:
        """The time in seconds that each stage of making this image took."""
        return self.made.timings

    @property
    def metadata(self) -> dict[str, object]:
        """The plain data that `save` embeds in a file: provenance, seed and size. It leaves out the prompt."""
        return metadata_of(self.provenance, self.made)

    @cached_property
    def image(self) -> Image.Image:
        """The pixels as a PIL image in mode RGB, made at the first use and then kept."""
        return Image.frombytes("RGB", (self.made.width, self.made.height), bytes(self.made.pixels))

    def save(self, path: str | PathLike[str], *, quality: int | None = None) -> Path:
        """Encode the image in the format of the suffix (.png, .jpg, .jpeg, .webp), with its metadata, and return the path.

        An existing file is replaced. `quality`, by default 90, is for JPEG and WebP only.

        Raises:
            RequestError: InvalidRequest for another suffix, a `quality` for a PNG or outside 0 to 100, or a side too long for the format.
                OSError: writing failed.
        """
        target = Path(path)
        if target.suffix.lower() not in FORMATS:
            raise RequestError(ErrorCode.INVALID_REQUEST, f"path: expected a name that ends in {', '.join(FORMATS)}, found {target.name!r}")
        output_format = FORMATS[target.suffix.lower()]
        if quality is not None and (output_format is OutputFormat.PNG or not 0 <= quality <= 100):
            raise RequestError(
                ErrorCode.INVALID_REQUEST, f"quality: expected 0 to 100 and a JPEG or WebP, found {quality} for {target.name!r}"
            )
        made = self.made
        target.write_bytes(
            encode(made.pixels, made.height, made.width, output_format=output_format, compression=quality, metadata=self.metadata)
        )
        return target
