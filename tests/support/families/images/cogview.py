# SPDX-License-Identifier: Apache-2.0
"""CogView 3 Plus: the sizes of the image are rows."""

from typing import Any

from diffusers import (
    CogVideoXDDIMScheduler,
    CogView3PlusPipeline,
    CogView3PlusTransformer2DModel,
)

from support.families.rig.family import Arguments, Family, build_seeded, seeded, tiny_vae
from support.families.rig.two_rows import of_two_prompts

TOKENS = 16
SIZES = {
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "text_embed_dim": 32,
    "time_embed_dim": 16,
    "condition_dim": 8,
    "pos_embed_max_size": 16,
    "sample_size": 16,
}


def _cogview3() -> Any:
    # With no signal left in the first step the noise cannot be what is predicted.
    scheduler = CogVideoXDDIMScheduler(clip_sample=False, rescale_betas_zero_snr=True, prediction_type="v_prediction")
    return CogView3PlusPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=tiny_vae(),
        transformer=CogView3PlusTransformer2DModel(**SIZES),
        scheduler=scheduler,
    )


def _prompts(seed: int, steps: int, guidance: float) -> Arguments:
    return {
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "prompt_embeds": seeded(seed, 1, TOKENS, 32),
        "negative_prompt_embeds": seeded(seed + 100, 1, TOKENS, 32),
        "original_size": (32 + seed, 32),
        "height": 32,
        "width": 32,
    }


FAMILIES = [
    Family("CogView3PlusPipeline", "CogView 3", build_seeded(_cogview3), _prompts, output_type="pt", doubled=of_two_prompts(_prompts)),
]
