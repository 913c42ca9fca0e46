# SPDX-License-Identifier: Apache-2.0
"""The fingerprint of a rank in this process: the changes that it shows, those that it ignores, and that it leaves nothing behind."""

import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from diffusers import FluxImg2ImgPipeline, FluxPipeline, WanPipeline

from diffusion_worker.config import Compile, StepCache
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.request import LoadOptions, LoRARequest
from diffusion_worker.lora.slot_bank import Segment
from diffusion_worker.messages import Fingerprint, LoRAUse, MemoryTag, ModelInfo, RequestSpec, Task, Tick
from diffusion_worker.runner.fingerprint import SMALLEST_SIDE, probe_requests
from diffusion_worker.runner.model_call.call import ModelCall
from diffusion_worker.runner.model_runner import DiffusionModelRunner
from support.runner.rig import OneRank, RunnerRig, request
from support.runner.scenarios import worded_runner
from support.worker.extensions import Corrupting, flip
from support.worker.process import DIGITS

pytestmark = pytest.mark.slow
STRIPES = LoRARequest(lora_name="stripes", lora_int_id=1, lora_path=str(DIGITS / "loras" / "stripes"))


class Corrupter(Corrupting):
    """`Corrupting` without a worker process: it flips bits in the runner that a test hands over."""

    def __init__(self, runner: DiffusionModelRunner) -> None:
        self.model_runner = runner


@pytest.fixture(scope="module")
def loaded() -> RunnerRig:
    return RunnerRig(prompt_cache_size=8)


@pytest.fixture
def rig(loaded: RunnerRig) -> Iterator[RunnerRig]:
    """Provide a rig; afterwards drop its requests, and check that the test left its weights and adapters unchanged."""
    before = loaded.runner.fingerprint(probe=False)
    yield loaded
    loaded.runner.drop_all()
    assert loaded.runner.fingerprint(probe=False) == before


def of(rig: RunnerRig) -> Fingerprint:
    return rig.runner.fingerprint(probe=True)


def test_a_flipped_bit_of_a_weight_is_seen_by_the_checksum_and_a_large_change_by_the_probe_too(rig: RunnerRig) -> None:
    before = of(rig)
    Corrupter(rig.runner).flip_weight()
    assert of(rig).weights != before.weights
    Corrupter(rig.runner).flip_weight()
    weight = rig.runner.pipeline.transformer.proj_out.weight
    with torch.inference_mode():
        weight.neg_()
        changed = of(rig)
        weight.neg_()
    assert changed.weights != before.weights
    assert changed.probe != before.probe


def test_without_the_contents_it_is_the_probe_alone(rig: RunnerRig) -> None:
    whole, alone = rig.runner.fingerprint(probe=True), rig.runner.fingerprint(probe=True, contents=False)
    assert alone == msgspec.structs.replace(whole, weights="", adapters={})
    assert alone.probe


def test_every_tensor_of_the_model_counts(rig: RunnerRig) -> None:
    before = rig.runner.fingerprint(probe=False).weights
    modules = [part for part in rig.runner.pipeline.components.values() if isinstance(part, torch.nn.Module)]
    for tensor in (tensor for module in modules for tensor in module.parameters()):
        flip(tensor)
        assert rig.runner.fingerprint(probe=False).weights != before
        flip(tensor)


def test_an_adapter_is_known_by_its_file_and_by_what_is_kept_of_it(rig: RunnerRig) -> None:
    before = of(rig)
    loaded = rig.runner.add_lora(STRIPES, LoadOptions())
    assert rig.runner.loras is not None
    try:
        with_it = of(rig)
        assert (with_it.weights, with_it.probe) == (before.weights, before.probe)
        assert with_it.adapters == {1: f"{loaded.identity} {loaded.checksum}"}
        rig.run(request("a", loras=[LoRAUse(1, 1.0)]))
        assert of(rig) == with_it
        Corrupter(rig.runner).flip_adapter(1)
        spoilt = of(rig)
        assert spoilt.adapters[1] != with_it.adapters[1]
        assert msgspec.structs.replace(spoilt, adapters=with_it.adapters) == with_it
        rig.runner.loras.remove_adapter(1)
        rig.runner.add_lora(STRIPES, LoadOptions())
        assert of(rig) == with_it
    finally:
        rig.runner.loras.remove_adapter(1)


def test_a_slot_that_was_spoilt_does_not_outlive_a_sleep_as_it_is_filled_from_the_verified_copy(rig: RunnerRig) -> None:
    rig.runner.add_lora(STRIPES, LoadOptions())
    assert rig.runner.loras is not None
    try:
        adapted = request("a", loras=[LoRAUse(1, 1.0)])
        before, known = rig.run(adapted)[0]["a"], of(rig)
        rows = rig.runner.loras.layers._segments[0].rows
        with torch.inference_mode():
            rows.mul_(2)
        assert (rig.run(adapted)[0]["a"] != before).any()
        rig.runner.release()
        rig.runner.restore()
        assert of(rig) == known
        assert (rig.run(adapted)[0]["a"] == before).all()
    finally:
        rig.runner.loras.remove_adapter(1)


def test_a_wake_after_which_adapters_are_in_no_slot_is_seen(rig: RunnerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wake while nothing is written into slots: the adapter's copy in host memory is right, but its slot is empty.

    A request for it would get the base model's image.
    """
    rig.runner.add_lora(STRIPES, LoadOptions())
    assert rig.runner.loras is not None
    try:
        known = of(rig)
        rig.runner.release()
        rig.runner.restore()
        monkeypatch.setattr(Segment, "write_in_pieces", lambda segment, slot, runs: iter(()))
        assert of(rig).adapters == {1: f"{known.adapters[1]} misapplied"}
        monkeypatch.undo()
        rig.runner.release()
        rig.runner.restore()
        assert of(rig) == known
    finally:
        rig.runner.loras.remove_adapter(1)


def test_nothing_is_left_of_it(rig: RunnerRig) -> None:
    plain, _ = rig.run(request("a"))
    assert rig.runner._prompts is not None
    prompts, randomness = rig.runner._prompts.stats(), torch.random.get_rng_state()
    of(rig)
    assert rig.runner._prompts.stats() == prompts
    assert torch.equal(torch.random.get_rng_state(), randomness)
    assert rig.runner._states == {}
    again, _ = rig.run(request("a"))
    assert (again["a"] == plain["a"]).all()


def test_what_other_requests_left_in_caches_takes_no_part(rig: RunnerRig) -> None:
    before = of(rig)
    rig.run(request("a", prompt="probe kumquatfen"), request("b", prompt="another kumquatfen"))
    assert of(rig) == before


def test_it_is_refused_while_requests_run_and_while_anything_sleeps(rig: RunnerRig) -> None:
    rig.runner.execute_stepwise(Tick(1, [request("a")]))
    with pytest.raises(RequestError, match="no fingerprint can be taken while requests run, found 1") as busy:
        of(rig)
    assert busy.value.code is ErrorCode.BUSY
    rig.runner.drop_all()
    rig.runner.release()
    rig.runner.restore([MemoryTag.WEIGHTS])
    with pytest.raises(RequestError) as asleep:
        of(rig)
    assert asleep.value.code is ErrorCode.ASLEEP
    rig.runner.restore()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"step_cache": StepCache.FIRST_BLOCK}, {"compile": Compile.DEFAULT}, {"exact": True}], ids=str)
def test_options_that_change_how_images_are_made_do_not_change_it(loaded: RunnerRig, options: dict[str, Any]) -> None:
    assert of(RunnerRig(**options)) == of(loaded)


# Requests of a probe


class LargeFlux(FluxPipeline):
    """A pipeline that refuses images below 80 pixels and fewer than two steps; all others it makes at 80 pixels."""

    SMALLEST, FEWEST_STEPS = 80, 2

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (kwargs.get("height") or self.SMALLEST) < self.SMALLEST or kwargs["num_inference_steps"] < self.FEWEST_STEPS:
            raise ValueError("too small")
        return super().__call__(*args, **{**kwargs, "height": self.SMALLEST, "width": self.SMALLEST})


class NeverFlux(LargeFlux):
    """A pipeline that refuses fewer than 50 steps, and so every request of a probe."""

    FEWEST_STEPS = 50


KINDS = {"WordyFlux": FluxPipeline, "WordyFluxEdits": FluxImg2ImgPipeline, "WordyWan": WanPipeline, "LargeFlux": LargeFlux}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_models_of_images_of_edits_and_of_videos_have_a_probe_that_sees_their_weights(kind: type[Any]) -> None:
    runner = worded_runner(kind, OneRank())
    before = runner.fingerprint(probe=True)
    assert before.probe is not None
    assert runner.fingerprint(probe=True) == before == worded_runner(kind, OneRank()).fingerprint(probe=True)
    with torch.inference_mode():
        runner.pipeline.transformer.proj_out.weight.neg_()
    assert runner.fingerprint(probe=True).probe != before.probe


def test_a_model_that_refuses_whatever_is_tried_has_no_probe_and_says_so_and_its_weights_count(caplog: pytest.LogCaptureFixture) -> None:
    runner = worded_runner(NeverFlux, OneRank())
    with caplog.at_level(logging.WARNING):
        found = runner.fingerprint(probe=True)
    assert found.probe is None and found.weights == runner.fingerprint(probe=False).weights
    assert "no small image can be made for comparison after a wake, so that wakes are verified by checksums alone: too small" in caplog.text


def test_too_little_memory_for_the_probe_is_an_error_that_may_pass() -> None:
    runner = worded_runner(FluxPipeline, OneRank())
    before = runner.fingerprint(probe=True)
    parallel: Any = runner._parallel

    def run_out(call: ModelCall) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    parallel.before = run_out
    with pytest.raises(RequestError, match="out of memory") as failed:
        runner.fingerprint(probe=True)
    assert failed.value.code is ErrorCode.INSUFFICIENT_MEMORY
    parallel.before = lambda call: None
    assert runner.fingerprint(probe=True) == before


class Tasks:
    """A stand-in for the task pipelines of a model: each task has an object that is no pipeline."""

    def pipeline_of(self, task: Task) -> Any:
        return object()


def asked_of(**fields: Any) -> list[RequestSpec]:
    model = ModelInfo(**{"pipeline": "P", "dtype": "float32", "size_multiple": 16, "weights_bytes": 1} | fields)
    tasks: Any = Tasks()
    return [request.spec for request in probe_requests(model, tasks)]


def test_the_smallest_size_is_asked_for_first_then_the_models_own_with_a_step_and_with_two() -> None:
    tried = [(spec.width, spec.height, spec.frames, spec.steps) for spec in asked_of()]
    smallest = (SMALLEST_SIDE, SMALLEST_SIDE, None)
    assert tried == [(*smallest, 1), (*smallest, 2), (None, None, None, 1), (None, None, None, 2)]


def test_a_deployment_whose_default_size_is_smaller_is_asked_for_that_alone() -> None:
    tried = [(spec.width, spec.height, spec.steps) for spec in asked_of(default_width=48, default_height=32)]
    assert tried == [(48, 32, 1), (48, 32, 2)]


def test_the_smallest_size_is_one_that_the_model_and_its_split_allow() -> None:
    video = asked_of(kind="video", frame_multiple=4, size_multiple=48)[0]
    assert (video.width, video.height, video.frames) == (96, 96, 5)
    assert asked_of(token_pixels=16, tokens_multiple=6)[0].width == 96


def test_a_model_that_serves_no_task_of_ours_is_asked_for_nothing() -> None:
    assert asked_of(tasks=[]) == []
