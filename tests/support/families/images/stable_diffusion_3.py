# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion 3: a transformer over image and text tokens together, guidance as twice the rows."""

from typing import Any

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SD3ControlNetModel,
    SD3Transformer2DModel,
    StableDiffusion3ControlNetPipeline,
    StableDiffusion3Img2ImgPipeline,
    StableDiffusion3InpaintPipeline,
    StableDiffusion3Pipeline,
)

from support.families.rig.family import Arguments, Family, build_seeded, image, mask, seeded, tiny_vae
from support.families.rig.two_rows import of_two_prompts

WIDE = 16  # channels: inpainting knows its two kinds of model by 16 and 33
SIZES = {
    "sample_size": 16,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "caption_projection_dim": 16,
    "pooled_projection_dim": 32,
    "pos_embed_max_size": 16,
}


def _pipeline(kind: Any, channels: int = 4, **parts: Any) -> Any:
    return kind(
        **dict.fromkeys(("text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3")),
        transformer=SD3Transformer2DModel(**SIZES | {"in_channels": channels, "out_channels": channels}, num_layers=2),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=tiny_vae(channels, scaling_factor=1.5, shift_factor=0.1),
        **parts,
    )


def _prompts(seed: int, steps: int, guidance: float) -> Arguments:
    return {
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "prompt_embeds": seeded(seed, 1, 8, 32),
        "negative_prompt_embeds": seeded(seed + 100, 1, 8, 32),
        "pooled_prompt_embeds": seeded(seed + 200, 1, 32),
        "negative_pooled_prompt_embeds": seeded(seed + 300, 1, 32),
        "height": 32,
        "width": 32,
    }


def _image_to_image(seed: int, steps: int, guidance: float) -> Arguments:
    # Half the strength is half the steps.
    return _prompts(seed, 2 * steps, guidance) | {"image": image(seed), "strength": 0.5}


def _inpaint(seed: int, steps: int, guidance: float) -> Arguments:
    return _prompts(seed, steps, guidance) | {"image": image(seed), "mask_image": mask(seed), "strength": 1.0}


def _controlled(seed: int, steps: int, guidance: float) -> Arguments:
    return _prompts(seed, steps, guidance) | {"control_image": image(seed)}


# Embeddings that are given are not repeated for a number of images.
TWO_PROMPTS = of_two_prompts(_prompts)

FAMILIES = [
    Family(
        name="StableDiffusion3Pipeline",
        family="SD 3",
        build=build_seeded(lambda: _pipeline(StableDiffusion3Pipeline)),
        request=_prompts,
        output_type="pt",
        doubled=TWO_PROMPTS,
    ),
    Family(
        name="StableDiffusion3Img2ImgPipeline",
        family="SD 3",
        build=build_seeded(lambda: _pipeline(StableDiffusion3Img2ImgPipeline)),
        request=_image_to_image,
        output_type="pt",
        doubled=TWO_PROMPTS,
    ),
    Family(
        name="StableDiffusion3InpaintPipeline",
        family="SD 3",
        build=build_seeded(lambda: _pipeline(StableDiffusion3InpaintPipeline, WIDE)),
        request=_inpaint,
        output_type="pt",
        doubled=TWO_PROMPTS,
    ),
    Family(
        name="StableDiffusion3ControlNetPipeline",
        family="SD 3",
        build=build_seeded(lambda: _pipeline(StableDiffusion3ControlNetPipeline, controlnet=SD3ControlNetModel(**SIZES, num_layers=1))),
        request=_controlled,
        output_type="pt",
        doubled=TWO_PROMPTS,
    ),
]
