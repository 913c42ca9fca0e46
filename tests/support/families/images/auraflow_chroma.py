# SPDX-License-Identifier: Apache-2.0
"""AuraFlow and Chroma: transformers over image and text tokens; Chroma masks text and calls twice for guidance."""

from typing import Any

from diffusers import (
    AuraFlowPipeline,
    AuraFlowTransformer2DModel,
    ChromaImg2ImgPipeline,
    ChromaPipeline,
    ChromaTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
)

from support.families.rig.family import Arguments, Family, build_seeded, image, seeded, tiny_vae, token_mask
from support.families.rig.two_rows import of_two_prompts

TOKENS = 8


def _auraflow() -> Any:
    transformer = AuraFlowTransformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=16,
        pos_embed_max_size=256,
    )
    return AuraFlowPipeline(
        transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(), vae=tiny_vae(), text_encoder=None, tokenizer=None
    )


def _chroma(kind: Any) -> Any:
    transformer = ChromaTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 8),
        approximator_num_channels=8,
        approximator_hidden_dim=32,
        approximator_layers=1,
    )
    return kind(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=tiny_vae(scaling_factor=1.5, shift_factor=0.1),
        text_encoder=None,
        tokenizer=None,
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


def _chroma_prompts(seed: int, steps: int, guidance: float) -> Arguments:
    arguments = _prompts(seed, steps, guidance)
    return {name: value.bool() if name.endswith("mask") else value for name, value in arguments.items()}


def _image_to_image(seed: int, steps: int, guidance: float) -> Arguments:
    # Half the strength is half the steps.
    return _chroma_prompts(seed, 2 * steps, guidance) | {"image": image(seed), "strength": 0.5}


FAMILIES = [
    Family(
        name="AuraFlowPipeline",
        family="AuraFlow",
        build=build_seeded(_auraflow),
        request=_prompts,
        output_type="pt",
        doubled={"num_images_per_prompt": 2},
    ),
    Family(
        name="ChromaPipeline",
        family="Chroma",
        build=build_seeded(lambda: _chroma(ChromaPipeline)),
        request=_chroma_prompts,
        output_type="pt",
        doubled=of_two_prompts(_chroma_prompts),
    ),
    Family(
        name="ChromaImg2ImgPipeline",
        family="Chroma",
        build=build_seeded(lambda: _chroma(ChromaImg2ImgPipeline)),
        request=_image_to_image,
        output_type="pt",
        doubled=of_two_prompts(_image_to_image),
    ),
]
