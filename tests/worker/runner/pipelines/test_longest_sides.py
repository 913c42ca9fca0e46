# SPDX-License-Identifier: Apache-2.0
"""The longest sides that a model has positions for: found at load, exact to the pixel; the server refuses longer ones."""

from typing import Any

import pytest
import torch

from diffusion_worker.config import RequestLimits
from diffusion_worker.engine.requests.admission import GenerationParams, InputImage, check, size_of_edit
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.messages import ModelInfo
from diffusion_worker.runner.pipelines.description import describe, kind_of
from support.families.rig.all import FAMILIES
from support.families.rig.family import Family, as_tensor

BOUNDED = ModelInfo(pipeline="P", dtype="float32", size_multiple=8, weights_bytes=1, max_height=64, max_width=128)
# The families that read positions from a table, with their longest height and width in pixels.
TABLES = {
    "AuraFlowPipeline": (64, 64),
    "CogView3PlusPipeline": (64, 64),
    "Cosmos2TextToImagePipeline": (64, 64),
    "Lumina2Pipeline": (512, 512),
    "OmniGenPipeline": (512, 512),
    "StableDiffusion3Pipeline": (64, 64),
    "ZImagePipeline": (128, 128),
}
NAMED = {family.name: family for family in FAMILIES}


def made(family: Family, pipeline: Any, **size: int) -> torch.Tensor:
    arguments = family.request(1, 2, 3.0) | {"output_type": family.output_type, "generator": torch.Generator().manual_seed(1)} | size
    return as_tensor(family.call(pipeline, arguments))


@pytest.mark.parametrize("name", TABLES)
def test_a_model_with_a_table_of_positions_makes_its_longest_sides_and_nothing_longer(name: str) -> None:
    family = NAMED[name]
    pipeline = family.build()
    model = describe(pipeline, torch.float32, 1)
    assert (model.max_height, model.max_width) == TABLES[name]
    side = 2 * model.size_multiple
    for size in ({"height": model.max_height, "width": side}, {"height": side, "width": model.max_width}):
        assert made(family, pipeline, **size).isfinite().all()
    with pytest.raises((ValueError, RuntimeError, IndexError)):
        # Only the height is too long: with too long a width AuraFlow wraps around and makes a wrong image without an error.
        made(family, pipeline, height=TABLES[name][0] + model.size_multiple, width=side)


def params(width: int, height: int) -> GenerationParams:
    return GenerationParams(prompt="a red digit seven", width=width, height=height)


def test_a_size_that_the_model_cannot_make_is_refused_with_its_own_bounds() -> None:
    check(params(128, 64), RequestLimits(), BOUNDED)
    for width, height in ((136, 64), (128, 72), (8, 72)):
        with pytest.raises(
            RequestError, match=f"at most 128x64, the largest for which the model has positions, found {width}x{height}"
        ) as refused:
            check(params(width, height), RequestLimits(), BOUNDED)
        assert (refused.value.code, refused.value.details) == (ErrorCode.INVALID_REQUEST, {"field": "size"})


def test_an_edit_without_a_size_is_scaled_down_to_the_longest_sides() -> None:
    for height, width, expected in ((640, 320, (64, 32)), (64, 1280, (8, 128)), (48, 96, (48, 96))):
        assert size_of_edit(InputImage(pixels=b"", height=height, width=width), RequestLimits(), BOUNDED) == expected


def test_most_models_have_positions_for_every_size() -> None:
    unbounded = [
        describe(NAMED[name].build(), torch.float32, 1) for name in ("FluxPipeline", "QwenImagePipeline", "StableDiffusionPipeline")
    ]
    assert [(model.max_height, model.max_width) for model in unbounded] == [(None, None)] * 3


@pytest.mark.slow
def test_every_family_that_reads_positions_from_a_table_is_known() -> None:
    pipelines = {family.name: family.build() for family in FAMILIES}
    images = {name: pipeline for name, pipeline in pipelines.items() if kind_of(type(pipeline)) == "image"}
    found = {name for name, pipeline in images.items() if describe(pipeline, torch.float32, 1).max_height}
    assert set(TABLES) <= found
