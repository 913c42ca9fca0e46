# SPDX-License-Identifier: Apache-2.0
"""Tiny transformers whose prompts are embeddings with masks: AuraFlow, Chroma, both Lumina, PixArt and Sana.

Chroma and Lumina 2 call twice for guidance, and the time of Lumina 2 runs from noise at 0 to the image at 1. Sana Sprint has
embedded guidance and a scheduler that adds noise.
"""

from functools import partial
from typing import Any

import torch

from support.families.rig.family import plain_ddim, tiny_vae
from support.families.rig.tables import asking, entry, halfway, masks, more, on, part, pixels, texts

TOKENS = 8
LUMINA = {"sample_size": 16, "patch_size": 2, "hidden_size": 24, "num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 16}

# Image and text tokens together.
auraflow = on(
    "AuraFlowTransformer2DModel", vae=tiny_vae, sample_size=32, patch_size=2, num_mmdit_layers=1, num_single_dit_layers=1,
    attention_head_dim=8, joint_attention_dim=32, caption_projection_dim=16, pos_embed_max_size=256,
)  # fmt: skip
# Flux without its pooled prompt.
chroma = on(
    "ChromaTransformer2DModel", patch_size=1, in_channels=16, out_channels=None, num_layers=1, joint_attention_dim=32,
    axes_dims_rope=(4, 4, 8), approximator_num_channels=8, approximator_hidden_dim=32, approximator_layers=1,
)  # fmt: skip
# Two calls for guidance.
lumina2 = on(
    "Lumina2Transformer2DModel", out_channels=None, num_layers=1, axes_dim_rope=(4, 2, 2), axes_lens=(32, 32, 32), cap_feat_dim=32, **LUMINA
)
# A single call for guidance.
on_lumina = on("LuminaNextDiT2DModel", num_layers=2, learn_sigma=True, cross_attention_dim=32, **LUMINA)
# Cross-attention; the larger sample size of Alpha has the sizes of the image as a condition.
on_pixart = partial(
    on, "PixArtTransformer2DModel", vae=tiny_vae, scheduler=plain_ddim, num_layers=2, patch_size=2, attention_head_dim=12,
    caption_channels=32, cross_attention_dim=24, out_channels=8, norm_type="ada_norm_single",
)  # fmt: skip
alpha = on_pixart(sample_size=128, use_additional_conditions=True)
sigma = on_pixart(sample_size=8, use_additional_conditions=False)
# A VAE that compresses deeply.
DC_BLOCKS = {"block_types": ("ResBlock", "EfficientViTBlock"), "block_out_channels": (8, 8), "qkv_multiscales": ((), (5,))}
dc_vae = part(
    "AutoencoderDC", in_channels=3, latent_channels=4, attention_head_dim=2, encoder_layers_per_block=(1, 1),
    decoder_layers_per_block=(1, 1), downsample_block_type="conv", upsample_block_type="interpolate", decoder_norm_types="rms_norm",
    decoder_act_fns="silu", **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in DC_BLOCKS.items()},
)  # fmt: skip
# Linear attention.
on_sana = partial(
    on, "SanaTransformer2DModel", vae=dc_vae, patch_size=1, num_layers=2, attention_head_dim=4, num_cross_attention_heads=2,
    cross_attention_head_dim=4, cross_attention_dim=8, caption_channels=32, sample_size=32,
)  # fmt: skip
sprint = on_sana(scheduler=part("SCMScheduler"), guidance_embeds=True, qk_norm="rms_norm_across_heads")


def lumina(kind: str) -> Any:
    """Build a Lumina pipeline, and set its padding token to zeros, since diffusers leaves it uninitialised."""
    pipeline = on_lumina(kind)
    torch.nn.init.zeros_(pipeline.transformer.pad_token)
    return pipeline


PROMPTS = asking(32, **texts(prompt_embeds=(1, TOKENS, 32)), **masks(prompt_attention_mask=TOKENS))
CHROMA_PROMPTS = more(PROMPTS, **masks(torch.bool, prompt_attention_mask=TOKENS))
CHROMA_IMAGE = halfway(CHROMA_PROMPTS, image=pixels())
WORDLESS = more(PROMPTS, negative_prompt=None)
OF_ANY_SIZE = more(WORDLESS, use_resolution_binning=False)
NEGATIVE = ("negative_prompt", "negative_prompt_embeds", "negative_prompt_attention_mask")
# The intermediate timestep is defined for two steps only.
SPRINT = more(OF_ANY_SIZE, intermediate_timesteps=None, without=NEGATIVE)

FAMILIES = [
    entry("AuraFlowPipeline", "AuraFlow", auraflow, PROMPTS),
    entry("ChromaPipeline", "Chroma", chroma, CHROMA_PROMPTS, repeats=False),
    entry("ChromaImg2ImgPipeline", "Chroma", chroma, CHROMA_IMAGE, repeats=False),
    entry("LuminaPipeline", "Lumina", lumina, WORDLESS, repeats=False),
    entry("Lumina2Pipeline", "Lumina 2", lumina2, PROMPTS, repeats=False),
    entry("PixArtAlphaPipeline", "PixArt", alpha, OF_ANY_SIZE),
    entry("PixArtSigmaPipeline", "PixArt", sigma, OF_ANY_SIZE),
    entry("SanaPipeline", "Sana", on_sana(), OF_ANY_SIZE),
    entry("SanaSprintPipeline", "Sana", sprint, SPRINT),
]
