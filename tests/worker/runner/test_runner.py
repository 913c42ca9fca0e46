# SPDX-License-Identifier: Apache-2.0
"""Requests as fibers over the unmodified pipeline: equal to diffusers alone, sharing model calls in company."""

from typing import Any

import numpy as np
import pytest
import torch

from diffusion_worker.config import Dtype, WorkerConfig
from diffusion_worker.errors import ConfigError
from diffusion_worker.messages import Tick
from diffusion_worker.runner.loading.pipeline import load_pipeline
from diffusion_worker.runner.model_call.call import ModelCall
from support.runner.rig import RunnerRig, image_of_diffusers, levels_apart, request
from support.worker.process import DIGITS_MODEL


@pytest.fixture(scope="module")
def rig() -> RunnerRig:
    return RunnerRig()


@pytest.fixture(scope="module")
def plain(rig: RunnerRig) -> Any:
    """Load the rig's model a second time, in float32 and without a runner, as the reference for images."""
    return load_pipeline(rig.config, torch.float32)


REQUESTS = [
    request("one", prompt="a red digit seven", seed=1, steps=4, guidance_scale=5.0),
    request("two", prompt="a blue digit two", seed=2, steps=6, guidance_scale=3.0),
    request("three", prompt="a green digit three", seed=3, steps=3, guidance_scale=7.0, negative_prompt="stripes kumquatfen"),
]


@pytest.mark.parametrize("spec", REQUESTS, ids=lambda spec: spec.request_id)
def test_a_request_alone_is_bit_equal_to_diffusers(rig: RunnerRig, plain: Any, spec: Any) -> None:
    images, _ = rig.run(spec)
    np.testing.assert_array_equal(images[spec.request_id], image_of_diffusers(plain, spec))


def test_requests_that_join_at_different_times_share_steps_and_equal_their_images_alone(rig: RunnerRig, plain: Any) -> None:
    images, _ = rig.run(*REQUESTS, joining=[0, 1, 2])
    for spec in REQUESTS:
        assert levels_apart(images[spec.request_id], image_of_diffusers(plain, spec)) <= 1
    # Steps run at ticks 0-3, 1-6 and 2-4: seven ticks with a call, where alone there would be thirteen.
    assert len(rig.denoiser_calls()) == 7


def test_other_sizes_do_not_share_a_call(rig: RunnerRig, plain: Any) -> None:
    small, large = request("small"), request("large", height=64, width=64)
    images, _ = rig.run(small, large)
    assert len(rig.denoiser_calls()) == 6
    # Not bit-equal: the prompts' encoding is shared.
    assert levels_apart(images["small"], image_of_diffusers(plain, small)) <= 1
    assert levels_apart(images["large"], image_of_diffusers(plain, large)) <= 1


def test_one_tick_is_one_step_of_every_request(rig: RunnerRig) -> None:
    rig.runner.execute_stepwise(Tick(1, [request("a", steps=5), request("b", steps=9)]))
    rig.runner.execute_stepwise(Tick(2))
    assert {name: state.steps_done for name, state in rig.runner._states.items()} == {"a": 2, "b": 2}
    rig.runner.drop_all()


def test_a_request_that_leaves_frees_its_rows_by_the_next_step(rig: RunnerRig) -> None:
    rig.runner.execute_stepwise(Tick(1, [request("stays", steps=4), request("leaves", steps=4)]))
    rig.parallel.calls.clear()
    rig.runner.execute_stepwise(Tick(2, leave=["leaves", "unknown"]))
    assert [call.rows for call in rig.denoiser_calls()] == [2]  # guidance makes two rows for an image
    rig.runner.drop_all()


def test_an_input_the_pipeline_refuses_is_the_callers_error_and_touches_nobody_else(rig: RunnerRig, plain: Any) -> None:
    good = request("good")
    images, errors = rig.run(good, request("bad", height=33))
    assert errors["bad"].code == "InvalidRequest"
    assert "divisible" in errors["bad"].message
    assert levels_apart(images["good"], image_of_diffusers(plain, good)) <= 1


def test_an_error_in_a_shared_call_ends_only_the_request_that_causes_it(rig: RunnerRig, plain: Any) -> None:
    good, poisoned = request("good"), request("poisoned", guidance_scale=1.0)

    def fail_for_a_lone_row(call: ModelCall) -> None:
        # Guidance 1 makes one row, and the other request two; together there are three.
        if call.component == "transformer" and call.rows != 2:
            raise RuntimeError("no kernel")

    rig.parallel.before = fail_for_a_lone_row
    try:
        images, errors = rig.run(good, poisoned)
    finally:
        rig.parallel.before = lambda call: None
    assert levels_apart(images["good"], image_of_diffusers(plain, good)) <= 1
    assert errors["poisoned"].code == "RequestFailed"
    assert "no kernel" in errors["poisoned"].message


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pipeline": "NoSuchPipeline"}, "'NoSuchPipeline' is not a pipeline of diffusers"),
        ({"pipeline": "AutoencoderKL"}, "'AutoencoderKL' is not a pipeline of diffusers"),
        ({"pipeline": "FluxPipeline"}, "FluxPipeline: component .*: expected a "),
    ],
)
def test_a_model_that_cannot_be_loaded_says_why(change: dict[str, Any], says: str) -> None:
    config = WorkerConfig(**{"model": str(DIGITS_MODEL), "served_name": "digits"} | change)
    with pytest.raises(ConfigError, match=says):
        load_pipeline(config, torch.float32)


def test_components_can_have_dtypes_of_their_own_and_the_state_says_which() -> None:
    rig = RunnerRig(dtype=Dtype.BFLOAT16, component_dtypes={"vae": Dtype.FLOAT32, "text_encoder": Dtype.BFLOAT16})
    parts = rig.runner.pipeline.components
    assert [parts[name].dtype for name in ("vae", "transformer", "text_encoder")] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert (rig.model.dtype, rig.model.features) == ("bfloat16", {"dtype": "vae=float32"})


def test_a_dtype_for_a_component_that_the_model_lacks_is_refused_with_those_that_it_has() -> None:
    config = WorkerConfig(model=str(DIGITS_MODEL), served_name="digits", component_dtypes={"vea": Dtype.FLOAT32})
    with pytest.raises(
        ConfigError, match=r"--dtype vea=…: expected a component of .* that has weights, one of text_encoder.*, transformer, vae$"
    ):
        load_pipeline(config, torch.float32)


def test_load_progress_ends_at_the_whole(rig: RunnerRig) -> None:
    done, total = rig.progress[-1]
    assert done == total == rig.model.weights_bytes
    assert [step for step, _ in rig.progress] == sorted(step for step, _ in rig.progress)
