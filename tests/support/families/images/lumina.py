# SPDX-License-Identifier: Apache-2.0
"""Lumina: the first with one call for guidance, the second with two calls, whose time runs from noise at 0 to the image at 1."""

from typing import Any

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
    LuminaNextDiT2DModel,
    LuminaPipeline,
)

from support.families.rig.family import Arguments, Family, build_seeded, seeded, tiny_vae, token_mask
from support.families.rig.two_rows import of_two_prompts

TOKENS = 8


def _pipeline(kind: Any, transformer: Any) -> Any:
    return kind(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=tiny_vae(scaling_factor=1.5, shift_factor=0.1),
        text_encoder=None,
        tokenizer=None,
    )


def _lumina() -> Any:
    return _pipeline(
        LuminaPipeline,
        LuminaNextDiT2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            hidden_size=24,
            num_layers=2,
            num_attention_heads=3,
            num_kv_heads=1,
            multiple_of=16,
            learn_sigma=True,
            cross_attention_dim=32,
        ),
    )


def _lumina2() -> Any:
    return _pipeline(
        Lumina2Pipeline,
        Lumina2Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            hidden_size=24,
            num_layers=1,
            num_refiner_layers=1,
            num_attention_heads=3,
            num_kv_heads=1,
            multiple_of=16,
            axes_dim_rope=(4, 2, 2),
            axes_lens=(32, 32, 32),
            cap_feat_dim=32,
        ),
    )


def _prompts(seed: int, steps: int, guidance: float) -> Arguments:
    return {
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "prompt_embeds": seeded(seed, 1, TOKENS, 32),
        "prompt_attention_mask": token_mask(seed, TOKENS),
        "negative_prompt_embeds": seeded(seed + 100, 1, TOKENS, 32),
        "negative_prompt_attention_mask": token_mask(seed + 1, TOKENS),
        "height": 32,
        "width": 32,
    }


def _first(seed: int, steps: int, guidance: float) -> Arguments:
    return _prompts(seed, steps, guidance) | {"negative_prompt": None}


FAMILIES = [
    Family("LuminaPipeline", "Lumina", build_seeded(_lumina), _first, output_type="pt", doubled=of_two_prompts(_first)),
    Family("Lumina2Pipeline", "Lumina 2", build_seeded(_lumina2), _prompts, output_type="pt", doubled=of_two_prompts(_prompts)),
]
