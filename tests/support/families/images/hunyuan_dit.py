# SPDX-License-Identifier: Apache-2.0
"""Hunyuan-DiT: two masked prompts, a style and the sizes of the image as rows, a table of angles for all."""

from typing import Any

from diffusers import DDPMScheduler, HunyuanDiT2DModel, HunyuanDiTPipeline

from support.families.rig.family import Arguments, Family, build_seeded, seeded, tiny_vae, token_mask
from support.families.rig.two_rows import of_two_prompts

SHORT, LONG = 6, 8


def _pipeline() -> Any:
    transformer = HunyuanDiT2DModel(
        sample_size=16,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=3,
        in_channels=4,
        cross_attention_dim=32,
        cross_attention_dim_t5=24,
        pooled_projection_dim=16,
        hidden_size=24,
        text_len=SHORT,
        text_len_t5=LONG,
        activation_fn="gelu-approximate",
    )
    return HunyuanDiTPipeline(
        **dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "safety_checker", "feature_extractor")),
        transformer=transformer,
        scheduler=DDPMScheduler(clip_sample=False),
        vae=tiny_vae(levels=4),
        requires_safety_checker=False,
    )


def _prompts(seed: int, steps: int, guidance: float) -> Arguments:
    return {
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "prompt_embeds": seeded(seed, 1, SHORT, 32),
        "prompt_attention_mask": token_mask(seed, SHORT),
        "negative_prompt_embeds": seeded(seed + 100, 1, SHORT, 32),
        "negative_prompt_attention_mask": token_mask(seed + 1, SHORT),
        "prompt_embeds_2": seeded(seed + 200, 1, LONG, 24),
        "prompt_attention_mask_2": token_mask(seed, LONG),
        "negative_prompt_embeds_2": seeded(seed + 300, 1, LONG, 24),
        "negative_prompt_attention_mask_2": token_mask(seed + 1, LONG),
        "original_size": (32 + seed, 32),
        "height": 32,
        "width": 32,
        "use_resolution_binning": False,
    }


FAMILIES = [
    Family(
        name="HunyuanDiTPipeline",
        family="Hunyuan-DiT",
        build=build_seeded(_pipeline),
        request=_prompts,
        output_type="pt",
        tolerance=1e-6,
        reason="its layer norms compute in float32 whatever they are given",
        doubled=of_two_prompts(_prompts),
    ),
]
