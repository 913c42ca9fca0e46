# SPDX-License-Identifier: Apache-2.0
"""A tiny Motif video pipeline, with guidance in a guider component, on Wan's VAE. Prompts are embeddings with a mask."""

from typing import Any

import diffusers
import torch

from support.families.rig.family import Arguments, Family, build_seeded, seeded, token_mask
from support.families.rig.two_rows import of_two_prompts
from support.families.videos import hunyuan15, wan

# Pixels and frames. The VAE divides sides by 8 and keeps every fourth frame.
SIDE = 32
FRAMES = 5
TEXT_TOKENS = 6


def pipeline() -> Any:
    """A pipeline on a transformer of three blocks."""
    return diffusers.MotifVideoPipeline(
        transformer=diffusers.MotifVideoTransformer3DModel(
            in_channels=4 + 4 + 1,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=12,
            num_layers=1,
            num_single_layers=2,
            num_decoder_layers=1,
            text_embed_dim=16,
            rope_axes_dim=(4, 4, 4),
        ),
        vae=wan.tiny_wan_vae(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        guider=diffusers.ClassifierFreeGuidance(),
        text_encoder=None,
        tokenizer=None,
    )


def text_to_video(seed: int, steps: int, guidance: float) -> Arguments:
    """A prompt of another length for each seed, a size and a number of frames."""
    return {
        "prompt_embeds": seeded(seed, 1, TEXT_TOKENS, 16),
        "prompt_attention_mask": token_mask(seed, TEXT_TOKENS),
        "negative_prompt_embeds": seeded(seed + 100, 1, TEXT_TOKENS, 16),
        "negative_prompt_attention_mask": token_mask(seed + 1, TEXT_TOKENS),
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "height": SIDE,
        "width": SIDE,
        "num_frames": FRAMES,
    }


FAMILIES = [
    Family(
        "MotifVideoPipeline",
        "Motif video",
        build_seeded(pipeline),
        text_to_video,
        output_type="pt",
        call=hunyuan15.call_with_guider,
        compared_in=torch.float32,
        tolerance=1e-4,
        reason="the transformer computes its times in float32 and cannot take them in float64",
        doubled=of_two_prompts(text_to_video),
    )
]
