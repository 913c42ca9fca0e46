# SPDX-License-Identifier: Apache-2.0
"""The estimate of `diffusion-worker memory`, held against the digits model as a worker loads it, decodes with it and gives it slots."""

from collections.abc import Iterator

import pytest
import torch
from click.testing import CliRunner
from torch.profiler import ProfilerActivity, profile

from diffusion_worker.cli import cli
from diffusion_worker.config import Dtype, WorkerConfig
from diffusion_worker.errors import ConfigError
from diffusion_worker.runner.loading.adapter_layers import adapted_components
from diffusion_worker.runner.memory_estimate import estimate
from diffusion_worker.runner.pipelines.view import modules_of
from support.runner.rig import RunnerRig
from support.worker.process import DIGITS_MODEL

CONFIG = WorkerConfig(model=str(DIGITS_MODEL), served_name="digits", dtype=Dtype.FLOAT32)
SIDE = 64


@pytest.fixture(scope="module")
def rig() -> Iterator[RunnerRig]:
    yield RunnerRig()


def test_the_weights_are_those_of_a_loaded_worker_and_half_of_that_in_16_bits(rig: RunnerRig) -> None:
    found = estimate(CONFIG, None)
    assert (found.dtype, found.width, found.height) == ("float32", SIDE, SIDE)
    assert sum(found.weights.values()) == rig.model.weights_bytes
    halved = estimate(WorkerConfig(model=str(DIGITS_MODEL), served_name="digits"), None)
    assert halved.dtype == "bfloat16"
    # Numbers that are not floats, such as positions, keep their size.
    assert sum(halved.weights.values()) == pytest.approx(rig.model.weights_bytes / 2, rel=0.01)


def test_slots_are_at_most_what_is_estimated_and_no_less_than_a_half_for_an_adapter_of_all_layers(rig: RunnerRig) -> None:
    assert rig.runner.loras is not None
    for component, module in adapted_components(modules_of(rig.runner.pipeline)).items():
        for name, layer in list(module.named_modules()):
            if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d):
                rig.runner.loras.register_module(f"{component}.{name}")
    taken = rig.runner.memory().adapter_slots_bytes
    assert 0.5 <= taken / estimate(CONFIG, None).slots <= 1.0


def test_a_decode_takes_what_is_estimated_and_a_kernels_workspace(rig: RunnerRig) -> None:
    vae = rig.runner.pipeline.vae
    latents = torch.randn(1, vae.config.latent_channels, SIDE // 2, SIDE // 2)
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        vae.decode(latents)
    live = peak = 0
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns()):  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    decode = estimate(CONFIG, (SIDE, SIDE)).decode
    assert decode is not None and 1.0 <= peak / decode <= 2.0


def test_four_times_the_pixels_take_four_times_the_memory_of_a_decode() -> None:
    small, large = (estimate(CONFIG, (side, side)).decode or 0 for side in (SIDE, 2 * SIDE))
    assert large == pytest.approx(4 * small, rel=0.05)


def test_a_size_that_the_model_cannot_make_and_a_source_elsewhere_are_refused() -> None:
    with pytest.raises(ConfigError, match="--size: expected WIDTHxHEIGHT in multiples of 8 pixels, found 65x64"):
        estimate(CONFIG, (65, 64))
    with pytest.raises(ConfigError, match="expected a local diffusers folder, found 'hf://org/name'"):
        CliRunner().invoke(cli, ["memory", "hf://org/name"], catch_exceptions=False)


def test_the_command_prints_a_line_for_each_component_and_the_sum() -> None:
    printed = CliRunner().invoke(cli, ["memory", str(DIGITS_MODEL), "--size", "128x64"], catch_exceptions=False).output
    for words in (
        "weights of transformer ",
        "weights in bfloat16, in all",
        "decoding an image of 128x64",
        "together, without CUDA's own memory",
    ):
        assert words in printed
    assert "slots for 4 adapters of rank 64, at most" in printed
