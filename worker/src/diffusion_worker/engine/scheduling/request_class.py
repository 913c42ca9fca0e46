# SPDX-License-Identifier: Apache-2.0
"""Classes of requests that are alike for the scheduler, computed without torch. Pure.

Requests of a class have model calls of the same shape. So they can share steps, cost the same, and are served in order of arrival. Calls
that cannot be merged after all (another prompt length, say) still run apart within a step.
"""

import msgspec

from diffusion_worker.messages import RequestSpec

# Pixels assumed for the pipeline's default size while it is unknown.
UNKNOWN_PIXELS = 512 * 512


class Defaults(msgspec.Struct, frozen=True):
    """The pipeline's pixels, frames and steps for a request that gives none; None if unknown.

    `references` is true if the model sees the images of an edit beside the one it makes.
    """

    height: int | None = None
    width: int | None = None
    frames: int | None = None
    steps: int | None = None
    references: bool = False


class RequestClass(msgspec.Struct, frozen=True):
    """A kind of model call: only requests for which all of these are equal share a step, and exact ones run one by one.

    An edit that starts from its image is of the same class as an image from text, since its calls do not differ. `references` counts the
    pixels of input images that the model sees in each call. Sizes are None while nobody knows the pipeline's own.
    """

    height: int | None
    width: int | None
    frames: int | None
    guided: bool
    exact: bool
    accelerated: bool = False
    references: int = 0

    @property
    def load(self) -> float:
        """Pixels in the model calls of one request, to which their time and memory are about proportional."""
        pixels = self.height * self.width if self.height and self.width else UNKNOWN_PIXELS
        return float((pixels * (self.frames or 1) + self.references) * (2 if self.guided else 1))

    @property
    def sized(self) -> bool:
        """Return whether height and width are known, without which `load` is a guess."""
        return bool(self.height and self.width)

    def __str__(self) -> str:
        size = f"{self.width}x{self.height}" if self.sized else "the default size"
        return f"{size}, {self.frames} frames" if self.frames else size


def is_guided(guidance_scale: float | None) -> bool:
    """Return True if a step takes two model calls for guidance: the scale is over 1, or absent, since most pipelines then guide."""
    return guidance_scale is None or guidance_scale > 1


def class_of(spec: RequestSpec, defaults: Defaults) -> RequestClass:
    """Sort a spec into its class; height, width and frames that it leaves open are the pipeline's, from `defaults`."""
    return RequestClass(
        height=spec.height or defaults.height,
        width=spec.width or defaults.width,
        frames=spec.frames or defaults.frames,
        guided=is_guided(spec.guidance_scale),
        # A request that has the model alone shares no step either.
        exact=spec.exact or spec.whole,
        accelerated=spec.accelerated,
        references=sum(item.shape[0] * item.shape[1] for item in spec.images) if defaults.references else 0,
    )
