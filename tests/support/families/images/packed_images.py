# SPDX-License-Identifier: Apache-2.0
"""Tiny pipelines of families with a sequence of packed latents: Bria, Ovis-Image, Krea 2, NucleusMoE and HunyuanImage."""

from typing import Any

import diffusers
import torch
from diffusers.guiders import AdaptiveProjectedMixGuidance

from support.families.images.qwen import small_vae
from support.families.rig.family import dynamic_flow, flow
from support.families.rig.tables import asking, assemble, entry, more, noise, on, ones, padded, texts

# Pixels. The VAE halves them and the pipelines pack 2 x 2: 16 tokens.
SIDE = 16
TEXT_TOKENS = 6
HEADS = {"attention_head_dim": 16, "num_attention_heads": 2}
ROTARY = {"axes_dims_rope": (8, 4, 4)}


# Positive and negative prompt in one call: two rows.
bria = on(
    "BriaTransformer2DModel", scheduler=dynamic_flow,
    in_channels=16, num_layers=1, num_single_layers=1, joint_attention_dim=16, axes_dims_rope=[0, 8, 8], **HEADS,
)  # fmt: skip
# Two calls a step; tables of positions without a batch dimension.
ovis = on(
    "OvisImageTransformer2DModel", scheduler=dynamic_flow,
    in_channels=16, out_channels=16, num_layers=1, num_single_layers=1, joint_attention_dim=16, **HEADS, **ROTARY,
)  # fmt: skip


def krea2(kind: str) -> Any:
    """Text of several layers of the encoder."""
    transformer = diffusers.Krea2Transformer2DModel(
        in_channels=16, num_layers=1, num_key_value_heads=1, intermediate_size=32, timestep_embed_dim=16, text_hidden_dim=16,
        num_text_layers=2, text_num_attention_heads=2, text_num_key_value_heads=1, text_intermediate_size=32,
        num_layerwise_text_blocks=1, num_refiner_text_blocks=1, **HEADS, **ROTARY,
    )  # fmt: skip
    return assemble(kind, scheduler=dynamic_flow(), vae=small_vae(), transformer=transformer, text_encoder_select_layers=(0, 1))


def nucleus(kind: str) -> Any:
    """A mixture of experts that choose tokens, each row's by themselves."""
    transformer = diffusers.NucleusMoEImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=5, joint_attention_dim=16, num_experts=4, moe_intermediate_dim=16,
        capacity_factors=1.0, mlp_ratio=8.0, **HEADS, **ROTARY,
    )  # fmt: skip
    for name, parameter in transformer.named_parameters():
        if "experts" in name:  # made by torch.empty
            torch.nn.init.normal_(parameter, std=0.2)
    return assemble(kind, transformer=transformer, scheduler=dynamic_flow(), vae=small_vae())


def hunyuan_image(kind: str, *, guided: bool = False) -> Any:
    """Two texts and their masks; distilled, or with a guider that keeps a momentum from step to step."""
    transformer = diffusers.HunyuanImageTransformer2DModel(
        in_channels=4, out_channels=4, num_layers=1, num_single_layers=1, num_refiner_layers=1, guidance_embeds=not guided,
        text_embed_dim=16, text_embed_2_dim=16, rope_axes_dim=(8, 8), **HEADS,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLHunyuanImage(
        in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(32, 32), layers_per_block=1, spatial_compression_ratio=2,
        sample_size=SIDE, scaling_factor=1.5,
    )  # fmt: skip
    guider = AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=1) if guided else None
    return assemble(kind, scheduler=flow(), vae=vae, transformer=transformer, guider=guider)


EMBEDDINGS = texts(apart=200, prompt_embeds=(1, TEXT_TOKENS, 16))
VALID = ones(1, TEXT_TOKENS, dtype=torch.bool)
TEXT_TO_IMAGE = asking(SIDE, **EMBEDDINGS)
# Ovis has an empty negative prompt by default, and takes either words or embeddings.
WORDLESS = more(TEXT_TO_IMAGE, negative_prompt=None)
MASKED = more(TEXT_TO_IMAGE, prompt_embeds_mask=padded(TEXT_TOKENS), negative_prompt_embeds_mask=VALID)
# Text of two layers.
LAYERED = more(MASKED, **texts(apart=200, prompt_embeds=(1, TEXT_TOKENS, 2, 16)))
# A prompt and the words to be written in the image. Guidance is the model's own, or the guider's.
WRITTEN = {"prompt_embeds_2": noise(1, TEXT_TOKENS, 16, at=100), "prompt_embeds_mask_2": VALID}
NOT_WRITTEN = {"negative_prompt_embeds_2": noise(1, TEXT_TOKENS, 16, at=300), "negative_prompt_embeds_mask_2": VALID}
GUIDED_TEXTS = more(MASKED, **WRITTEN, **NOT_WRITTEN, without=("guidance_scale",))
POSITIVE = {"prompt_embeds": EMBEDDINGS["prompt_embeds"], "prompt_embeds_mask": padded(TEXT_TOKENS)}
TWO_TEXTS = asking(SIDE, scale="distilled_guidance_scale", **POSITIVE, **WRITTEN)

FAMILIES = [
    entry("BriaPipeline", "Bria", bria, TEXT_TO_IMAGE, repeats=False),
    entry("OvisImagePipeline", "Ovis-Image", ovis, WORDLESS),
    entry("Krea2Pipeline", "Krea 2", krea2, LAYERED),
    entry("NucleusMoEImagePipeline", "NucleusMoE", nucleus, MASKED),
    entry("HunyuanImagePipeline", "HunyuanImage", hunyuan_image, TWO_TEXTS),
    entry("HunyuanImagePipeline (guider)", "HunyuanImage", lambda kind: hunyuan_image(kind, guided=True), GUIDED_TEXTS),
]
