# SPDX-License-Identifier: Apache-2.0
"""The step cache that the options ask for on a pipeline, or the reason why it is refused."""

from collections.abc import Callable
from typing import Any

import torch
from diffusers.utils.torch_utils import unwrap_module

from diffusion_worker.config import StepCache as Kind
from diffusion_worker.errors import ConfigError
from diffusion_worker.runner.families import facts_of, model_record, models
from diffusion_worker.runner.model_call.components import DIVISIBLE_DENOISERS
from diffusion_worker.runner.parallel.rows import Parallel
from diffusion_worker.runner.pipelines.step_support import whole_run_reason
from diffusion_worker.runner.step_cache.cache import Agree, PipelineStepCache
from diffusion_worker.runner.step_cache.first_block import FirstBlock
from diffusion_worker.runner.step_cache.hooked_run import CacheVerdict
from diffusion_worker.runner.step_cache.interface import CacheKind
from diffusion_worker.runner.step_cache.mag import MagCache
from diffusion_worker.runner.step_cache.taylor_seer import TaylorSeer

KINDS: dict[Kind, Callable[[], CacheKind]] = {Kind.FIRST_BLOCK: FirstBlock, Kind.TAYLOR_SEER: TaylorSeer, Kind.MAG_CACHE: MagCache}


def make_step_cache(kind: Kind, pipeline: Any, modules: dict[str, torch.nn.Module], parallel: Parallel) -> PipelineStepCache | None:
    """Build the configured step cache and hook it onto the pipeline's denoisers; return None, and change nothing, for the kind NONE.

    Raises:
        ConfigError: the pipeline cannot have it; the message names the class, the reason and the classes that can.
    """
    if kind is Kind.NONE:
        return None
    made = KINDS[kind]()
    denoisers = {name: modules[name] for name in DIVISIBLE_DENOISERS if name in modules}
    reason = why_no_pipeline(pipeline) or next((why for part in denoisers.values() if (why := why_no_denoiser(kind, made, part))), None)
    if not denoisers:
        raise ConfigError(f"--step-cache {kind}: {type(pipeline).__name__} has none of the components {', '.join(DIVISIBLE_DENOISERS)}")
    if reason is not None:
        classes = ", ".join(sorted({type(part).__name__ for part in denoisers.values()}))
        known = ", ".join(supported(kind))
        raise ConfigError(
            f"--step-cache {kind}: {type(pipeline).__name__} with {classes} is not supported: {reason}; supported are {known}"
        )
    return PipelineStepCache(made, denoisers, _agreement(parallel) if parallel.world > 1 else None)


def _agreement(parallel: Parallel) -> Agree:
    """Return the exchange of a step cache's verdicts: blocks are skipped for a request only if every rank would skip them.

    Ranks call it together.
    """

    def agree(verdicts: list[CacheVerdict]) -> list[CacheVerdict]:
        computes = parallel.any_of([verdict is CacheVerdict.COMPUTE for verdict in verdicts])
        return [CacheVerdict.COMPUTE if found else CacheVerdict.SKIP for found in computes]

    return agree


def supported(kind: Kind) -> list[str]:
    """Return the names of the denoisers that can have a kind of cache: those whose record says that they were measured with it.

    Any other is refused at start, so that no request discovers it (`tests/worker/runner/step_cache/test_step_cache_families.py`).
    """
    return [record.name for record in models() if kind in record.step_caches]


def why_no_pipeline(pipeline: Any) -> str | None:
    """Return the reason why no request of a pipeline can use a step cache; None if they can."""
    kind: Any = type(pipeline)
    if facts_of(kind) is None:
        return "its class is no pipeline of diffusers and extends none, so it is not known whether its requests advance by steps"
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
