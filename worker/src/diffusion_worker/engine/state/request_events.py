# SPDX-License-Identifier: Apache-2.0
"""Results of a request: events during its run, and in the end images with everything needed to make them again."""

import msgspec

from diffusion_worker.messages import Task


class StepTaken(msgspec.Struct, frozen=True):
    """Image `index` of the request has taken `step` of `steps` steps; `steps` is None where nobody knows.

    `attempt` counts from 1: an image that begins again, after a loss of ranks or to run alone, starts at step 0.
    """

    index: int
    step: int
    steps: int | None
    attempt: int = 1


class PreviewMade(msgspec.Struct, frozen=True):
    """Preview `number` (from 0) of image `index` in this `attempt` (from 1): rows of RGB bytes."""

    index: int
    number: int
    pixels: bytes | memoryview
    height: int
    width: int
    attempt: int = 1


class Held(msgspec.Struct, frozen=True):
    """A request's wait: the state of the model that causes it (`asleep`, `waking`, …), and the number of requests before it."""

    state: str
    ahead: int


RequestEvent = StepTaken | PreviewMade | Held


class Timings(msgspec.Struct, frozen=True):
    """Seconds of one image, from the engine's acceptance to its end; calls shared with others count in full."""

    queue: float = 0.0
    encode: float = 0.0
    denoise: float = 0.0
    decode: float = 0.0
    post: float = 0.0
    total: float = 0.0


class FinishedImage(msgspec.Struct, frozen=True):
    """A finished image: rows of RGB bytes, and its seed and seconds. `peak_bytes` is 0 if unknown."""

    pixels: bytes | memoryview
    height: int
    width: int
    seed: int
    timings: Timings = Timings()
    peak_bytes: int = 0


class AppliedAdapter(msgspec.Struct, frozen=True):
    """An adapter that an image was made with."""

    name: str
    digest: str
    scale: float
    identity: str = ""


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Provenance of a request's images, beside their seeds. `digest` is null until the model's files are hashed.

    `steps` and `guidance_scale` are null if the pipeline decided them without reporting. `sigmas` and `shift` are those of the adapters'
    recipe, null if none has any. `accelerated` tells whether a step cache was allowed to skip work. `engine` is the worker's version.
    """

    model: str
    pipeline: str
    revision: str | None
    digest: str | None
    task: Task
    # An edit's distance from its image; null for others, or if the pipeline decided.
    strength: float | None
    adapters: list[AppliedAdapter]
    steps: int | None
    guidance_scale: float | None
    accelerated: bool
    exact: bool
    engine: str
    sigmas: list[float] | None = None
    shift: float | None = None


class Generation(msgspec.Struct, frozen=True):
    """The outcome of one request."""

    images: list[FinishedImage]
    provenance: Provenance
