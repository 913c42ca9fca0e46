# SPDX-License-Identifier: Apache-2.0
"""The magnitude cache: all blocks are skipped while the magnitude of their change, measured for the model beforehand, moves little.

The rule is that of diffusers' `MagCacheConfig`. It goes by the number of the step alone.
"""

import types
from typing import Any

import torch
from diffusers.hooks import MagCacheConfig, mag_cache
from diffusers.hooks.mag_cache import MagCacheBlockHook, MagCacheHeadHook, MagCacheState

from diffusion_worker.runner.families import model_record, models
from diffusion_worker.runner.step_cache.blocks import TAIL, Block, hook_blocks, minus, passed_through, plus, why_no_blocks
from diffusion_worker.runner.step_cache.hooked_run import CachedModule, CacheVerdict, Kept, Tensors
from diffusion_worker.runner.step_cache.interface import bytes_of, own_state


class _MagBranch:
    """The last residual of a request's calls, and diffusers' rule in the form of its hook.

    The hook runs on one-element dummies, since only its verdict on the step is wanted.
    """

    def __init__(self, config: MagCacheConfig) -> None:
        self.verdict = CacheVerdict.COMPUTE
        self._rule = MagCacheHeadHook(own_state(MagCacheState), config)
        self._rule._metadata = types.SimpleNamespace(
            hidden_states_argument_name="hidden_states",
            return_encoder_hidden_states_index=None,
            _get_parameter_from_args_kwargs=lambda name, args, kwargs: kwargs[name],
        )
        self._rule.fn_ref = types.SimpleNamespace(original_forward=lambda hidden_states: hidden_states)
        self._clock = MagCacheBlockHook(self._rule.state_manager, is_tail=True, config=config)
        self._residual: Tensors | None = None

    def begin(self) -> None:
        state = self._rule.state_manager.get_state()
        one = torch.zeros(1)
        state.previous_residual = None if self._residual is None else one
        self._rule.new_forward(None, hidden_states=one)
        self.verdict = CacheVerdict.COMPUTE if state.should_compute else CacheVerdict.SKIP
        self._clock._advance_step(state)

    def decide(self, kept: Kept) -> CacheVerdict:
        return self.verdict

    def recall(self, place: str) -> Tensors | None:
        return self._residual if place == TAIL else None

    def keep(self, kept: Kept) -> None:
        self._residual = kept.get(TAIL, self._residual)

    def held_bytes(self) -> int:
        return bytes_of(self._residual or ())


class MagCache:
    """A step cache that goes by the number of the step: it skips every block where ratios from a calibration change little.

    Diffusers has the ratios. `why_not` refuses a model whose record names none, which has to be calibrated first.
    """

    def __init__(self) -> None:
        self._ratios: torch.Tensor | None = None

    def why_not(self, module: torch.nn.Module) -> str | None:
        if not model_record(type(module)).mag_ratios:
            known = ", ".join(record.name for record in models() if record.mag_ratios)
            return f"diffusers has no magnitudes of its residuals, only those of {known}"
        return why_no_blocks(module)

    def branch(self, steps: int | None) -> _MagBranch:
        given = {} if steps is None else {"num_inference_steps": steps}
        return _MagBranch(MagCacheConfig(mag_ratios=self._ratios, **given))

    def put_on(self, module: torch.nn.Module) -> CachedModule:
        self._ratios = getattr(mag_cache, model_record(type(module)).mag_ratios)
        return hook_blocks(module, _before_blocks, _after_blocks)


def _before_blocks(cached: CachedModule, block: Block, forward: Any, *args: Any, **kwargs: Any) -> Any:
    run = cached.run
    if run is None:
        return forward(*args, **kwargs)
    hidden, text = block.given(args, kwargs)
    run.passed = [hidden]
    if run.verdict is CacheVerdict.COMPUTE:
        return forward(*args, **kwargs)
    residual = run.recall(TAIL)
    assert residual is not None, "nothing is skipped before it was computed"
    return block.output(plus(hidden, residual[0]), text)


def _after_blocks(cached: CachedModule, block: Block, forward: Any, *args: Any, **kwargs: Any) -> Any:
    output = passed_through(cached, block, forward, *args, **kwargs)
    if cached.run is not None and cached.run.verdict is CacheVerdict.COMPUTE:
        cached.run.kept[TAIL] = [minus(block.parts(output)[0], cached.run.passed[0])]
    return output
