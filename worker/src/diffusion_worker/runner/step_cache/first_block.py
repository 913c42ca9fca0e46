# SPDX-License-Identifier: Apache-2.0
"""The first-block cache: later blocks are skipped while the first changes its input about as when they were last computed.

The rule is that of diffusers' `FirstBlockCacheConfig`, asked for each request by itself.
"""

from typing import Any

import torch
from diffusers.hooks.first_block_cache import FBCHeadBlockHook, FBCSharedBlockState

from diffusion_worker.runner.step_cache.blocks import TAIL, Block, hook_blocks, minus, passed_through, plus, why_no_blocks
from diffusion_worker.runner.step_cache.hooked_run import CachedModule, CacheVerdict, FirstBlockOnly, Kept, Tensors
from diffusion_worker.runner.step_cache.interface import bytes_of, own_state

# The first block's output and change.
HEAD = "head"
RESIDUAL = "residual"


class _FirstBlockBranch:
    def __init__(self, threshold: float) -> None:
        self.verdict = CacheVerdict.OPEN
        self._rule = FBCHeadBlockHook(own_state(FBCSharedBlockState), threshold)
        self._state: FBCSharedBlockState = self._rule.state_manager.get_state()
        self._probed: Kept = {}

    def begin(self) -> None:
        self._probed = {}
        self.verdict = CacheVerdict.OPEN

    def decide(self, kept: Kept) -> CacheVerdict:
        return CacheVerdict.COMPUTE if self._rule._should_compute_remaining_blocks(kept[RESIDUAL][0]) else CacheVerdict.SKIP

    def recall(self, place: str) -> Tensors | None:
        return self._state.tail_block_residuals if place == TAIL else self._probed.get(place)

    def keep(self, kept: Kept) -> None:
        if self.verdict is CacheVerdict.OPEN:
            self._probed = kept
            return
        if self.verdict is CacheVerdict.COMPUTE:
            self._state.head_block_residual = (kept | self._probed)[RESIDUAL][0]
            self._state.tail_block_residuals = kept[TAIL]
        self._probed = {}

    def held_bytes(self) -> int:
        return bytes_of([self._state.head_block_residual, *(self._state.tail_block_residuals or ())])


# The value that the authors of the method use for Flux (ParaAttention, and diffusers' guide to it). Diffusers' own 0.05 skips next to
# nothing.
THRESHOLD = 0.08


class FirstBlock:
    """The cache that skips later blocks while the first changes its input about as when they were last computed."""

    def __init__(self, threshold: float | None = None) -> None:
        self.threshold = THRESHOLD if threshold is None else threshold

    def why_not(self, module: torch.nn.Module) -> str | None:
        return why_no_blocks(module)

    def branch(self, steps: int | None) -> _FirstBlockBranch:
        return _FirstBlockBranch(self.threshold)

    def put_on(self, module: torch.nn.Module) -> CachedModule:
        return hook_blocks(module, _first_block, _last_block)


def _first_block(cached: CachedModule, block: Block, forward: Any, *args: Any, **kwargs: Any) -> Any:
    run = cached.run
    if run is None:
        return forward(*args, **kwargs)
    known = run.recall(HEAD)
    if known is None:
        hidden, text = block.parts(forward(*args, **kwargs))
        run.kept[RESIDUAL] = [hidden - block.given(args, kwargs)[0]]
        if run.verdict is CacheVerdict.OPEN:
            run.verdict = run.decide(run.kept)
        if run.verdict is CacheVerdict.OPEN:
            run.kept[HEAD] = [hidden, text]
            raise FirstBlockOnly
    else:
        hidden, text = known  # type: ignore[assignment]
    run.passed = [hidden, text]
    if run.verdict is CacheVerdict.SKIP:
        residuals = run.recall(TAIL)
        assert residuals is not None, "nothing is skipped before it was computed"
        run.kept.clear()
        return block.output(*(plus(one, other) for one, other in zip([hidden, text], residuals, strict=True)))
    return block.output(hidden, text)


def _last_block(cached: CachedModule, block: Block, forward: Any, *args: Any, **kwargs: Any) -> Any:
    output = passed_through(cached, block, forward, *args, **kwargs)
    if cached.run is not None and cached.run.verdict is CacheVerdict.COMPUTE:
        cached.run.kept[TAIL] = [minus(*pair) for pair in zip(block.parts(output), cached.run.passed, strict=True)]
    return output
