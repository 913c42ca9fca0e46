# SPDX-License-Identifier: Apache-2.0
"""PixArt and Sana: cross-attention transformers with masked prompts; Sana Sprint with embedded guidance and a scheduler that adds noise."""

from typing import Any

import diffusers

from support.families.rig.family import tiny_vae
from support.families.rig.tables import asking, assemble, entry, masks, more, texts

TOKENS = 8


def _pixart(kind: str) -> Any:
    # The larger sample size has the sizes of the image as a condition.
    alpha = "Alpha" in kind
    transformer = diffusers.PixArtTransformer2DModel(
        num_layers=2, patch_size=2, attention_head_dim=12, num_attention_heads=2, caption_channels=32, in_channels=4,
        cross_attention_dim=24, out_channels=8, norm_type="ada_norm_single", sample_size=128 if alpha else 8,
        use_additional_conditions=alpha,
    )  # fmt: skip
    return assemble(kind, transformer=transformer, scheduler=diffusers.DDIMScheduler(clip_sample=False), vae=tiny_vae())


def _tiny_dc_vae() -> Any:
    blocks = {"block_types": ("ResBlock", "EfficientViTBlock"), "block_out_channels": (8, 8), "qkv_multiscales": ((), (5,))}
    return diffusers.AutoencoderDC(
        in_channels=3, latent_channels=4, attention_head_dim=2, encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1),
        downsample_block_type="conv", upsample_block_type="interpolate", decoder_norm_types="rms_norm", decoder_act_fns="silu",
        **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in blocks.items()},
    )  # fmt: skip


def _sana(kind: str) -> Any:
    sprint = "Sprint" in kind
    transformer = diffusers.SanaTransformer2DModel(
        patch_size=1, in_channels=4, out_channels=4, num_layers=2, num_attention_heads=2, attention_head_dim=4,
        num_cross_attention_heads=2, cross_attention_head_dim=4, cross_attention_dim=8, caption_channels=32, sample_size=32,
        **({"guidance_embeds": True, "qk_norm": "rms_norm_across_heads"} if sprint else {}),
    )  # fmt: skip
    scheduler = diffusers.SCMScheduler() if sprint else diffusers.FlowMatchEulerDiscreteScheduler()
    return assemble(kind, transformer=transformer, scheduler=scheduler, vae=_tiny_dc_vae())


EMBEDDINGS = texts(prompt_embeds=(1, TOKENS, 32)) | masks(prompt_attention_mask=TOKENS)
NEGATIVE = ("negative_prompt", "negative_prompt_embeds", "negative_prompt_attention_mask")
GUIDED = asking(32, negative_prompt=None, use_resolution_binning=False, **EMBEDDINGS)
# The step in between is defined for two steps only.
SPRINT = more(GUIDED, intermediate_timesteps=None, without=NEGATIVE)

FAMILIES = [
    entry("PixArtAlphaPipeline", "PixArt", _pixart, GUIDED),
    entry("PixArtSigmaPipeline", "PixArt", _pixart, GUIDED),
    entry("SanaPipeline", "Sana", _sana, GUIDED),
    entry("SanaSprintPipeline", "Sana", _sana, SPRINT),
]
