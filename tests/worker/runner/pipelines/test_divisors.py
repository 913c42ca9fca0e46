# SPDX-License-Identifier: Apache-2.0
"""Multiples of a side that a pipeline wants beside whole latents: found at load, so that a server can refuse other sizes."""

from typing import Any

import pytest
import torch

from diffusion_worker.runner.pipelines.description import describe
from support.families.rig.all import FAMILIES
from support.families.rig.family import Family, as_tensor

NAMED = {family.name: family for family in FAMILIES}
# The VAEs of the tiny pipelines have two levels instead of four.
MULTIPLES = {
    "CogView3PlusPipeline": 8,
    "CogView4Pipeline": 16,
    "Flux3ModularPipeline": 16,
    "KolorsPipeline": 8,
    "PixArtSigmaPipeline": 8,
    "QwenImage21Pipeline": 32,
    "SanaPipeline": 32,
    "StableDiffusion3ControlNetPipeline": 8,
    "StableDiffusionXLPipeline": 8,
}


def made(family: Family, pipeline: Any, height: int, width: int) -> torch.Tensor:
    arguments = family.request(1, 1, 3.0) | {"output_type": family.output_type, "generator": torch.Generator().manual_seed(1)}
    return as_tensor(family.call(pipeline, arguments | {"height": height, "width": width}))


@pytest.mark.slow
@pytest.mark.parametrize("name", MULTIPLES)
def test_a_model_makes_every_size_of_its_multiple_and_none_between(name: str) -> None:
    family = NAMED[name]
    pipeline = family.build()
    multiple = describe(pipeline, torch.float32, 1).size_multiple
    assert multiple == MULTIPLES[name]
    # A square image gives the number of values for each pixel.
    values = made(family, pipeline, 2 * multiple, 2 * multiple).numel() / (2 * multiple) ** 2
    for height, width in ((multiple, 3 * multiple), (3 * multiple, 2 * multiple)):
        found = made(family, pipeline, height, width)
        assert found.isfinite().all() and found.numel() == values * height * width
    height, width = 2 * multiple, 3 * multiple - multiple // 2
    try:
        between = made(family, pipeline, height, width).numel()
    except (ValueError, RuntimeError):
        return
    # QwenImage21 rounds the size down.
    assert between != values * height * width


def test_glm_image_wants_two_patches_of_two_latents_a_side() -> None:
    assert describe(NAMED["GlmImagePipeline"].build(), torch.float32, 1).size_multiple == 2 * 2 * 2
