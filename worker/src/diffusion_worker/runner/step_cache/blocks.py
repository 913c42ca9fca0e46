# SPDX-License-Identifier: Apache-2.0
"""The transformer blocks of a denoiser, as diffusers describes them to its own caches."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from diffusers.hooks._common import _ALL_TRANSFORMER_BLOCK_IDENTIFIERS
from diffusers.hooks._helpers import TransformerBlockRegistry
from diffusers.utils.torch_utils import unwrap_module

from diffusion_worker.runner.step_cache.hooked_run import CachedModule, CacheVerdict, hook

# The last block's change of the first block's input or output is remembered under this name.
TAIL = "tail"

# The handler of a hooked block's call; it gets the denoiser, the block, its former forward, and the arguments.
Passing = Callable[..., Any]


class Block:
    """A transformer block, and the hidden states of image and text among its arguments and its results."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self.layer = layer
        self._about: Any = TransformerBlockRegistry.get(type(unwrap_module(layer)))
        self._hidden: int = self._about.return_hidden_states_index
        self._text: int | None = self._about.return_encoder_hidden_states_index

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Find the image's and the text's states among a call's arguments, positional or named; text is None if the block returns none."""
        find, about = self._about._get_parameter_from_args_kwargs, self._about
        text = None if self._text is None else find(about.encoder_hidden_states_argument_name, args, kwargs)
        return find(about.hidden_states_argument_name, args, kwargs), text

    def parts(self, output: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the hidden states of image and text in the block's output."""
        if isinstance(output, torch.Tensor):
            return output, None
        return output[self._hidden], None if self._text is None else output[self._text]

    def output(self, hidden: torch.Tensor | None, text: torch.Tensor | None) -> Any:
        """Pack hidden states into the form that the block itself returns: the image alone, or image and text in its own order."""
        if self._text is None:
            return hidden
        return (hidden, text) if self._hidden < self._text else (text, hidden)


def blocks_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """List a denoiser's transformer blocks as they run: the entries of each direct `ModuleList` with a name that diffusers' caches know."""
    lists = [part for name, part in module.named_children() if name in _ALL_TRANSFORMER_BLOCK_IDENTIFIERS]
    return [block for part in lists if isinstance(part, torch.nn.ModuleList) for block in part]


def why_no_blocks(module: torch.nn.Module) -> str | None:
    """Return an obstacle to hooks on the first and last block: fewer than two, or a class that diffusers does not know; otherwise None."""
    blocks = blocks_of(module)
    if len(blocks) < 2:
        return f"it has {len(blocks)} transformer blocks, expected at least 2"
    for block in blocks:
        try:
            Block(block)
        except ValueError:
            return f"diffusers has no description of its blocks, of the class {type(block).__name__}"
    return None


def passed_through(cached: CachedModule, block: Block, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a block, or return its input as its output where blocks are skipped."""
    if cached.run is None or cached.run.verdict is CacheVerdict.COMPUTE:
        return forward(*args, **kwargs)
    return block.output(*block.given(args, kwargs))


def hook_blocks(module: torch.nn.Module, first: Passing, last: Passing) -> CachedModule:
    """Put `first` and `last` around a model's first and last block; the others return their input where blocks are skipped.

    Return the handle whose `running` switches these hooks on; without it all blocks compute as before.
    """
    cached = CachedModule()
    blocks = [Block(layer) for layer in blocks_of(module)]
    for block, passing in zip(blocks, [first, *[passed_through] * (len(blocks) - 2), last], strict=True):
        hook(block.layer, functools.partial(passing, cached, block))
    return cached


def plus(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum of two tensors, or `one` as it is (None included) if either is missing.

    Stable Diffusion 3's last block returns no text, which nothing uses then.
    """
    return one if one is None or other is None else other + one


def minus(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    return None if one is None or other is None else one - other
