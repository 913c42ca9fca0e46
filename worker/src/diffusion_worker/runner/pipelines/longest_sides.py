# SPDX-License-Identifier: Apache-2.0
"""The largest image that a denoiser has positions for: found at load, so that a larger one is refused before a rank sees it.

Most models compute positions for any size. Those that read them from a table fail on a longer side, or wrap around in it and make a wrong
image, as AuraFlow does.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch

from diffusion_worker.runner.families import Positions, model_record

Patches = tuple[int, int]


def longest_sides(denoiser: torch.nn.Module, latent: int) -> tuple[int, int] | None:
    """Find the largest height and width in pixels that every position table of a denoiser covers; None if it has no table.

    `latent` is the number of pixels along the side of a latent.
    """
    config = getattr(denoiser, "config", {})
    positions = model_record(type(denoiser)).positions or Positions()
    found = [*_of_modules(denoiser, positions), *_of_config(config, positions)]
    if not found:
        return None
    patch = _patch(config)
    height, width = (min(sides) * patch * latent for sides in zip(*found, strict=True))
    return height, width


def _of_modules(denoiser: torch.nn.Module, positions: Positions) -> Iterator[Patches]:
    """Yield height and width in patches of every position table that a submodule keeps, stored or learned.

    The side is `pos_embed_max_size`, or its root where the record counts by area. Smaller images use the middle of the table (SD3, OmniGen,
    AuraFlow) or a corner (CogView3 Plus).
    """
    part: Any
    for part in denoiser.modules():
        # Not by getattr: diffusers answers a model's configuration to that, with a warning.
        if size := vars(part).get("pos_embed_max_size"):
            side = math.isqrt(size) if positions.by_area else size
            yield side, side
        elif type(part).__name__ == positions.learned:
            yield int(part.max_size[1]), int(part.max_size[2])


def _of_config(config: Any, positions: Positions) -> Iterator[Patches]:
    """Yield the sizes, in patches, of rotary tables by the model's configuration and record; some models keep these tables in no module."""
    lengths = config.get("axes_lens")
    if isinstance(lengths, list | tuple) and len(lengths) == 3:
        # Z-Image and Lumina 2 have lengths for text, height and width.
        yield int(lengths[1]), int(lengths[2])
    if positions.side is not None:
        yield positions.side, positions.side
    if positions.one_table:
        longest = max(size // patch for size, patch in zip(config["max_size"], config["patch_size"], strict=True))
        yield longest, longest


def _patch(config: Any) -> int:
    size = config.get("patch_size") or config.get("all_patch_size") or 1
    return int(max(size) if isinstance(size, list | tuple) else size)
