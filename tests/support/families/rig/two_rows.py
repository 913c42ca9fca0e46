# SPDX-License-Identifier: Apache-2.0
"""Requests for two videos in one call, where the pipeline takes them only as two prompts: it repeats no embeddings it is given."""

from collections.abc import Callable
from typing import Any

import torch
from PIL import Image

from support.families.rig.family import Arguments


def of_two_prompts(request: Callable[[int, int, float], Arguments], *, images: bool = False) -> Arguments:
    """Every embedding and mask of a request twice; `images`: those and videos too, where the pipeline takes one for each prompt."""
    arguments = request(1, 2, 1.0)
    twice = {name: value.repeat(2, *(1,) * (value.dim() - 1)) for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    return twice | ({name: [value, value] for name, value in arguments.items() if _is_image(value)} if images else {})


def _is_image(value: Any) -> bool:
    return isinstance(value, Image.Image) or (isinstance(value, list) and isinstance(value[0], Image.Image))
