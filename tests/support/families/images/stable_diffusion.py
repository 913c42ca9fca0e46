# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion 1.5: a U-Net whose time step arrives without a batch dimension, guidance as twice the rows."""

from typing import Any

from diffusers import ControlNetModel, DDIMScheduler, LCMScheduler, UNet2DConditionModel

from support.families.rig.family import tiny_vae
from support.families.rig.tables import asking, assemble, entry, halfway, more, painted, pixels, texts

SHAPE = {
    "block_out_channels": (16, 32), "layers_per_block": 1, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "cross_attention_dim": 32, "attention_head_dim": 4, "norm_num_groups": 8,
}  # fmt: skip


def tiny_unet(channels: int = 4, **config: Any) -> UNet2DConditionModel:
    """A U-Net of two resolutions with cross-attention of width 32 in the lower one."""
    sizes = SHAPE | {"sample_size": 16, "out_channels": 4, "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}
    return UNet2DConditionModel(**sizes | config, in_channels=channels)


def tiny_controlnet() -> ControlNetModel:
    """A ControlNet that fits `tiny_unet`."""
    return ControlNetModel(in_channels=4, conditioning_embedding_out_channels=(2, 2), **SHAPE)


def pipeline(kind: Any, **parts: Any) -> Any:
    """A pipeline of a class that takes the components of Stable Diffusion 1.5, and some more."""
    parts = {"unet": tiny_unet(), "scheduler": DDIMScheduler(clip_sample=False)} | parts
    return assemble(kind, vae=tiny_vae(), requires_safety_checker=False, **parts)


def _nine_channels(kind: str) -> Any:
    return pipeline(kind, unet=tiny_unet(9))


def controlnet(kind: str) -> Any:
    """A pipeline with a ControlNet."""
    return pipeline(kind, controlnet=tiny_controlnet())


def _latent_consistency(kind: str) -> Any:
    # Guidance is an embedding of its own.
    return pipeline(kind, unet=tiny_unet(time_cond_proj_dim=32), scheduler=LCMScheduler(clip_sample=False))


EMBEDDINGS = texts(prompt_embeds=(1, 8, 32))
# All of them are asked with these.
PROMPTS = asking(**EMBEDDINGS)
# An image of 16 x 16 latents.
TEXT_TO_IMAGE = asking(32, **EMBEDDINGS)
IMAGE_TO_IMAGE = halfway(PROMPTS, image=pixels())
INPAINT = more(TEXT_TO_IMAGE, image=pixels(), mask_image=painted())
FEW_STEPS = more(TEXT_TO_IMAGE, without=("negative_prompt_embeds",))
CONTROLLED = more(PROMPTS, image=pixels())

FAMILIES = [
    entry("StableDiffusionPipeline", "SD 1.5", pipeline, TEXT_TO_IMAGE),
    entry("StableDiffusionImg2ImgPipeline", "SD 1.5", pipeline, IMAGE_TO_IMAGE),
    entry("StableDiffusionInpaintPipeline", "SD 1.5", pipeline, INPAINT),
    entry("StableDiffusionInpaintPipeline (nine channels)", "SD 1.5", _nine_channels, INPAINT, output_type="latent"),
    entry("StableDiffusionControlNetPipeline", "SD 1.5", controlnet, CONTROLLED),
    entry("LatentConsistencyModelPipeline", "Latent consistency", _latent_consistency, FEW_STEPS),
]
