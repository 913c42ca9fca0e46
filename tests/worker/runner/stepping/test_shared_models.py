# SPDX-License-Identifier: Apache-2.0
"""Requests cannot change each other's model: a request that would do so is run once more by itself."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diffusion_worker.config import LoadFormat
from diffusion_worker.messages import RequestSpec, Tick
from diffusion_worker.runner.loading.pipeline import load_pipeline
from support.runner.rig import Images, RunnerRig, image_of_diffusers, request

CHANGING = """
import types
import torch
from diffusers import StableDiffusion3Pipeline

class Acting(StableDiffusion3Pipeline):
    def act(self):
        pass

    def __call__(self, *args, **kwargs):
        self.act()
        return super().__call__(*args, **kwargs)

class Setting(Acting):
    def act(self):
        self.vae.use_tiling = True
        self.vae.tile_latent_min_size = 4
        self.vae.tile_sample_min_size = 8

class Tiling(Acting):
    def act(self):
        self.vae.enable_tiling()

class Swallowing(Acting):
    def act(self):
        try:
            self.vae.tile_latent_min_size = 4
            self.vae.tile_sample_min_size = 8
            self.vae.enable_tiling()
        except BaseException:
            pass

class Stubborn(Acting):
    def act(self):
        for _ in range(100):
            try:
                self.vae.tile_latent_min_size = 4
                self.vae.tile_sample_min_size = 8
                self.vae.enable_tiling()
            except BaseException:
                pass

class AtTheLastStep(StableDiffusion3Pipeline):
    def __call__(self, *args, num_inference_steps=3, **kwargs):
        def last(pipeline, step, timestep, tensors):
            if step == num_inference_steps - 1:
                pipeline.vae.use_tiling = True
                pipeline.vae.tile_latent_min_size = 4
                pipeline.vae.tile_sample_min_size = 8
            return tensors
        return super().__call__(*args, num_inference_steps=num_inference_steps, callback_on_step_end=last, **kwargs)

class OfAPart(Acting):
    def act(self):
        self.transformer.transformer_blocks[1].attn.scale = 7.0
        self.transformer.proj_out.forward = types.MethodType(lambda layer, x: 2 * type(layer).forward(layer, x), self.transformer.proj_out)

class OfWeights(Acting):
    def act(self):
        self.transformer.proj_out.bias = torch.nn.Parameter(torch.ones_like(self.transformer.proj_out.bias), requires_grad=False)
        del self.transformer.transformer_blocks[1]

class OfHooks(Acting):
    def act(self):
        self.transformer.proj_out._forward_hooks[1] = lambda layer, args, made: 2 * made

class Reading(Acting):
    def act(self):
        assert isinstance(self.vae.decoder, torch.nn.Module) and self.vae.decoder is self.vae.decoder
        assert len(self.transformer.transformer_blocks) == len(list(self.transformer.transformer_blocks))
        assert self.transformer.transformer_blocks[0].attn.to_q(torch.ones(1, self.transformer.inner_dim)).shape[0] == 1
        assert next(self.text_encoder.parameters()).device == self.text_encoder.device
        assert dict(self.text_encoder.named_modules()) and self.text_encoder.get_input_embeddings().weight.dim() == 2
        assert hasattr(self.vae, "enable_tiling") and self.vae.config.scaling_factor
        self.vae.post_quant_conv and self.vae.decoder.conv_in.to(self.vae.dtype)
        self.text_encoder.eval()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "changing_pipelines.py").write_text(CHANGING)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "changing_pipelines"


@pytest.fixture
def rig_of(module: str) -> Any:
    return lambda name: RunnerRig(load_format=LoadFormat.CUSTOM_PIPELINE, pipeline=f"{module}:{name}")


def plain(rig: RunnerRig, spec: RequestSpec) -> Any:
    return image_of_diffusers(load_pipeline(rig.config, torch.float32), spec)


def of_the_plain_class(rig: RunnerRig, spec: RequestSpec) -> None:
    """Join a request whose body is of StableDiffusion3Pipeline, but runs on the custom pipeline's components.

    Both kinds may then share calls.
    """
    from diffusers import StableDiffusion3Pipeline

    from diffusion_worker.runner.pipelines.body import make_body

    rig.runner.join(spec, make_body(StableDiffusion3Pipeline(**rig.runner.pipeline.components), spec))


def run_in_company(rig: RunnerRig, guilty: RequestSpec, *others: RequestSpec) -> tuple[Images, dict[str, str]]:
    for spec in others:
        of_the_plain_class(rig, spec)
    images, errors = rig.run(guilty, running=len(others))
    assert not errors, errors
    return images, rig.replays


OTHERS = [request("exact", steps=5, exact=True), request("other", seed=2, steps=4, exact=True)]


@pytest.fixture(scope="module")
def others_alone() -> list[Any]:
    """Provide the images of OTHERS, made by diffusers alone."""
    rig = RunnerRig()
    return [plain(rig, spec) for spec in OTHERS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("Tiling", "calls vae.enable_tiling()"),
        ("Setting", "sets vae.use_tiling"),
        ("Swallowing", "sets vae.tile_latent_min_size"),
        ("Stubborn", "sets vae.tile_latent_min_size"),
        ("AtTheLastStep", "sets vae.use_tiling"),
        ("OfAPart", "sets transformer.transformer_blocks[1].attn.scale"),
        ("OfWeights", "sets transformer.proj_out.bias"),
        ("OfHooks", "changes transformer.proj_out._forward_hooks"),
    ],
)
def test_a_request_that_would_change_the_model_is_made_alone_and_all_images_are_as_alone(
    rig_of: Any, others_alone: list[Any], name: str, what: str
) -> None:
    rig, asked = rig_of(name), request("guilty", seed=3)
    images, replays = run_in_company(rig, asked, *OTHERS)
    assert replays == {"guilty": what}
    np.testing.assert_array_equal(images["guilty"], plain(rig, asked))
    for spec, alone in zip(OTHERS, others_alone, strict=True):
        np.testing.assert_array_equal(images[spec.request_id], alone)


@pytest.mark.slow
def test_the_changes_of_the_test_pipelines_change_their_images(rig_of: Any) -> None:
    usual = plain(RunnerRig(), request("a"))
    for name in ("Setting", "AtTheLastStep", "OfAPart", "OfWeights", "OfHooks"):
        assert (plain(rig_of(name), request("a")) != usual).any(), name


def test_a_pipeline_that_only_reads_and_calls_parts_is_stepped_in_company(rig_of: Any) -> None:
    rig = rig_of("Reading")
    images, errors = rig.run(request("one"), request("other", seed=2))
    assert not errors
    assert not rig.replays
    assert len(rig.denoiser_calls()) == 3
    assert images["one"].shape == (32, 32, 3)


def test_a_whole_request_that_is_cancelled_leaves_the_model_as_it_was(rig_of: Any) -> None:
    rig = rig_of("OfAPart")
    transformer = rig.runner.pipeline.transformer
    before = transformer.transformer_blocks[1].attn.scale
    rig.runner.execute_stepwise(Tick(1, [request("leaves", whole=True, steps=5)]))
    assert transformer.transformer_blocks[1].attn.scale == 7.0
    rig.runner.execute_stepwise(Tick(2, leave=["leaves"]))
    assert transformer.transformer_blocks[1].attn.scale == before
    assert "forward" not in vars(transformer.proj_out)


@pytest.mark.slow
def test_one_request_from_begin_to_end_is_made_alone_too(rig_of: Any) -> None:
    rig, asked = rig_of("Setting"), request("one")
    np.testing.assert_array_equal(rig.runner.execute_model(asked), plain(rig, asked))
    rig.runner.warm_up()
