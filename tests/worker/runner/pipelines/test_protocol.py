# SPDX-License-Identifier: Apache-2.0
"""Hints of a pipeline class about its requests, and classes that need the model for themselves while they run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, LayerSkipConfig, SkipLayerGuidance

from diffusion_worker.config import LoadFormat
from diffusion_worker.messages import RequestSpec, Tick
from diffusion_worker.runner.loading.pipeline import load_pipeline
from diffusion_worker.runner.pipelines.view import guide, guiders_of, schedulers_of, view_of
from diffusion_worker.runner.stepping.request_state import DiffusionRequestState, FiberDone
from support.families.images.modular import wan22
from support.families.rig.all import FAMILIES
from support.runner.rig import RunnerRig, image_of_diffusers, request

pytestmark = pytest.mark.slow

SAYING = """
from diffusers import DiffusionPipeline, StableDiffusion3Pipeline

class Keyed(StableDiffusion3Pipeline):
    def worker_batch_key(self, arguments):
        return arguments["guidance_scale"] > 4

class Whole(StableDiffusion3Pipeline):
    def worker_runs_whole(self, arguments):
        return arguments["num_inference_steps"] == 2

class Wrong(StableDiffusion3Pipeline):
    def worker_runs_whole(self, arguments):
        if arguments["num_inference_steps"] != 3:
            raise ValueError("steps: expected 3")
        return arguments["no such argument"]

class PassingOn(StableDiffusion3Pipeline):
    def __call__(self, *args, prompt="nothing", **kwargs):
        return super().__call__(*args, prompt=prompt.replace("red", "blue"), **kwargs)

class Bare(StableDiffusion3Pipeline):
    worker_makes = "video"

    def __call__(self, prompt, generator, output_type):
        return [[frame for frame in super().__call__([prompt] * 2, generator=generator, output_type="np", num_inference_steps=1).images]]

class Combined(DiffusionPipeline):
    worker_makes = "image"

    def __init__(self, transformer, scheduler, vae, text_encoder, tokenizer, text_encoder_2, tokenizer_2):
        super().__init__()
        parts = dict(transformer=transformer, scheduler=scheduler, vae=vae)
        parts |= dict(text_encoder=text_encoder, tokenizer=tokenizer, text_encoder_2=text_encoder_2, tokenizer_2=tokenizer_2)
        self.register_modules(**parts)
        self.inner_pipe = StableDiffusion3Pipeline(text_encoder_3=None, tokenizer_3=None, **parts)
        self.inner_pipe.set_progress_bar_config(disable=True)

    def __call__(self, prompt, generator, output_type, num_inference_steps=3, guidance_scale=7.0, height=32, width=32):
        outputs = self.inner_pipe(
            prompt, generator=generator, output_type=output_type, num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale, height=height, width=width,
        )
        return outputs
"""


@pytest.fixture
def rig_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Provide a function from the name of a class in SAYING to a runner that loads it as a custom pipeline."""
    (tmp_path / "saying_pipelines.py").write_text(SAYING)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda name: RunnerRig(load_format=LoadFormat.CUSTOM_PIPELINE, pipeline=f"saying_pipelines:{name}")


def plain(rig: RunnerRig, spec: RequestSpec) -> Any:
    return image_of_diffusers(load_pipeline(rig.config, torch.float32), spec)


def test_requests_whose_pipeline_gives_them_another_batch_key_share_no_call(rig_of: Any) -> None:
    rig = rig_of("Keyed")
    low, same = request("low", seed=1, guidance_scale=2.0), request("same", seed=2, guidance_scale=3.0)
    high = request("high", seed=3, guidance_scale=5.0)
    images, errors = rig.run(low, same, high)
    assert not errors
    assert sorted({call.rows for call in rig.denoiser_calls()}) == [2, 4]
    assert len(rig.denoiser_calls()) == 2 * 3
    np.testing.assert_array_equal(images["high"], plain(rig, high))


def test_a_request_that_its_pipeline_calls_whole_runs_by_itself_and_is_never_mixed(rig_of: Any) -> None:
    rig = rig_of("Whole")
    before, whole, after = request("before", steps=5), request("whole", seed=2, steps=2), request("after", seed=3, steps=4)
    images, errors = rig.run(before, whole, after, joining=[0, 1, 1])
    assert not errors
    assert {call.rows for call in rig.denoiser_calls() if call.whole} == {2}
    own = [number for number, call in enumerate(rig.denoiser_calls()) if call.whole]
    assert own == list(range(own[0], own[0] + 2))
    # The other two requests share the rest of their calls.
    assert max(call.rows for call in rig.denoiser_calls()) == 4
    np.testing.assert_array_equal(images["whole"], plain(rig, whole))


def test_what_a_pipeline_raises_when_it_is_asked_about_a_request_is_that_requests_error(rig_of: Any) -> None:
    _, errors = rig_of("Wrong").run(request("refused", steps=4), request("failed", steps=3))
    assert (errors["refused"].code, errors["refused"].message) == ("InvalidRequest", "steps: expected 3")
    assert (errors["failed"].code, errors["failed"].message) == ("RequestFailed", "Wrong.worker_runs_whole: KeyError: 'no such argument'")


def test_a_class_that_passes_its_arguments_on_takes_what_the_class_takes_that_it_extends(rig_of: Any) -> None:
    rig = rig_of("PassingOn")
    assert rig.model.kind == "image"
    images, errors = rig.run(request("one", prompt="a red digit two"))
    assert not errors
    np.testing.assert_array_equal(images["one"], plain(RunnerRig(), request("same", prompt="a blue digit two")))
    _, errors = rig.run(request("one", frames=3))
    assert errors["one"].message.startswith("frames: PassingOn takes no such argument")


def test_a_class_says_itself_what_it_makes(rig_of: Any) -> None:
    rig = rig_of("Bare")
    assert rig.model.kind == "video"
    images, errors = rig.run(request("one", height=None, width=None, steps=None))
    assert not errors
    assert images["one"].shape == (2, 64, 64, 3)


def test_a_pipeline_made_of_others_shares_calls_through_them(rig_of: Any) -> None:
    rig = rig_of("Combined")
    one, other = request("one", steps=4), request("other", seed=2, guidance_scale=3.0)
    images, errors = rig.run(one, other, joining=[0, 1])
    assert not errors
    assert len(rig.denoiser_calls()) == 4
    reference = RunnerRig()
    for spec in (one, other):
        expected = plain(reference, spec).astype(int)
        assert np.abs(images[spec.request_id].astype(int) - expected).max() <= 1


def test_a_pipeline_that_swaps_attention_processors_leaves_them_to_nobody_else() -> None:
    rig = RunnerRig(pipeline="StableDiffusion3PAGPipeline")
    processors = {name: type(part) for name, part in rig.runner.pipeline.transformer.attn_processors.items()}
    asked = [request("one", steps=4), request("other", seed=2, guidance_scale=3.0)]
    images, errors = rig.run(*asked, joining=[0, 1])
    assert not errors
    reference = load_pipeline(rig.config, torch.float32)
    for spec in asked:
        np.testing.assert_array_equal(images[spec.request_id], image_of_diffusers(reference, spec))
    assert {name: type(part) for name, part in rig.runner.pipeline.transformer.attn_processors.items()} == processors


def test_a_cancelled_request_leaves_no_attention_processor_of_its_own_on_the_model() -> None:
    rig = RunnerRig(pipeline="StableDiffusion3PAGPipeline")
    own = rig.runner.pipeline.transformer.attn_processors
    rig.runner.execute_stepwise(Tick(1, [request("leaves", steps=5)]))
    assert rig.runner.pipeline.transformer.attn_processors != own
    rig.runner.execute_stepwise(Tick(2, leave=["leaves"]))
    assert rig.runner.pipeline.transformer.attn_processors == own


@pytest.fixture
def hooking() -> RunnerRig:
    """Provide a runner whose guider, SkipLayerGuidance, hooks block 1 of the transformer for one of a step's calls.

    It has the scale 2 in all steps.
    """
    rig = RunnerRig(pipeline="StableDiffusion3ModularPipeline")
    skipping = {"scale": 2.0, "start": 0.0, "stop": 1.0}
    layers = LayerSkipConfig(indices=[1], fqn="transformer_blocks", skip_attention=False)
    guider = SkipLayerGuidance(5.0, skip_layer_config=layers, **{f"skip_layer_guidance_{key}": value for key, value in skipping.items()})
    rig.runner.pipeline.update_components(guider=guider)
    return rig


def test_requests_of_a_guider_that_hooks_the_model_run_one_after_the_other(hooking: RunnerRig) -> None:
    asked = [request("one"), request("other", seed=2, guidance_scale=3.0)]
    alone = {spec.request_id: hooking.run(spec)[0][spec.request_id] for spec in asked}
    images, errors = hooking.run(*asked)
    assert not errors
    assert {call.whole for call in hooking.denoiser_calls()} == {True}
    for name, image in alone.items():
        np.testing.assert_array_equal(images[name], image)


def test_a_request_that_fails_inside_a_hook_leaves_none_on_the_model(hooking: RunnerRig) -> None:
    before, _ = hooking.run(request("one"))
    made = 0

    def fail(call: Any) -> None:
        nonlocal made
        made += call.component == "transformer"
        # The first step makes two calls, and each later one three, the last of which skips a layer.
        if made == 5 and call.component == "transformer":
            assert hooks_on(hooking.runner.pipeline.transformer)
            raise RuntimeError("no kernel")

    hooking.parallel.before = fail
    _, errors = hooking.run(request("fails"))
    assert "no kernel" in errors["fails"].message
    hooking.parallel.before = lambda call: None
    assert hooks_on(hooking.runner.pipeline.transformer) == []
    after, _ = hooking.run(request("one"))
    np.testing.assert_array_equal(before["one"], after["one"])


def hooks_on(model: torch.nn.Module) -> list[str]:
    registries = {name: part._diffusers_hook for name, part in model.named_modules() if hasattr(part, "_diffusers_hook")}
    return [f"{name}: {hook}" for name, registry in registries.items() for hook in registry.hooks]


def test_a_view_has_schedulers_and_guiders_of_its_own_and_shares_the_rest() -> None:
    pipeline = next(family for family in FAMILIES if family.name == "Flux3ModularPipeline").build()
    view = view_of(pipeline)
    for name, part in {**schedulers_of(pipeline), **guiders_of(pipeline)}.items():
        assert getattr(view, name) is not part, name
        assert getattr(view, name).config == part.config, name
    assert set(view.components) == set(pipeline.components)
    assert isinstance(view.transformer, type(pipeline.transformer))


def test_the_guidance_of_a_request_reaches_every_guider_of_its_view_and_no_other() -> None:
    pipeline = wan22()
    before = [guider.guidance_scale for guider in guiders_of(pipeline).values()]
    view = view_of(pipeline)
    assert guide(view, 2.5)
    assert [guider.guidance_scale for guider in guiders_of(view).values()] == [2.5, 2.5]
    assert [guider.guidance_scale for guider in guiders_of(pipeline).values()] == before
    assert [guider.guidance_scale for guider in guiders_of(view_of(pipeline)).values()] == before


class Stepless(DiffusionPipeline):
    """A pipeline that calls its model once and has no steps."""

    def __init__(self, transformer: Any) -> None:
        super().__init__()
        self.register_modules(transformer=transformer)

    def __call__(self) -> Any:
        return self.transformer(torch.ones(1, 3))


def test_a_pipeline_without_a_scheduler_has_views_too() -> None:
    pipeline = Stepless(torch.nn.Linear(3, 2))
    state = DiffusionRequestState(request("one"), lambda: view_of(pipeline)())
    call = state.advance()
    assert (call.component, call.method) == ("transformer", "forward")  # type: ignore[union-attr]
    assert state.resume("what the model returned") == FiberDone("what the model returned")
