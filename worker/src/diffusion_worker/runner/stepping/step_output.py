# SPDX-License-Identifier: Apache-2.0
"""The results of a tick on one rank."""

from typing import Any

import msgspec

from diffusion_worker.messages import ErrorReport, Progress, PromptCacheStats
from diffusion_worker.runner.stepping.stage_clock import StageClock


class PreviewOutput(msgspec.Struct, frozen=True):
    """A finished preview of a request, not yet converted to pixels. `number` counts the request's previews from 0."""

    request_id: str
    number: int
    image: Any


class StepOutput(msgspec.Struct):
    """The results of a tick on this rank: bodies' outputs (images), errors and replays by request id, progress, previews, and figures.

    `clocks` has the costs of each image. `calls` counts all model calls, a merged one once, and `rows` the rows of denoiser calls only. The
    other figures and the progress are those of `TickDone`.
    """

    images: dict[str, Any] = {}
    clocks: dict[str, StageClock] = {}
    progress: list[Progress] = []
    previews: list[PreviewOutput] = []
    errors: dict[str, ErrorReport] = {}
    # Requests that ended as they need the model alone, with what they were about to do with it.
    replays: dict[str, str] = {}
    rows: int = 0
    calls: int = 0
    denoise_seconds: float = 0.0
    peak_bytes: int = 0
    split: bool = False
    features: dict[str, str] | None = None
    skipped: int = 0
    prompt_cache: PromptCacheStats | None = None
