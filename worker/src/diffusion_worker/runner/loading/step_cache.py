# SPDX-License-Identifier: Apache-2.0
"""The step cache that the options ask for on a pipeline, or the reason why it is refused."""

from collections.abc import Callable
from typing import Any

import torch

from diffusion_worker.config import StepCache as Kind
from diffusion_worker.errors import ConfigError
from diffusion_worker.runner.model_call.components import DIVISIBLE_DENOISERS
from diffusion_worker.runner.parallel.rows import Parallel
from diffusion_worker.runner.pipelines.step_cache_support import supported, why_no_denoiser, why_no_pipeline
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
