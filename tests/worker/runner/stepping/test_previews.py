# SPDX-License-Identifier: Apache-2.0
"""Progress and previews on the ranks: the steps that a request shows, without an effect on its image or on others."""

import logging
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    PNDMScheduler,
    UniPCMultistepScheduler,
)

from diffusion_worker.messages import RequestSpec, Tick
from diffusion_worker.runner.model_call.call import ModelCall
from diffusion_worker.runner.pipelines.view import view_of
from diffusion_worker.runner.stepping.call_history import Step
from diffusion_worker.runner.stepping.pixels import Pixels, keep_on_device, pixels_of
from diffusion_worker.runner.stepping.preview import preview_steps
from diffusion_worker.runner.stepping.step_output import StepOutput
from support.families.rig.all import FAMILIES
from support.families.rig.family_rig import Asked, FamilyRig, as_tensor
from support.runner.rig import RunnerRig, request

BY_NAME = {family.name: family for family in FAMILIES}
# Each kind of loop: flow, epsilon, a pair of schedulers, of blocks, an edit, a mask, keys and values that are cleared.
LOOPS = (
    "FluxPipeline",
    "StableDiffusionPipeline",
    "StableDiffusionControlNetPipeline",
    "QwenImagePipeline",
    "StableDiffusionInpaintPipeline",
    "StableDiffusionXLImg2ImgPipeline",
    "Flux2KleinKVPipeline (two references)",
)


@pytest.fixture(scope="module")
def rig() -> RunnerRig:
    return RunnerRig()


def outputs(rig: RunnerRig, *requests: RequestSpec) -> list[StepOutput]:
    """Run requests to their end, tick by tick, and return the output of each tick; an error fails the test."""
    rig.parallel.calls.clear()
    found = [rig.runner.execute_stepwise(Tick(0, list(requests)))]
    while sum(len(output.images) for output in found) < len(requests):
        found.append(rig.runner.execute_stepwise(Tick(len(found))))
        assert not found[-1].errors
        assert len(found) < 100
    return found


def image_of(name: str, found: list[StepOutput]) -> Pixels:
    return next(pixels_of(output.images[name]) for output in found if name in output.images)


def previews_of(name: str, found: list[StepOutput]) -> list[tuple[int, Pixels]]:
    shown = [preview for output in found for preview in output.previews if preview.request_id == name]
    return [(preview.number, pixels_of(preview.image)) for preview in shown]


def test_every_step_is_told_with_how_many_there_will_be(rig: RunnerRig) -> None:
    found = outputs(rig, request("a", steps=3), request("b", steps=5))
    told = [(step.request_id, step.step, step.steps) for output in found for step in output.progress]
    assert [item for item in told if item[0] == "a"] == [("a", step, 3) for step in (1, 2, 3)]
    assert [item for item in told if item[0] == "b"] == [("b", step, 5) for step in (1, 2, 3, 4, 5)]


def test_previews_come_ever_closer_to_the_image_which_is_bit_for_bit_the_one_without(rig: RunnerRig) -> None:
    plain = outputs(rig, request("a", steps=6))
    asked = Counter(call.component for call in rig.parallel.calls)
    shown = outputs(rig, request("a", steps=6, previews=3))
    image, previews = image_of("a", shown), previews_of("a", shown)
    assert np.array_equal(image, image_of("a", plain))
    assert [number for number, _ in previews] == [0, 1, 2]
    off = [float(np.abs(preview.astype(int) - image).mean()) for _, preview in previews]
    assert off[0] > off[1] > off[2]
    assert off[0] < float(np.abs(image.astype(int) - image.mean()).mean())
    # Each preview costs a decode and nothing else: no prompt is encoded and nothing is denoised for it.
    assert Counter(call.component for call in rig.parallel.calls) == asked + Counter(vae=3)
    assert [index + 1 for index, output in enumerate(shown) if output.previews] == [1, 3, 4] == preview_steps(6, 3)


@pytest.mark.slow
def test_the_images_of_the_company_and_its_shared_calls_are_those_without_previews(rig: RunnerRig) -> None:
    def together(previews: int) -> tuple[Pixels, list[int]]:
        found = outputs(rig, request("shows", steps=4, previews=previews), request("plain", seed=2, steps=4, guidance_scale=3.0))
        return image_of("plain", found), [call.rows for call in rig.denoiser_calls()]

    (one, one_calls), (other, other_calls) = together(0), together(2)
    assert np.array_equal(one, other)
    assert one_calls == other_calls


@pytest.mark.slow
def test_the_time_that_previews_take_counts_as_the_requests_own(rig: RunnerRig) -> None:
    found = outputs(rig, request("a", steps=4, previews=3), request("b", steps=4, seed=2))
    clocks = {name: clock.report() for output in found for name, clock in output.clocks.items()}
    assert clocks["a"].decode > clocks["b"].decode > 0
    assert clocks["a"].denoise == clocks["b"].denoise > 0


def test_where_no_preview_can_be_made_none_is_sent_it_is_said_once_and_the_image_comes_all_the_same(
    rig: RunnerRig, caplog: pytest.LogCaptureFixture
) -> None:
    plain = image_of("a", outputs(rig, request("a", steps=4)))
    ends = [0]

    def refuse(call: ModelCall) -> None:
        if call.component == "vae" and ends[0] < 2:
            ends[0] += 1
            raise ValueError("this decoder is busy")

    rig.parallel.before = refuse
    with caplog.at_level(logging.WARNING, "diffusion_worker.runner.stepping.stepper"):
        found = outputs(rig, request("a", steps=4, previews=2))
    rig.parallel.before = lambda call: None
    assert (ends, previews_of("a", found)) == ([2], [])
    assert np.array_equal(image_of("a", found), plain)
    assert caplog.text.count("a preview failed, ") == 1


def test_a_request_that_has_the_model_for_itself_has_no_previews(rig: RunnerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(rig.runner.pipeline), "worker_runs_whole", lambda self, arguments: True, raising=False)
    assert previews_of("a", outputs(rig, request("a", steps=4, previews=2))) == []


def test_a_request_that_leaves_after_a_preview_leaves_nothing_behind(rig: RunnerRig) -> None:
    first = rig.runner.execute_stepwise(Tick(0, [request("a", steps=8, previews=3)]))
    second = rig.runner.execute_stepwise(Tick(1))
    assert [preview.number for output in (first, second) for preview in output.previews] == [0]
    rig.runner.execute_stepwise(Tick(2, leave=["a"]))
    assert rig.runner.execute_stepwise(Tick(3)).calls == 0


@pytest.mark.parametrize(
    ("steps", "previews", "expected"), [(4, 1, [2]), (4, 3, [1, 2, 3]), (2, 3, [1]), (1, 3, []), (50, 3, [12, 25, 37]), (28, 0, [])]
)
def test_previews_are_evenly_spaced_and_never_of_the_start_or_the_end(steps: int, previews: int, expected: list[int]) -> None:
    assert preview_steps(steps, previews) == expected


@pytest.mark.parametrize(
    ("scheduler", "noisy"),
    [
        (FlowMatchEulerDiscreteScheduler(), lambda image, noise, sigma: ((1 - sigma) * image + sigma * noise, noise - image)),
        (EulerDiscreteScheduler(), lambda image, noise, sigma: (image + sigma * noise, noise)),
        (DDIMScheduler(clip_sample=False), None),
        (DPMSolverMultistepScheduler(), None),
        (UniPCMultistepScheduler(), None),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "config") else "",
)
def test_from_a_perfect_prediction_the_estimate_is_the_image_whatever_the_scheduler(scheduler: Any, noisy: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    image, noise = torch.randn(1, 4, 8, 8, generator=generator), torch.randn(1, 4, 8, 8, generator=generator)
    scheduler.set_timesteps(10)
    time = scheduler.timesteps[4]
    if noisy is not None:
        sample, predicted = noisy(image, noise, scheduler.sigmas[4])
    else:
        kept = scheduler.alphas_cumprod[int(time)]
        sample, predicted = kept.sqrt() * image + (1 - kept).sqrt() * noise, noise
    result = scheduler.step(predicted, time, sample, return_dict=False)
    estimate = Step(scheduler, (predicted, time, sample), {}, result).estimate()
    assert (estimate - image).abs().max() < 1e-3
    returned = Step(scheduler, (predicted, time, sample), {"return_dict": False}, result).returning(estimate)
    assert type(returned) is type(result) and torch.equal(returned[0], estimate)
    assert returned[0].data_ptr() != estimate.data_ptr()


@pytest.mark.parametrize("scheduler", [PNDMScheduler(), FlowMatchHeunDiscreteScheduler()], ids=lambda one: type(one).__name__)
def test_a_scheduler_that_does_not_tell_shows_the_latents_as_they_are(scheduler: Any) -> None:
    scheduler.set_timesteps(10)
    sample = torch.randn(1, 4, 8, 8)
    result = scheduler.step(torch.full_like(sample, torch.nan), scheduler.timesteps[0], sample)
    assert Step(scheduler, (torch.full_like(sample, torch.nan), 0, sample), {}, result).estimate() is result.prev_sample


class Shown:
    """The body of a request of four steps that calls the family's pipeline on a fresh view.

    The view's image processors leave the result on the device.
    """

    whole = False

    def __init__(self, rig: FamilyRig) -> None:
        self._rig = rig

    def __call__(self) -> Any:
        view = view_of(self._rig.pipeline)
        keep_on_device(view)
        return self._rig.family.call(view, self._rig._arguments(Asked(1, 4, 5.0)) | {"output_type": "np"})


def run_family(rig: FamilyRig, previews: int) -> list[StepOutput]:
    rig.runner.join(msgspec.structs.replace(request("a", steps=4), previews=previews), Shown(rig))
    found: list[StepOutput] = []
    while not (found and found[-1].images):
        found.append(rig.runner.execute_stepwise(Tick(len(found))))
        assert not found[-1].errors
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_pipelines_of_every_kind_show_their_way_tell_their_steps_and_make_the_same_image(name: str) -> None:
    rig = FamilyRig(BY_NAME[name])
    plain, shown = run_family(rig, 0), run_family(rig, 2)
    one, other = (as_tensor(found[-1].images["a"]) for found in (plain, shown))
    assert torch.equal(one, other)
    previews = [as_tensor(preview.image) for output in shown for preview in output.previews]
    assert previews and all(preview.shape == one.shape and not torch.equal(preview, one) for preview in previews)
    told = [step for output in shown for step in output.progress]
    assert told[-1].step == told[-1].steps == len(told)


class OddScheduler(FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]
    """A scheduler whose step returns an object of an unknown class in place of a tuple."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        class Result:
            latents = super(OddScheduler, self).step(*args, **kwargs)[0]

            def __getitem__(self, place: int) -> Any:
                return self.latents

        return Result()


@pytest.mark.slow
def test_a_scheduler_of_its_own_kind_costs_a_request_its_previews_and_nobody_anything_else(rig: RunnerRig) -> None:
    plain = image_of("a", outputs(rig, request("a", steps=4)))
    own = rig.runner.pipeline.scheduler
    rig.runner.pipeline.scheduler = OddScheduler.from_config(own.config)
    try:
        found = outputs(rig, request("a", steps=4, previews=2), request("b", steps=4))
    finally:
        rig.runner.pipeline.scheduler = own
    assert previews_of("a", found) == []
    assert np.abs(image_of("a", found).astype(int) - plain).max() <= 2


def test_a_request_that_has_ended_keeps_nothing_of_its_way(rig: RunnerRig) -> None:
    rig.runner.execute_stepwise(Tick(0, [request("a", steps=2, previews=1), request("leaves", steps=2, previews=1)]))
    ways = [rig.runner._states[name].history for name in ("a", "leaves")]
    assert all(history is not None and history.answers and history.denoised and history.steps for history in ways)
    outputs_left = [rig.runner.execute_stepwise(Tick(number, leave=["leaves"] if number == 1 else [])) for number in (1, 2)]
    assert any(output.images for output in outputs_left)
    assert not any(history is None or history.answers or history.denoised or history.steps for history in ways)
