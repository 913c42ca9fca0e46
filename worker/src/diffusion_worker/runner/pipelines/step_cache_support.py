# SPDX-License-Identifier: Apache-2.0
"""Denoisers and pipelines that a step cache fits. A combination not known to be right is refused at start, so no request discovers it.

The records of the classes that were measured say so (`tests/worker/runner/step_cache/test_step_cache_families.py`). Requests that share
calls get what they get alone, and alone they get what diffusers' own hook returns.
"""

from typing import Any

import torch
from diffusers.utils.torch_utils import unwrap_module

from diffusion_worker.config import StepCache as Kind
from diffusion_worker.runner.families import model_record, models
from diffusion_worker.runner.pipelines.step_support import whole_run_reason
from diffusion_worker.runner.step_cache.interface import CacheKind


def supported(kind: Kind) -> list[str]:
    """Return the names of the denoisers that can have a kind of cache."""
    return [record.name for record in models() if kind in record.step_caches]


def why_no_pipeline(pipeline: Any) -> str | None:
    """Return the reason why no request of a pipeline can use a step cache; None if they can."""
    kind: Any = type(pipeline)
    whole = whole_run_reason(kind)
    if whole is not None:
        return f"its requests run whole, because it {whole}"
    if any("controlnet" in name for name in pipeline.components):
        return "a ControlNet adds to the states after each block, and would still do so after a block that is skipped"
    return None


def why_no_denoiser(kind: Kind, cache: CacheKind, module: torch.nn.Module) -> str | None:
    """Return the obstacle to a cache: what the cache itself objects to, or that the class was not measured with it; None without any."""
    reason = cache.why_not(module)
    if reason is None and kind not in model_record(type(unwrap_module(module))).step_caches:
        return "no test has shown that it makes right images with this cache while several requests share a call"
    return reason
