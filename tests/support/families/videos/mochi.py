# SPDX-License-Identifier: Apache-2.0
"""A tiny Mochi pipeline. Prompts are embeddings with a mask."""

import warnings
from collections.abc import Callable
from typing import Any

import diffusers
import torch

from support.families.rig.family import Arguments, Family, build_seeded, seeded
from support.families.rig.two_rows import of_two_prompts

# Pixels and frames. The VAE class divides sides by 8 and keeps every sixth frame.
SIDE = 32
FRAMES = 7
TEXT_TOKENS = 6


def pipeline() -> Any:
    """A pipeline on a transformer of two blocks."""
    transformer = diffusers.MochiTransformer3DModel(
        patch_size=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=12,
        text_embed_dim=16,
        time_embed_dim=4,
        max_sequence_length=TEXT_TOKENS,
    )
    transformer.rope.forward = _quiet(transformer.rope.forward)
    return diffusers.MochiPipeline(
        transformer=transformer,
        vae=diffusers.AutoencoderKLMochi(
            latent_channels=12,
            out_channels=3,
            encoder_block_out_channels=(32, 32, 32, 32),
            decoder_block_out_channels=(32, 32, 32, 32),
            layers_per_block=(1, 1, 1, 1, 1),
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
        text_encoder=None,
        tokenizer=None,
    )


def text_to_video(seed: int, steps: int, guidance: float) -> Arguments:
    """A prompt of another length for each seed, a size and a number of frames."""
    return {
        "prompt_embeds": seeded(seed, 1, TEXT_TOKENS, 16),
        "prompt_attention_mask": _mask(2 + seed % 4),
        "negative_prompt_embeds": seeded(seed + 100, 1, TEXT_TOKENS, 16),
        "negative_prompt_attention_mask": _mask(1),
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "height": SIDE,
        "width": SIDE,
        "num_frames": FRAMES,
    }


def _quiet(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Torch warns that there is no autocast to float32 on a CPU; the positions are in float32 anyway."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="In CPU autocast")
            return forward(*args, **kwargs)

    return call


def _mask(tokens: int) -> torch.Tensor:
    return (torch.arange(TEXT_TOKENS) < tokens)[None]


FAMILIES = [Family("MochiPipeline", "Mochi", build_seeded(pipeline), text_to_video, doubled=of_two_prompts(text_to_video))]
