# SPDX-License-Identifier: Apache-2.0
"""Tiny transformers whose prompts are embeddings with masks: AuraFlow, Chroma, both Lumina, PixArt and Sana.

Chroma and Lumina 2 call twice for guidance, and the time of Lumina 2 runs from noise at 0 to the image at 1. Sana Sprint has
embedded guidance and a scheduler that adds noise.
"""

from typing import Any

import diffusers
import torch

from support.families.rig.family import flow, plain_ddim, shifted_vae, tiny_vae
from support.families.rig.tables import asking, assemble, entry, halfway, masks, more, on, pixels, texts

TOKENS = 8
LUMINA = {
    "sample_size": 16, "patch_size": 2, "in_channels": 4, "hidden_size": 24, "num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 16,
}  # fmt: skip


# Image and text tokens together.
auraflow = on(
    "AuraFlowTransformer2DModel", vae=tiny_vae, sample_size=32, patch_size=2, in_channels=4, out_channels=4, num_mmdit_layers=1,
    num_single_dit_layers=1, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=32, caption_projection_dim=16,
    pos_embed_max_size=256,
)  # fmt: skip
# Flux without its pooled prompt.
chroma = on(
    "ChromaTransformer2DModel", patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
    num_attention_heads=2, joint_attention_dim=32, axes_dims_rope=(4, 4, 8), approximator_num_channels=8, approximator_hidden_dim=32,
    approximator_layers=1,
)  # fmt: skip
# Two calls for guidance.
lumina2 = on(
    "Lumina2Transformer2DModel", num_layers=1, num_refiner_layers=1, axes_dim_rope=(4, 2, 2), axes_lens=(32, 32, 32), cap_feat_dim=32,
    **LUMINA,
)  # fmt: skip


def lumina(kind: str) -> Any:
    """A single call for guidance."""
    transformer = diffusers.LuminaNextDiT2DModel(num_layers=2, learn_sigma=True, cross_attention_dim=32, **LUMINA)
    torch.nn.init.zeros_(transformer.pad_token)  # made by torch.empty
    return assemble(kind, transformer=transformer, scheduler=flow(), vae=shifted_vae())


def pixart(kind: str) -> Any:
    """Cross-attention; the larger sample size of Alpha has the sizes of the image as a condition."""
    alpha = "Alpha" in kind
    transformer = diffusers.PixArtTransformer2DModel(
        num_layers=2, patch_size=2, attention_head_dim=12, num_attention_heads=2, caption_channels=32, in_channels=4,
        cross_attention_dim=24, out_channels=8, norm_type="ada_norm_single", sample_size=128 if alpha else 8,
        use_additional_conditions=alpha,
    )  # fmt: skip
    return assemble(kind, transformer=transformer, scheduler=plain_ddim(), vae=tiny_vae())


def sana(kind: str) -> Any:
    """Linear attention, on a VAE that compresses deeply."""
    sprint = "Sprint" in kind
    transformer = diffusers.SanaTransformer2DModel(
        patch_size=1, in_channels=4, out_channels=4, num_layers=2, num_attention_heads=2, attention_head_dim=4,
        num_cross_attention_heads=2, cross_attention_head_dim=4, cross_attention_dim=8, caption_channels=32, sample_size=32,
        **({"guidance_embeds": True, "qk_norm": "rms_norm_across_heads"} if sprint else {}),
    )  # fmt: skip
    scheduler = diffusers.SCMScheduler() if sprint else flow()
    return assemble(kind, transformer=transformer, scheduler=scheduler, vae=_tiny_dc_vae())


def _tiny_dc_vae() -> Any:
    blocks = {"block_types": ("ResBlock", "EfficientViTBlock"), "block_out_channels": (8, 8), "qkv_multiscales": ((), (5,))}
    return diffusers.AutoencoderDC(
        in_channels=3, latent_channels=4, attention_head_dim=2, encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1),
        downsample_block_type="conv", upsample_block_type="interpolate", decoder_norm_types="rms_norm", decoder_act_fns="silu",
        **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in blocks.items()},
    )  # fmt: skip


PROMPTS = asking(32, **texts(prompt_embeds=(1, TOKENS, 32)), **masks(prompt_attention_mask=TOKENS))
CHROMA_PROMPTS = more(PROMPTS, **masks(torch.bool, prompt_attention_mask=TOKENS))
CHROMA_IMAGE = halfway(CHROMA_PROMPTS, image=pixels())
WORDLESS = more(PROMPTS, negative_prompt=None)
OF_ANY_SIZE = more(WORDLESS, use_resolution_binning=False)
NEGATIVE = ("negative_prompt", "negative_prompt_embeds", "negative_prompt_attention_mask")
# The step in between is defined for two steps only.
SPRINT = more(OF_ANY_SIZE, intermediate_timesteps=None, without=NEGATIVE)

FAMILIES = [
    entry("AuraFlowPipeline", "AuraFlow", auraflow, PROMPTS),
    entry("ChromaPipeline", "Chroma", chroma, CHROMA_PROMPTS, repeats=False),
    entry("ChromaImg2ImgPipeline", "Chroma", chroma, CHROMA_IMAGE, repeats=False),
    entry("LuminaPipeline", "Lumina", lumina, WORDLESS, repeats=False),
    entry("Lumina2Pipeline", "Lumina 2", lumina2, PROMPTS, repeats=False),
    entry("PixArtAlphaPipeline", "PixArt", pixart, OF_ANY_SIZE),
    entry("PixArtSigmaPipeline", "PixArt", pixart, OF_ANY_SIZE),
    entry("SanaPipeline", "Sana", sana, OF_ANY_SIZE),
    entry("SanaSprintPipeline", "Sana", sana, SPRINT),
]
