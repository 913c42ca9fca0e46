# SPDX-License-Identifier: Apache-2.0
"""Requests of one image pipeline as people send them side by side: each equals itself alone, and calls that may be shared are shared.

The requests differ in references, strengths, schedulers, sizes and guidance, and join at different times, in float64.
"""

import functools

import diffusers
import pytest
import torch

from support.families.images import flux, latent_images, qwen, z_image
from support.families.rig.family import Arguments, image, seeded
from support.families.rig.family_rig import Asked, FamilyRig, apart

pytestmark = pytest.mark.slow

FAMILIES = {family.name: family for module in (flux, latent_images, qwen, z_image) for family in module.FAMILIES}


@functools.cache
def rig_of(name: str) -> FamilyRig:
    return FamilyRig(FAMILIES[name], torch.float64)


def calls_of_mix(name: str, *requests: Asked) -> list[int]:
    """Run requests that join a tick apart and check that each equals itself alone; return the rows of each denoiser call."""
    rig = rig_of(name)
    alone = [rig.alone(asked) for asked in requests]
    together = rig.together(*requests, joining=tuple(range(len(requests))))
    for one, other in zip(together, alone, strict=True):
        assert apart(one, other) <= 1e-9
    return [call.rows for call in rig.denoiser_calls()]


def test_kontext_with_and_without_references_and_of_two_sizes() -> None:
    without: Arguments = {"image": None}
    small = {"image": None, "width": 8, "height": 16, "max_area": 128}
    rows = calls_of_mix(
        "FluxKontextPipeline",
        Asked(1, 4),
        Asked(2, 3, changes=without),
        Asked(3, 3),
        Asked(4, 2, changes=small),
        Asked(5, 2, changes=without),
    )
    assert sum(rows) == 14
    assert max(rows) == 2


def test_qwen_edits_of_other_images_and_sizes_beside_each_other() -> None:
    wide = {"image": image(7, 64, 32), "width": 384, "height": 256}
    rows = calls_of_mix(
        "QwenImageEditPipeline",
        Asked(1, 3),
        Asked(2, 3, changes=wide),
        Asked(3, 2),
        Asked(4, 2, changes=wide | {"image": image(8, 64, 32)}),
    )
    assert sum(rows) == 2 * 10
    assert rows.count(2) == 2 * 2


def test_requests_with_and_without_true_guidance_share_the_prompts_call() -> None:
    rows = calls_of_mix("FluxPipeline (true guidance)", Asked(1, 3, 5.0), Asked(2, 3, 1.0), Asked(3, 2, 2.0))
    assert sum(rows) == 3 + 3 + 2 + 3 + 2
    assert max(rows) == 3


def test_flux_requests_of_other_schedulers_and_strengths_share_calls_and_lora_scales_do_not() -> None:
    euler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    rows = calls_of_mix(
        "FluxPipeline", Asked(1, 3), Asked(2, 3, scheduler=euler), Asked(3, 2, changes={"joint_attention_kwargs": {"scale": 0.5}})
    )
    assert max(rows) == 2, "a LoRA scale is for the whole call"
    strong, weak = {"strength": 1.0, "num_inference_steps": 3}, {"strength": 0.4, "num_inference_steps": 5}
    rows = calls_of_mix("FluxImg2ImgPipeline", Asked(1, changes=strong), Asked(2, changes=weak), Asked(3, changes=strong))
    assert sum(rows) == 3 + 2 + 3
    assert max(rows) == 3


def test_two_images_of_one_prompt_share_calls_with_one_of_another() -> None:
    assert max(calls_of_mix("QwenImagePipeline", Asked(1, 3), Asked(2, 3, changes={"num_images_per_prompt": 2}))) == 3
    assert max(calls_of_mix("ZImagePipeline", Asked(1, 3), Asked(2, 3, changes={"num_images_per_prompt": 2}))) == 6


def test_controls_of_other_strengths_share_the_denoiser_only_where_they_are_rows() -> None:
    rows = calls_of_mix(
        "FluxControlNetPipeline",
        Asked(1, 3),
        Asked(2, 3, changes={"controlnet_conditioning_scale": 0.5}),
        Asked(3, 3, changes={"control_guidance_end": 0.4}),
    )
    assert sum(rows) == 2 * 9
    assert max(rows) == 3


@pytest.mark.parametrize("name", ["ZImagePipeline", "GlmImagePipeline", "BriaFibo2Pipeline", "CogView4Pipeline"])
def test_requests_without_guidance_have_no_row_for_the_negative_prompt(name: str) -> None:
    off = 0.0 if name == "ZImagePipeline" else 1.0
    rows = calls_of_mix(name, Asked(1, 3, 5.0), Asked(2, 3, off))
    assert sum(rows) == 2 * 3 + 3
    assert max(rows) == (3 if name == "ZImagePipeline" else 2)


def test_prompts_of_three_lengths_are_three_groups_and_each_right() -> None:
    rows = calls_of_mix(
        "FluxPipeline",
        *(Asked(seed, 5, changes={"prompt_embeds": seeded(seed, 1, length, 16)}) for seed, length in enumerate((4, 6, 9, 4, 6), start=1)),
    )
    assert sum(rows) == 25
    assert max(rows) == 2
