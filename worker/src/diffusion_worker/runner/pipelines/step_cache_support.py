# SPDX-License-Identifier: Apache-2.0
"""Denoisers and pipelines that a step cache fits. A combination not known to be right is refused at start, so no request discovers it.

The classes were measured (`tests/worker/runner/step_cache/test_step_cache_families.py`). Requests that share calls get what they get alone,
and alone they get what diffusers' own hook returns.
"""

from typing import Any

import torch
from diffusers.utils.torch_utils import unwrap_module

from diffusion_worker.config import StepCache as Kind
from diffusion_worker.runner.pipelines.step_support import whole_run_reason
from diffusion_worker.runner.step_cache.interface import CacheKind

_WITH_BLOCKS = frozenset(
    {
        *("CogVideoXTransformer3DModel", "CogView4Transformer2DModel", "DiTTransformer2DModel", "FluxTransformer2DModel"),
        "HunyuanImageTransformer2DModel",
        *("HunyuanVideoTransformer3DModel", "LTXVideoTransformer3DModel", "MochiTransformer3DModel", "PixArtTransformer2DModel"),
        *("QwenImageTransformer2DModel", "SD3Transformer2DModel", "WanTransformer3DModel"),
    }
)
# Classes matched by the names of their attention layers.
_WITH_ATTENTION = frozenset(
    {
        *("AuraFlowTransformer2DModel", "BriaTransformer2DModel", "Flux2Transformer2DModel", "FluxTransformer2DModel"),
        *("HunyuanVideo15Transformer3DModel", "HunyuanVideoTransformer3DModel", "LTX2VideoTransformer3DModel"),
        *("LongCatImageTransformer2DModel", "MotifVideoTransformer3DModel", "OvisImageTransformer2DModel"),
        *("QwenImage21Transformer2DModel", "QwenImageTransformer2DModel", "SD3Transformer2DModel"),
    }
)
SUPPORTED: dict[Kind, frozenset[str]] = {
    Kind.FIRST_BLOCK: _WITH_BLOCKS,
    Kind.TAYLOR_SEER: _WITH_ATTENTION,
    Kind.MAG_CACHE: frozenset({"FluxTransformer2DModel"}),
}


def why_no_pipeline(pipeline: Any) -> str | None:
    """Return the reason why no request of a pipeline can use a step cache; None if they can."""
    kind: Any = type(pipeline)
    whole = whole_run_reason(kind)
    if whole is not None:
        return f"its requests run whole, because it {whole}"
    if any("controlnet" in name for name in pipeline.components):
        return "a ControlNet adds to the states between the blocks, also to those that are skipped"
    return None


def why_no_denoiser(kind: Kind, cache: CacheKind, module: torch.nn.Module) -> str | None:
    """Return the reason why a denoiser cannot have a cache; None if it can."""
    reason = cache.why_not(module)
    if reason is None and type(unwrap_module(module)).__name__ not in SUPPORTED[kind]:
        return "it was not shown to be right with the rows of several requests"
    return reason
