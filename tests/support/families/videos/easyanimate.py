# SPDX-License-Identifier: Apache-2.0
"""A tiny EasyAnimate pipeline. Prompts are embeddings with a mask."""

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
    """A pipeline on a transformer of two blocks."""
    return diffusers.EasyAnimatePipeline(
        transformer=diffusers.EasyAnimateTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            patch_size=2,
            sample_width=SIDE // 8,
            sample_height=SIDE // 8,
            num_layers=2,
            mmdit_layers=2,
            time_embed_dim=4,
            text_embed_dim=16,
        ),
        vae=diffusers.AutoencoderKLMagvit(
            latent_channels=4,
            block_out_channels=[8, 8, 8, 8],
            layers_per_block=1,
            norm_num_groups=4,
            spatial_group_norm=False,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        text_encoder=None,
        tokenizer=None,
    )


def text_to_video(seed: int, steps: int, guidance: float) -> Arguments:
    """A prompt, a size and a number of frames."""
    return {
        "prompt_embeds": seeded(seed, 1, TEXT_TOKENS, 16),
        "prompt_attention_mask": torch.ones(1, TEXT_TOKENS),
        "negative_prompt_embeds": seeded(seed + 100, 1, TEXT_TOKENS, 16),
        "negative_prompt_attention_mask": torch.ones(1, TEXT_TOKENS),
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "height": SIDE,
        "width": SIDE,
        "num_frames": FRAMES,
    }


FAMILIES = [Family("EasyAnimatePipeline", "EasyAnimate", build_seeded(pipeline), text_to_video, doubled=of_two_prompts(text_to_video))]
