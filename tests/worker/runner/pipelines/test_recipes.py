# SPDX-License-Identifier: Apache-2.0
"""The schedule of an adapter's recipe: a request's own sigmas and shift, as diffusers itself applies them, or refused."""

from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.messages import ImageInput, RequestSpec, Task
from diffusion_worker.runner.loading.pipeline import load_pipeline
from diffusion_worker.runner.pipelines.body import make_body
from diffusion_worker.runner.pipelines.schedule import check_sigmas, own_scheduler
from support.runner.rig import RunnerRig, levels_apart, request

SIGMAS = [1.0, 0.6, 0.2]
SHIFT = 5.0


@pytest.fixture(scope="module")
def rig() -> RunnerRig:
    return RunnerRig()


def by_diffusers(rig: RunnerRig, spec: RequestSpec) -> Any:
    """Make a request's image with the plain pipeline of diffusers, its shift and sigmas set by hand; return the values as uint8."""
    pipeline = load_pipeline(rig.config, torch.float32)
    if spec.shift is not None:
        pipeline.scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config, shift=spec.shift)
    schedule: dict[str, Any] = {"sigmas": spec.sigmas} if spec.sigmas else {"num_inference_steps": spec.steps}
    image = pipeline(
        spec.prompt, height=32, width=32, generator=torch.Generator().manual_seed(spec.seed), output_type="np", **schedule
    ).images[0]
    return np.asarray((image * 255).round(), np.uint8)


RECIPES = [{"sigmas": SIGMAS, "steps": None}, {"sigmas": SIGMAS, "steps": 3}, {"shift": SHIFT}, {"sigmas": SIGMAS, "shift": SHIFT}]


@pytest.mark.parametrize("recipe", [*(pytest.param(each, marks=pytest.mark.slow) for each in RECIPES[:3]), RECIPES[3]], ids=str)
def test_a_request_with_a_schedule_of_its_own_makes_the_image_that_diffusers_makes_with_it(rig: RunnerRig, recipe: dict[str, Any]) -> None:
    spec = request("recipe", **recipe)
    images, errors = rig.run(spec)
    assert not errors
    assert levels_apart(images["recipe"], by_diffusers(rig, spec)) <= 1


@pytest.mark.slow
def test_requests_of_different_schedules_share_calls_and_leave_the_pipeline_as_it_is(rig: RunnerRig) -> None:
    specs = [request("plain"), *(request(f"recipe {number}", **recipe) for number, recipe in enumerate(RECIPES))]
    before = dict(rig.runner.pipeline.scheduler.config)
    alone = {spec.request_id: rig.run(spec)[0][spec.request_id] for spec in specs}
    together, _ = rig.run(*specs)
    assert [call.rows for call in rig.denoiser_calls()] == [10, 10, 10]
    assert all(levels_apart(image, alone[name]) <= 1 for name, image in together.items())
    # There are three schedules and the plain one; sigmas give the same image with and without their number.
    assert levels_apart(alone["recipe 0"], alone["recipe 1"]) == 0
    different = [alone[name] for name in ("plain", "recipe 0", "recipe 2", "recipe 3")]
    assert min(levels_apart(one, other) for n, one in enumerate(different) for other in different[:n]) > 3
    assert dict(rig.runner.pipeline.scheduler.config) == before


def test_sigmas_that_are_not_one_for_each_step_are_refused_with_both_numbers(rig: RunnerRig) -> None:
    images, errors = rig.run(request("two", sigmas=SIGMAS, steps=2), request("good", steps=1))
    assert list(images) == ["good"]
    assert errors["two"].code == ErrorCode.INVALID_REQUEST
    assert errors["two"].message == "num_inference_steps: expected 3, the number of the adapter's sigmas, found 2"


@pytest.mark.slow
def test_an_edit_takes_as_many_steps_as_there_are_sigmas(rig: RunnerRig) -> None:
    spec = request("edit", sigmas=SIGMAS, steps=None, task=Task.EDIT, images=[ImageInput(0, (32, 32, 3))], strength=1.0)
    images, errors = rig.run(spec, frames={"edit": [bytes(32 * 32 * 3)]})
    assert not errors and images["edit"].shape == (32, 32, 3)
    assert len(rig.denoiser_calls()) == 3


def bare(kind: Any, scheduler: Any) -> Any:
    """Return a pipeline of this class with only a scheduler, which is enough to find its options."""
    names = [name for name in kind._get_signature_keys(kind)[0] if name != "scheduler"]
    made = kind.__new__(kind)
    diffusers.DiffusionPipeline.__init__(made)
    made.register_modules(scheduler=scheduler, **dict.fromkeys(names))
    return made


@pytest.mark.parametrize(
    ("kind", "scheduler", "recipe", "says"),
    [
        ("LTXConditionPipeline", "DDIMScheduler", {"shift": 2.0}, "shift: expected a flow scheduler that uses it, found DDIMScheduler"),
        ("WanPipeline", "UniPCMultistepScheduler", {"sigmas": SIGMAS}, "sigmas: WanPipeline takes no such argument"),
        ("StableDiffusionPipeline", "DDIMScheduler", {"sigmas": SIGMAS}, "sigmas: expected a scheduler that takes them, found DDIM"),
        ("WanPipeline", "UniPCMultistepScheduler", {"shift": 2.0}, "shift: expected a flow scheduler that uses it, found UniPC"),
    ],
)
def test_a_schedule_that_would_have_no_effect_is_refused_by_its_name(kind: str, scheduler: str, recipe: dict[str, Any], says: str) -> None:
    pipeline = bare(getattr(diffusers, kind), getattr(diffusers, scheduler)())
    with pytest.raises(RequestError, match=says) as refused:
        make_body(pipeline, request("refused", **recipe))
    assert refused.value.code is ErrorCode.INVALID_REQUEST
    assert refused.value.details["field"] == next(iter(recipe))


def test_sigmas_are_refused_where_the_pipeline_has_no_scheduler_of_the_usual_name() -> None:
    with pytest.raises(RequestError, match="sigmas: expected a scheduler that takes them, found none") as refused:
        check_sigmas(None, SIGMAS, steps=None)
    assert refused.value.code is ErrorCode.INVALID_REQUEST


def test_the_shift_of_every_kind_of_flow_scheduler_is_set_and_a_dynamic_one_is_then_fixed() -> None:
    plain = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    dynamic = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    for scheduler in (plain, dynamic):
        own = own_scheduler(scheduler, SHIFT)
        own.set_timesteps(4)
        expected = diffusers.FlowMatchEulerDiscreteScheduler(shift=SHIFT)
        expected.set_timesteps(4)
        torch.testing.assert_close(own.sigmas, expected.sigmas)
    solver = diffusers.UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0)
    own, untouched = own_scheduler(solver, SHIFT), own_scheduler(solver, None)
    own.set_timesteps(4)
    untouched.set_timesteps(4)
    assert (own.config.flow_shift, untouched.config.flow_shift, solver.config.flow_shift) == (SHIFT, 3.0, 3.0)
    assert not torch.allclose(own.sigmas, untouched.sigmas)
    # A scheduler without a shift is copied as it is.
    assert own_scheduler(diffusers.DDIMScheduler(), SHIFT).config == diffusers.DDIMScheduler().config
