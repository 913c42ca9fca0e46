# SPDX-License-Identifier: Apache-2.0
"""Requests of one family that share little but the call: each gets the same image as alone."""

import functools
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, DPMSolverMultistepScheduler, EulerDiscreteScheduler, HeunDiscreteScheduler

from support.families.rig.all import FAMILIES
from support.families.rig.family import image, seeded
from support.families.rig.family_rig import Asked, FamilyRig, apart

pytestmark = pytest.mark.slow

BY_NAME = {family.name: family for family in FAMILIES}
# A U-Net, a transformer, a pipeline with two separate guidance calls, and one that embeds the guidance.
GUIDED = ("StableDiffusionPipeline", "StableDiffusion3Pipeline", "QwenImagePipeline", "FluxPipeline")
DENOISERS = ("StableDiffusionPipeline", "StableDiffusion3Pipeline")


@functools.cache
def rig_of(name: str) -> FamilyRig:
    return FamilyRig(BY_NAME[name], torch.float64)


def assert_as_alone(rig: FamilyRig, *requests: Asked, joining: tuple[int, ...] | None = None) -> None:
    for together, asked in zip(rig.together(*requests, joining=joining), requests, strict=True):
        assert apart(together, rig.alone(asked)) <= rig.family.tolerance


def rows_per_call(rig: FamilyRig) -> list[int]:
    return [call.rows for call in rig.denoiser_calls()]


@pytest.mark.parametrize("name", GUIDED)
def test_guidance_scales_differ_inside_a_batch_with_the_image_each_makes_alone(name: str) -> None:
    rig = rig_of(name)
    strong, weak = Asked(1, 2, 7.5), Asked(1, 2, 1.5)
    assert apart(rig.alone(strong), rig.alone(weak)) > 1e-3
    assert_as_alone(rig, strong, weak, Asked(2, 2, 4.0))
    # Three requests share each call, with one row each, or two where guidance doubles them.
    assert set(rows_per_call(rig)) <= {3, 6}


@pytest.mark.parametrize("name", DENOISERS)
def test_a_request_without_guidance_shares_calls_with_guided_ones(name: str) -> None:
    rig = rig_of(name)
    assert_as_alone(rig, Asked(1, 2, 1.0), Asked(2, 2, 5.0), Asked(3, 2, 1.0))
    assert rows_per_call(rig) == [1 + 2 + 1] * 2


def test_guidance_can_be_off_in_a_family_that_calls_twice_for_it() -> None:
    rig = rig_of("QwenImagePipeline")
    assert_as_alone(rig, Asked(1, 2, 1.0), Asked(2, 2, 5.0))
    assert sorted(rows_per_call(rig)) == [1, 1, 2, 2]


def test_requests_with_other_scheduler_classes_share_calls() -> None:
    rig = rig_of("StableDiffusionPipeline")
    ddim = DDIMScheduler(clip_sample=False)
    kinds = [ddim, EulerDiscreteScheduler(), DPMSolverMultistepScheduler()]
    requests = [Asked(seed, 3, 5.0, scheduler=kind) for seed, kind in enumerate(kinds, start=1)]
    assert_as_alone(rig, *requests)
    assert rows_per_call(rig) == [6] * 3


def test_a_scheduler_that_calls_the_model_more_often_than_it_has_steps_keeps_its_place() -> None:
    rig = rig_of("StableDiffusionPipeline")
    assert_as_alone(rig, Asked(1, 2, 5.0, scheduler=HeunDiscreteScheduler()), Asked(2, 4, 5.0), joining=(1, 0))
    assert len(rows_per_call(rig)) == 4  # Heun's three calls are among them


@pytest.mark.parametrize("name", ["StableDiffusionInpaintPipeline", "StableDiffusionControlNetPipeline", "FluxKontextPipeline"])
def test_requests_with_other_conditioning_images_share_calls(name: str) -> None:
    rig = rig_of(name)
    # The requests differ in their image only.
    requests = [Asked(1, 2, changes={"image": image(seed, *_size(rig))}) for seed in (11, 12)]
    assert apart(rig.alone(requests[0]), rig.alone(requests[1])) > 1e-4
    assert_as_alone(rig, *requests)
    alone = len(rig.denoiser_calls())
    rig.together(requests[0])
    assert len(rig.denoiser_calls()) == alone


def test_requests_with_and_without_an_image_run_beside_each_other() -> None:
    rig = rig_of("Flux2Pipeline")
    with_image = Asked(1, 2, changes={"image": image(7, *_size(rig))})
    assert apart(rig.alone(with_image), rig.alone(Asked(1, 2))) > 1e-3
    assert_as_alone(rig, with_image, Asked(2, 2), Asked(3, 2))
    # An image adds tokens, so the requests without one share their calls.
    assert sorted(rows_per_call(rig)) == [1, 1, 2, 2]


@pytest.mark.parametrize("name", DENOISERS)
def test_not_a_number_in_one_request_stays_in_its_row(name: str) -> None:
    rig = rig_of(name)
    good = Asked(1, 2)
    embeddings = seeded(2, 1, 8, 32)
    embeddings[0, 3, 5] = float("nan")
    poisoned = Asked(2, 2, changes={"prompt_embeds": embeddings})
    results = rig.together(good, poisoned)
    assert rows_per_call(rig) == [4, 4]
    assert apart(results[0], rig.alone(good)) <= rig.family.tolerance
    assert results[1].isnan().any()


@pytest.mark.parametrize("name", ["StableDiffusionPipeline", "StableDiffusionControlNetPipeline", "PixArtSigmaPipeline"])
def test_a_request_for_two_images_has_rows_for_both(name: str) -> None:
    rig = rig_of(name)
    two: dict[str, Any] = {"num_images_per_prompt": 2}
    assert_as_alone(rig, Asked(1, 2), Asked(2, 2, changes=two), Asked(3, 2, 1.0, changes=two))
    assert set(rows_per_call(rig)) == {2 + 4 + 2}


def _size(rig: FamilyRig) -> tuple[int, int]:
    arguments = rig.family.request(1, 2, 5.0)
    shown = arguments.get("image")
    return shown.size if shown is not None and not isinstance(shown, list) else (arguments["width"], arguments["height"])
