# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion XL and Kolors: a U-Net with pooled prompts and image sizes beside the prompt's tokens."""

from typing import Any

from diffusers import ControlNetModel, EulerDiscreteScheduler, UNet2DConditionModel

from support.families.rig.family import tiny_vae
from support.families.rig.tables import asking, assemble, entry, halfway, more, painted, pixels, texts

SIZES = {
    "block_out_channels": (16, 32), "layers_per_block": 1, "in_channels": 4, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "attention_head_dim": (2, 4), "use_linear_projection": True, "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
    "transformer_layers_per_block": (1, 1), "cross_attention_dim": 32, "norm_num_groups": 8,
    # Six numbers of eight channels each beside the pooled prompt.
    "projection_class_embeddings_input_dim": 32 + 48,
}  # fmt: skip


def tiny_unet(**config: Any) -> UNet2DConditionModel:
    """A U-Net of two resolutions."""
    sizes = SIZES | {"sample_size": 16, "out_channels": 4, "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}
    return UNet2DConditionModel(**sizes | config)


def _pipeline(kind: Any, **parts: Any) -> Any:
    vae, unet = tiny_vae(), tiny_unet()
    return assemble(kind, vae=vae, unet=unet, scheduler=EulerDiscreteScheduler(), add_watermarker=False, **parts)


def _controlnet(kind: str) -> Any:
    return _pipeline(kind, controlnet=ControlNetModel(**SIZES, conditioning_embedding_out_channels=(2, 2)))


def _kolors(kind: str) -> Any:
    vae, unet = tiny_vae(), tiny_unet(encoder_hid_dim=24, encoder_hid_dim_type="text_proj")
    return assemble(kind, vae=vae, unet=unet, scheduler=EulerDiscreteScheduler())


PROMPTS = asking(
    **texts(prompt_embeds=(1, 8, 32), pooled_prompt_embeds=(1, 32)),
    # Other sizes for each request: they are rows.
    original_size=lambda seed: (32 + seed, 32),
    target_size=(32, 32),
)
TEXT_TO_IMAGE = more(PROMPTS, height=32, width=32)
IMAGE_TO_IMAGE = halfway(PROMPTS, image=pixels())
INPAINT = more(TEXT_TO_IMAGE, image=pixels(), mask_image=painted(), strength=1.0)
CONTROLLED = more(PROMPTS, image=pixels())
KOLORS_PROMPTS = more(TEXT_TO_IMAGE, **texts(prompt_embeds=(1, 8, 24)))

FAMILIES = [
    entry("StableDiffusionXLPipeline", "SDXL", _pipeline, TEXT_TO_IMAGE),
    entry("StableDiffusionXLImg2ImgPipeline", "SDXL", _pipeline, IMAGE_TO_IMAGE),
    entry("StableDiffusionXLInpaintPipeline", "SDXL", _pipeline, INPAINT),
    entry("StableDiffusionXLControlNetPipeline", "SDXL", _controlnet, CONTROLLED),
    entry("KolorsPipeline", "Kolors", _kolors, KOLORS_PROMPTS, repeats=False),
]
