# SPDX-License-Identifier: Apache-2.0
"""A tiny Mochi pipeline of diffusers' real classes. Weights are random, and prompts are embeddings with a mask."""

import warnings
from collections.abc import Callable
from typing import Any

import diffusers
import torch

from support.families.rig.tables import assemble
from support.families.videos.shared import TEXT_TOKENS, family, prompted, short_prompts


def pipeline(kind: str) -> Any:
    """A pipeline on a transformer of two blocks. The VAE divides sides by 8 and keeps every sixth frame."""
    built = assemble(
        kind,
        transformer=diffusers.MochiTransformer3DModel(
            patch_size=2, num_attention_heads=2, attention_head_dim=8, num_layers=2, pooled_projection_dim=16, in_channels=12,
            text_embed_dim=16, time_embed_dim=4, max_sequence_length=TEXT_TOKENS,
        ),
        vae=diffusers.AutoencoderKLMochi(
            latent_channels=12, out_channels=3, encoder_block_out_channels=(32, 32, 32, 32),
            decoder_block_out_channels=(32, 32, 32, 32), layers_per_block=(1, 1, 1, 1, 1),
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
    )  # fmt: skip
    built.transformer.rope.forward = _quiet(built.transformer.rope.forward)
    return built


def _quiet(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Torch warns that there is no autocast to float32 on a CPU; the positions are in float32 anyway."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="In CPU autocast")
            return forward(*args, **kwargs)

    return call


FAMILIES = [family("MochiPipeline", "Mochi", pipeline, prompted(**short_prompts(torch.bool), num_frames=7))]
