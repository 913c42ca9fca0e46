# SPDX-License-Identifier: Apache-2.0
"""HiDream: a mixture of experts whose prompts come from four encoders, one of them with its layers before its rows."""

from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, HiDreamImagePipeline, HiDreamImageTransformer2DModel

from support.families.rig.family import Arguments, Family, build_seeded, seeded, tiny_vae

TOKENS = 8


def _pipeline() -> Any:
    transformer = HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=[32, 16],
        text_emb_dim=24,
        num_routed_experts=4,
        num_activated_experts=2,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(16, 16),
        llama_layers=[0, 1],
        force_inference_output=True,
    )
    encoders = dict.fromkeys([f"{part}{number}" for part in ("text_encoder", "tokenizer") for number in ("", "_2", "_3", "_4")])
    pipeline = HiDreamImagePipeline(
        transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(), vae=tiny_vae(scaling_factor=1.5, shift_factor=0.1), **encoders
    )
    pipeline.default_sample_size = 16  # every size is brought to the area of this many latents squared
    return pipeline


def _prompts(seed: int, steps: int, guidance: float) -> Arguments:
    return {
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "prompt_embeds_t5": seeded(seed, 1, TOKENS, 32),
        "prompt_embeds_llama3": seeded(seed + 100, 2, 1, TOKENS, 16),
        "pooled_prompt_embeds": seeded(seed + 200, 1, 24),
        "negative_prompt_embeds_t5": seeded(seed + 300, 1, TOKENS, 32),
        "negative_prompt_embeds_llama3": seeded(seed + 400, 2, 1, TOKENS, 16),
        "negative_pooled_prompt_embeds": seeded(seed + 500, 1, 24),
        "height": 32,
        "width": 32,
    }


FAMILIES = [
    Family(
        name="HiDreamImagePipeline",
        family="HiDream",
        build=build_seeded(_pipeline),
        request=_prompts,
        output_type="pt",
        doubled={"num_images_per_prompt": 2},
    ),
]
