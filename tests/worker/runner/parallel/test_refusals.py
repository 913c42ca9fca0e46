# SPDX-License-Identifier: Apache-2.0
"""Kinds that a model or its pipeline does not support are refused when it is loaded, naming the option and the model's class."""

from typing import Any

import diffusers
import pytest
import torch

from diffusion_worker.config import WorkerConfig
from diffusion_worker.errors import ConfigError
from diffusion_worker.messages import ModelInfo
from diffusion_worker.runner.parallel import sequence
from diffusion_worker.runner.parallel.setup import ParallelKinds
from diffusion_worker.runner.pipelines.view import modules_of
from support.families.images import flux, flux2, latent_images, stable_diffusion, stable_diffusion_3, z_image
from support.families.rig.family import Family
from support.families.videos import wan
from support.runner.rig import OneRank

BY_NAME: dict[str, Family] = {
    family.name: family
    for module in (flux, flux2, latent_images, stable_diffusion, stable_diffusion_3, wan, z_image)
    for family in module.FAMILIES
}


def kinds_of(pipeline: Any, **sizes: Any) -> ParallelKinds:
    """Make the parallel kinds of a pipeline for these sizes without a process group, which a refused pipeline does not need."""
    config = WorkerConfig(model="(in memory)", served_name="tiny", **sizes)
    return ParallelKinds(config, OneRank(), pipeline, modules_of(pipeline))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "sizes", "says"),
    [
        ("StableDiffusionPipeline", {"sequence": 2}, r"--sequence: UNet2DConditionModel \(unet\) is not supported, expected one of Flux2"),
        ("StableDiffusionPipeline", {"tensor": 2}, r"--tensor: UNet2DConditionModel \(unet\) is not supported, expected one of Flux2"),
        ("StableDiffusion3Pipeline", {"tensor": 2}, r"--tensor: SD3Transformer2DModel \(transformer\) is not supported"),
        ("WanPipeline", {"tensor": 2}, r"--tensor: WanTransformer3DModel \(transformer\) is not supported"),
        ("WanVACEPipeline", {"sequence": 2}, r"--sequence: WanVACETransformer3DModel \(transformer\) is not supported"),
        ("FluxPipeline", {"sequence": 3}, r"--sequence 3: FluxTransformer2DModel \(transformer\) has 2 attention heads"),
        ("FluxPipeline", {"tensor": 4}, r"--tensor 4: FluxTransformer2DModel \(transformer\) has 2 attention heads"),
        ("FluxControlNetPipeline", {"sequence": 2}, "--sequence: FluxControlNetPipeline is not supported: a ControlNet adds"),
        ("Flux2KleinKVPipeline", {"sequence": 2}, "--sequence: Flux2KleinKVPipeline is not supported: it caches keys and values"),
        ("DiTPipeline", {"shard": 2}, r"--shard: DiTTransformer2DModel \(transformer\) is not supported: it calls a layer"),
        ("ZImageControlNetPipeline", {"shard": 2}, "--shard: ZImageControlNetPipeline is not supported: .* share layers"),
        ("WanPipeline", {"vae_tiling": True}, r"--vae-tiling: AutoencoderKLWan \(vae\) is not supported, expected one of AutoencoderKL"),
    ],
)
def test_a_kind_that_does_not_fit_the_model_is_refused_by_option_and_class(family: str, sizes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        kinds_of(BY_NAME[family].build(), **sizes)


def flux_with_heads(heads: int) -> Any:
    pipeline = BY_NAME["FluxPipeline"].build()
    shape = flux.SHAPE | {"num_attention_heads": heads}
    pipeline.register_modules(transformer=diffusers.FluxTransformer2DModel(in_channels=16, out_channels=16, **shape))
    return pipeline


def test_a_text_whose_length_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="--sequence 3: a text of FluxPipeline has 512 tokens by default, which is not a multiple of 3"):
        kinds_of(flux_with_heads(3), sequence=3)


def test_layers_that_do_not_divide_are_refused_with_the_layers_name() -> None:
    pipeline = flux_with_heads(6)
    # Three divides the six heads, and not the layer beside them.
    pipeline.transformer.single_transformer_blocks[0].proj_mlp = torch.nn.Linear(96, 100)
    with pytest.raises(ConfigError, match=r"--tensor 3: FluxTransformer2DModel \(transformer\): .*proj_mlp"):
        kinds_of(pipeline, tensor=3)


def test_a_default_size_whose_tokens_do_not_divide_is_refused() -> None:
    # A latent is two pixels wide, a token two latents: there are 4 x 6 tokens, and 5 x 3.
    fits = sequence.describe(ModelInfo("FluxPipeline", "float32", 8, 0, default_height=16, default_width=24), 4, 2)
    assert (fits.token_pixels, fits.tokens_multiple) == (4, 2)
    with pytest.raises(ConfigError, match="--sequence 2: FluxPipeline makes 12x20 by default, in 15 tokens"):
        sequence.describe(ModelInfo("FluxPipeline", "float32", 8, 0, default_height=20, default_width=12), 4, 2)
