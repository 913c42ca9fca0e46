# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion 1.5: a U-Net whose time step arrives without a batch dimension, guidance as twice the rows."""

from typing import Any

from diffusers import (
    ControlNetModel,
    DDIMScheduler,
    LatentConsistencyModelPipeline,
    LCMScheduler,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)

from support.families.rig.family import Arguments, Family, build_seeded, image, mask, seeded, tiny_vae

TWO_IMAGES = {"num_images_per_prompt": 2}


def tiny_unet(channels: int = 4, **config: Any) -> UNet2DConditionModel:
    """A U-Net of two resolutions with cross-attention of width 32 in the lower one."""
    sizes = {
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "sample_size": 16,
        "out_channels": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 32,
        "attention_head_dim": 4,
        "norm_num_groups": 8,
    }
    return UNet2DConditionModel(**sizes | config, in_channels=channels)


def tiny_controlnet() -> ControlNetModel:
    """A ControlNet that fits `tiny_unet`."""
    return ControlNetModel(
        block_out_channels=(16, 32),
        layers_per_block=1,
        in_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=4,
        conditioning_embedding_out_channels=(2, 2),
        norm_num_groups=8,
    )


def pipeline(kind: Any, **parts: Any) -> Any:
    """A pipeline of a class that takes the components of Stable Diffusion 1.5, and some more."""
    parts = {"unet": tiny_unet(), "scheduler": DDIMScheduler(clip_sample=False)} | parts
    return kind(
        vae=tiny_vae(),
        text_encoder=None,
        tokenizer=None,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
        **parts,
    )


def prompts(seed: int, steps: int, guidance: float) -> Arguments:
    """What all of them are asked."""
    return {
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "prompt_embeds": seeded(seed, 1, 8, 32),
        "negative_prompt_embeds": seeded(seed + 100, 1, 8, 32),
    }


def text_to_image(seed: int, steps: int, guidance: float) -> Arguments:
    """An image of 16 x 16 latents."""
    return prompts(seed, steps, guidance) | {"height": 32, "width": 32}


def _image_to_image(seed: int, steps: int, guidance: float) -> Arguments:
    # Half the strength is half the steps.
    return prompts(seed, 2 * steps, guidance) | {"image": image(seed), "strength": 0.5}


def _inpaint(seed: int, steps: int, guidance: float) -> Arguments:
    return text_to_image(seed, steps, guidance) | {"image": image(seed), "mask_image": mask(seed)}


def _few_steps(seed: int, steps: int, guidance: float) -> Arguments:
    arguments = text_to_image(seed, steps, guidance)
    del arguments["negative_prompt_embeds"]
    return arguments


def _controlled(seed: int, steps: int, guidance: float) -> Arguments:
    return prompts(seed, steps, guidance) | {"image": image(seed)}


def _latent_consistency() -> Any:
    # Guidance is an embedding of its own.
    unet = tiny_unet(time_cond_proj_dim=32)
    return pipeline(LatentConsistencyModelPipeline, unet=unet, scheduler=LCMScheduler(clip_sample=False))


FAMILIES = [
    Family(
        name="StableDiffusionPipeline",
        family="SD 1.5",
        build=build_seeded(lambda: pipeline(StableDiffusionPipeline)),
        request=text_to_image,
        output_type="pt",
        doubled=TWO_IMAGES,
    ),
    Family(
        name="StableDiffusionImg2ImgPipeline",
        family="SD 1.5",
        build=build_seeded(lambda: pipeline(StableDiffusionImg2ImgPipeline)),
        request=_image_to_image,
        output_type="pt",
        doubled=TWO_IMAGES,
    ),
    Family(
        name="StableDiffusionInpaintPipeline",
        family="SD 1.5",
        build=build_seeded(lambda: pipeline(StableDiffusionInpaintPipeline)),
        request=_inpaint,
        output_type="pt",
        doubled=TWO_IMAGES,
    ),
    Family(
        name="StableDiffusionInpaintPipeline (nine channels)",
        family="SD 1.5",
        build=build_seeded(lambda: pipeline(StableDiffusionInpaintPipeline, unet=tiny_unet(9))),
        request=_inpaint,
        doubled=TWO_IMAGES,
    ),
    Family(
        name="StableDiffusionControlNetPipeline",
        family="SD 1.5",
        build=build_seeded(lambda: pipeline(StableDiffusionControlNetPipeline, controlnet=tiny_controlnet())),
        request=_controlled,
        output_type="pt",
        doubled=TWO_IMAGES,
    ),
    Family(
        name="LatentConsistencyModelPipeline",
        family="Latent consistency",
        build=build_seeded(_latent_consistency),
        request=_few_steps,
        output_type="pt",
        doubled=TWO_IMAGES,
    ),
]
