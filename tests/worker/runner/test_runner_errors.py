# SPDX-License-Identifier: Apache-2.0
"""Errors of one request end that request, with a code that names the responsible side, and leave nothing behind."""

import weakref
from typing import Any

import pytest
import torch

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.messages import LoRAUse, Tick
from diffusion_worker.runner.loading.pipeline import load_pipeline
from diffusion_worker.runner.model_call.call import ModelCall
from diffusion_worker.runner.pipelines.body import make_body
from support.runner import rank_processes
from support.runner.rig import RunnerRig, image_of_diffusers, levels_apart, request


@pytest.fixture(scope="module")
def rig() -> RunnerRig:
    return RunnerRig()


@pytest.fixture(scope="module")
def plain(rig: RunnerRig) -> Any:
    return load_pipeline(rig.config, torch.float32)


def failing(
    rig: RunnerRig, monkeypatch: pytest.MonkeyPatch, error: Exception, *, over_rows: int = 0, component: str = "transformer"
) -> None:
    """Make a component raise `error` at each call with more than `over_rows` rows, from now to the end of the test."""

    def before(call: ModelCall) -> None:
        if call.component == component and call.rows > over_rows:
            raise error

    monkeypatch.setattr(rig.parallel, "before", before)


def test_a_batch_that_is_too_large_for_the_memory_is_made_one_by_one(rig: RunnerRig, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(rig, monkeypatch, torch.OutOfMemoryError("out of memory"), over_rows=2)
    requests = [request("a", seed=1), request("b", seed=2)]
    output = rig.runner.execute_stepwise(Tick(0, requests))
    assert output.split
    images, errors = rig.run(*[], running=2)
    assert not errors
    for spec in requests:
        assert levels_apart(images[spec.request_id], image_of_diffusers(plain, spec)) <= 1


def test_a_tick_without_a_failed_call_does_not_say_split(rig: RunnerRig) -> None:
    assert not rig.runner.execute_stepwise(Tick(0, [request("a"), request("b")])).split
    rig.runner.drop_all()


def test_a_request_that_does_not_fit_fails_with_a_code_of_its_own_and_the_others_finish(
    rig: RunnerRig, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = request("small", guidance_scale=1.0), request("large")
    failing(rig, monkeypatch, torch.OutOfMemoryError("CUDA out of memory"), over_rows=1)
    images, errors = rig.run(small, large)
    assert errors["large"].code == ErrorCode.INSUFFICIENT_MEMORY
    assert levels_apart(images["small"], image_of_diffusers(plain, small)) <= 1


def test_what_a_failed_call_held_is_free_again(rig: RunnerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def before(call: ModelCall) -> None:
        if call.component == "transformer":
            activations = call.arguments["hidden_states"] * 2
            held.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(rig.parallel, "before", before)
    latents: list[weakref.ref[torch.Tensor]] = []

    def body() -> Any:
        noise = torch.ones(1, 4, 16, 16)
        latents.append(weakref.ref(noise))
        return make_body(rig.runner.pipeline, request("x"), conditioning={"latents": noise})()

    rig.runner.join(request("x"), body)
    output = rig.runner.execute_stepwise(Tick(0))
    assert list(output.errors) == ["x"]
    assert [ref() for ref in held + latents] == [None, None]


def test_an_image_that_is_not_finite_is_an_error_and_no_black_image(rig: RunnerRig, plain: Any) -> None:
    good = request("good")
    poison = torch.full((1, 4, 16, 16), float("nan"))
    rig.runner.join(request("poisoned"), make_body(rig.runner.pipeline, request("poisoned"), conditioning={"latents": poison}))
    images, errors = rig.run(good, running=1)
    assert errors["poisoned"].code == ErrorCode.REQUEST_FAILED
    assert "not numbers" in errors["poisoned"].message
    assert levels_apart(images["good"], image_of_diffusers(plain, good)) <= 1


def test_a_scheduler_that_fails_ends_its_request_only(rig: RunnerRig, plain: Any) -> None:
    good = request("good")
    body = make_body(rig.runner.pipeline, request("bad"), conditioning={"sigmas": [1.0, 0.5], "callback_on_step_end": _raising})
    rig.runner.join(request("bad"), body)
    images, errors = rig.run(good, running=1)
    assert errors["bad"].code == ErrorCode.REQUEST_FAILED
    assert "after the step" in errors["bad"].message
    assert levels_apart(images["good"], image_of_diffusers(plain, good)) <= 1


def _raising(*_: Any) -> dict[str, Any]:
    raise RuntimeError("after the step")


def test_a_refusal_in_the_middle_of_a_run_keeps_its_code(rig: RunnerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(rig, monkeypatch, RequestError(ErrorCode.CAPACITY_EXCEEDED, "no room"), component="vae")
    _, errors = rig.run(request("refused"))
    assert (errors["refused"].code, errors["refused"].message) == (ErrorCode.CAPACITY_EXCEEDED, "no room")


def test_a_request_whose_adapter_went_is_refused_and_never_the_base_model(rig: RunnerRig) -> None:
    images, errors = rig.run(request("styled", loras=[LoRAUse(7, 1.0)]), request("plain"))
    assert errors["styled"].code == ErrorCode.ADAPTER_NOT_LOADED
    assert list(images) == ["plain"]


def test_a_request_that_cannot_even_be_prepared_fails_alone(rig: RunnerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(pipeline: Any, spec: Any, **_: Any) -> Any:
        if spec.request_id == "odd":
            raise KeyError("a custom pipeline's mistake")
        return make_body(pipeline, spec)

    monkeypatch.setattr("diffusion_worker.runner.pipelines.tasks.make_body", prepare)
    images, errors = rig.run(request("odd"), request("good"))
    assert errors["odd"].code == ErrorCode.REQUEST_FAILED
    assert list(images) == ["good"]


def test_a_merge_that_does_not_fit_in_memory_is_made_one_by_one(rig: RunnerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    def merge(calls: list[ModelCall]) -> ModelCall:
        if len(calls) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return calls[0]

    monkeypatch.setattr("support.runner.rig.merge", merge)
    images, errors = rig.run(request("a"), request("b"))
    assert (sorted(images), errors) == (["a", "b"], {})


@pytest.mark.slow
def test_a_request_that_fails_on_one_rank_fails_on_all_with_its_code_and_the_others_go_on() -> None:
    first, second = rank_processes.run("support.runner.scenarios:one_rank_refuses")
    assert first == second
    assert first["errors"] == {
        "between calls": ["InvalidRequest", "rank 1 does not like it"],
        "in a call": ["CapacityExceeded", "rank 1 has no room"],
        "broken": ["RequestFailed", "RuntimeError: rank 1 broke"],
    }
    assert first["images"] == ["good"]
    assert first["replays"] == {"changing": "calls transformer.requires_grad_()"}


def test_a_sleep_that_is_refused_for_weights_which_cannot_be_freed_leaves_the_requests_running(plain: Any) -> None:
    rig = RunnerRig()
    spec = request("stays")
    rig.runner.execute_stepwise(Tick(0, [spec]))
    rig.runner.weights.leave([torch.zeros(2)])
    with pytest.raises(RequestError, match="sleep: not supported"):
        rig.runner.release()
    images, errors = rig.run(*[], running=1)
    assert not errors
    assert levels_apart(images["stays"], image_of_diffusers(plain, spec)) <= 1
