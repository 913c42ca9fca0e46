# SPDX-License-Identifier: Apache-2.0
"""A tiny Allegro pipeline. Prompts are embeddings with a mask."""

from typing import Any

import diffusers
import torch

from support.families.rig.family import Arguments, Family, build_seeded, seeded
from support.families.rig.two_rows import of_two_prompts

# Pixels and frames. The VAE divides sides by 8 and keeps every fourth frame.
SIDE = 32
FRAMES = 5
TEXT_TOKENS = 6


def pipeline() -> Any:
    """A pipeline on a transformer of one block."""
    return diffusers.AllegroPipeline(
        transformer=diffusers.AllegroTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            cross_attention_dim=24,
            sample_width=SIDE // 8,
            sample_height=SIDE // 8,
            sample_frames=2,
            caption_channels=16,
        ),
        vae=diffusers.AutoencoderKLAllegro(block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=2, latent_channels=4),
        scheduler=diffusers.DDIMScheduler(clip_sample=False),
        text_encoder=None,
        tokenizer=None,
    )


def text_to_video(seed: int, steps: int, guidance: float) -> Arguments:
    """A prompt of another length for each seed, a size and a number of frames."""
    return {
        "prompt_embeds": seeded(seed, 1, TEXT_TOKENS, 16),
        "prompt_attention_mask": _mask(2 + seed % 4),
        "negative_prompt": None,
        "negative_prompt_embeds": seeded(seed + 100, 1, TEXT_TOKENS, 16),
        "negative_prompt_attention_mask": _mask(1),
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "height": SIDE,
        "width": SIDE,
        "num_frames": FRAMES,
    }


def _mask(tokens: int) -> torch.Tensor:
    return (torch.arange(TEXT_TOKENS) < tokens).long()[None]


FAMILIES = [Family("AllegroPipeline", "Allegro", build_seeded(pipeline), text_to_video, doubled=of_two_prompts(text_to_video))]
