# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion XL and Kolors: a U-Net with pooled prompts and image sizes beside the prompt's tokens."""

from typing import Any

from diffusers import (
    ControlNetModel,
    EulerDiscreteScheduler,
    KolorsPipeline,
    StableDiffusionXLControlNetPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLInpaintPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)

from support.families.rig.family import Arguments, Family, build_seeded, image, mask, seeded, tiny_vae
from support.families.rig.two_rows import of_two_prompts

TWO_IMAGES = {"num_images_per_prompt": 2}
SIZES = {
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "in_channels": 4,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "attention_head_dim": (2, 4),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "transformer_layers_per_block": (1, 1),
    # Six numbers of eight channels each beside the pooled prompt.
    "projection_class_embeddings_input_dim": 32 + 48,
    "cross_attention_dim": 32,
    "norm_num_groups": 8,
}
NO_TEXT: dict[str, None] = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))


def tiny_unet(**config: Any) -> UNet2DConditionModel:
    """A U-Net of two resolutions."""
    return UNet2DConditionModel(
        **SIZES | {"sample_size": 16, "out_channels": 4, "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")} | config
    )


def _pipeline(kind: Any, **parts: Any) -> Any:
    return kind(**NO_TEXT, vae=tiny_vae(), unet=tiny_unet(), scheduler=EulerDiscreteScheduler(), add_watermarker=False, **parts)


def _kolors() -> Any:
    return KolorsPipeline(
        vae=tiny_vae(),
        text_encoder=None,
        tokenizer=None,
        unet=tiny_unet(encoder_hid_dim=24, encoder_hid_dim_type="text_proj"),
        scheduler=EulerDiscreteScheduler(),
    )


def _prompts(seed: int, steps: int, guidance: float) -> Arguments:
    return {
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "prompt_embeds": seeded(seed, 1, 8, 32),
        "negative_prompt_embeds": seeded(seed + 100, 1, 8, 32),
        "pooled_prompt_embeds": seeded(seed + 200, 1, 32),
        "negative_pooled_prompt_embeds": seeded(seed + 300, 1, 32),
        # Other sizes for each request: they are rows.
        "original_size": (32 + seed, 32),
        "target_size": (32, 32),
    }


def _text_to_image(seed: int, steps: int, guidance: float) -> Arguments:
    return _prompts(seed, steps, guidance) | {"height": 32, "width": 32}


def _image_to_image(seed: int, steps: int, guidance: float) -> Arguments:
    # Half the strength is half the steps.
    return _prompts(seed, 2 * steps, guidance) | {"image": image(seed), "strength": 0.5}


def _inpaint(seed: int, steps: int, guidance: float) -> Arguments:
    return _text_to_image(seed, steps, guidance) | {"image": image(seed), "mask_image": mask(seed), "strength": 1.0}


def _controlled(seed: int, steps: int, guidance: float) -> Arguments:
    return _prompts(seed, steps, guidance) | {"image": image(seed)}


def _kolors_prompts(seed: int, steps: int, guidance: float) -> Arguments:
    wide = {"prompt_embeds": seeded(seed, 1, 8, 24), "negative_prompt_embeds": seeded(seed + 100, 1, 8, 24)}
    return _text_to_image(seed, steps, guidance) | wide


FAMILIES = [
    Family(
        name="StableDiffusionXLPipeline",
        family="SDXL",
        build=build_seeded(lambda: _pipeline(StableDiffusionXLPipeline)),
        request=_text_to_image,
        output_type="pt",
        doubled=TWO_IMAGES,
    ),
    Family(
        name="StableDiffusionXLImg2ImgPipeline",
        family="SDXL",
        build=build_seeded(lambda: _pipeline(StableDiffusionXLImg2ImgPipeline)),
        request=_image_to_image,
        output_type="pt",
        doubled=TWO_IMAGES,
    ),
    Family(
        name="StableDiffusionXLInpaintPipeline",
        family="SDXL",
        build=build_seeded(lambda: _pipeline(StableDiffusionXLInpaintPipeline)),
        request=_inpaint,
        output_type="pt",
        doubled=TWO_IMAGES,
    ),
    Family(
        name="StableDiffusionXLControlNetPipeline",
        family="SDXL",
        build=build_seeded(
            lambda: _pipeline(
                StableDiffusionXLControlNetPipeline,
                controlnet=ControlNetModel(**SIZES, conditioning_embedding_out_channels=(2, 2)),
            )
        ),
        request=_controlled,
        output_type="pt",
        doubled=TWO_IMAGES,
    ),
    Family(
        name="KolorsPipeline",
        family="Kolors",
        build=build_seeded(_kolors),
        request=_kolors_prompts,
        output_type="pt",
        doubled=of_two_prompts(_kolors_prompts),
    ),
]
