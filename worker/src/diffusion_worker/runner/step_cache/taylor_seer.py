# SPDX-License-Identifier: Apache-2.0
"""The Taylor cache: outputs of attention layers are computed every few steps only, and continued by a Taylor series in between.

Diffusers' `TaylorSeerCacheHook` decides when to compute, and its `TaylorSeerState` continues.
"""

import re
from typing import Any, ClassVar

import torch
from diffusers.hooks import TaylorSeerCacheConfig
from diffusers.hooks.taylorseer_cache import _TRANSFORMER_BLOCK_IDENTIFIERS, TaylorSeerCacheHook, TaylorSeerState

from diffusion_worker.runner.step_cache.hooked_run import CachedModule, CacheVerdict, Kept, Tensors, hook
from diffusion_worker.runner.step_cache.interface import bytes_of, own_state


class _TaylorBranch:
    def __init__(self, config: TaylorSeerCacheConfig) -> None:
        self.verdict = CacheVerdict.COMPUTE
        self._config = config
        self._rule = TaylorSeerCacheHook(
            state_manager=own_state(TaylorSeerState),
            cache_interval=config.cache_interval,
            disable_cache_before_step=config.disable_cache_before_step,
            disable_cache_after_step=config.disable_cache_after_step,
            taylor_factors_dtype=config.taylor_factors_dtype,
        )
        self._states: dict[str, TaylorSeerState] = {}
        self._step = -1

    def begin(self) -> None:
        computes, clock = self._rule._measure_should_compute()
        self._step = clock.current_step
        self.verdict = CacheVerdict.COMPUTE if computes else CacheVerdict.SKIP

    def decide(self, kept: Kept) -> CacheVerdict:
        return self.verdict

    def recall(self, place: str) -> Tensors | None:
        state = self._states[place]
        state.current_step = self._step
        predicted: Tensors = state.predict()
        return predicted

    def keep(self, kept: Kept) -> None:
        for place, tensors in kept.items():
            dtype = self._config.taylor_factors_dtype or tensors[0].dtype  # type: ignore[union-attr]
            state = self._states.setdefault(place, TaylorSeerState(dtype, self._config.max_order))
            state.current_step = self._step
            state.update(tuple(tensors))

    def held_bytes(self) -> int:
        factors = [terms for state in self._states.values() for terms in state.taylor_factors.values()]
        return bytes_of(term for terms in factors for term in terms.values())


class TaylorSeer:
    """The cache that computes outputs of attention layers every few steps only, and continues them by the first terms of a Taylor series.

    Without a `taylor_factors_dtype` the terms are kept in the precision of the layers: diffusers' own default, bfloat16, would cost a
    float32 model its precision.
    """

    PATTERNS: ClassVar = [re.compile(pattern) for pattern in _TRANSFORMER_BLOCK_IDENTIFIERS]

    def __init__(self, config: TaylorSeerCacheConfig | None = None) -> None:
        self.config = config or TaylorSeerCacheConfig(taylor_factors_dtype=None)

    def why_not(self, module: torch.nn.Module) -> str | None:
        return None if self._layers(module) else "it has no attention layers by the names that diffusers looks for"

    def branch(self, steps: int | None) -> _TaylorBranch:
        return _TaylorBranch(self.config)

    def put_on(self, module: torch.nn.Module) -> CachedModule:
        cached = CachedModule()
        for place, layer in self._layers(module).items():
            hook(layer, lambda forward, *args, place=place, **kwargs: _continued(cached, place, forward, *args, **kwargs))
        return cached

    def _layers(self, module: torch.nn.Module) -> dict[str, torch.nn.Module]:
        return {name: part for name, part in module.named_modules() if any(pattern.fullmatch(name) for pattern in self.PATTERNS)}


def _continued(cached: CachedModule, place: str, forward: Any, *args: Any, **kwargs: Any) -> Any:
    run = cached.run
    if run is None:
        return forward(*args, **kwargs)
    if run.verdict is CacheVerdict.COMPUTE:
        output = forward(*args, **kwargs)
        run.kept[place] = [output] if isinstance(output, torch.Tensor) else list(output)
        return output
    predicted = run.recall(place)
    assert predicted is not None, "nothing is continued before it was computed"
    return predicted[0] if len(predicted) == 1 else tuple(predicted)
