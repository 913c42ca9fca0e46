# SPDX-License-Identifier: Apache-2.0
"""Tiny pipelines of families whose latents are images: CogView4, GLM-Image, ErnieImage, PRX and Bria Fibo 2."""

from typing import Any

import diffusers
import torch

from support.families.images.flux2 import vae as flux2_vae
from support.families.rig.family import tiny_vae
from support.families.rig.tables import asking, assemble, dynamic_flow, entry, more, noise, ones, padded, pixels, shifted_vae, texts

# Pixels. The VAE halves them and a patch has 2 x 2: 16 tokens.
SIDE = 16
TEXT_TOKENS = 6
STATISTICS = {"latents_mean": [0.1] * 4, "latents_std": [1.3] * 4}
SHAPE = {
    "patch_size": 2, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2, "text_embed_dim": 16,
    "time_embed_dim": 8, "condition_dim": 4,
}  # fmt: skip


def cogview4(kind: str) -> Any:
    """Sizes and crops as rows of numbers; two calls a step."""
    in_channels = 8 if "Control" in kind else 4
    transformer = diffusers.CogView4Transformer2DModel(
        in_channels=in_channels, pos_embed_max_size=16, sample_size=16, rope_axes_dim=(8, 8), **SHAPE
    )
    return assemble(kind, vae=shifted_vae(), transformer=transformer, scheduler=dynamic_flow())


def glm_image(kind: str) -> Any:
    """An image's tokens, made by a language model, are given; a cache for reference images is always passed."""
    transformer = diffusers.GlmImageTransformer2DModel(in_channels=4, prior_vq_quantizer_codebook_size=32, **SHAPE)
    return assemble(kind, vae=tiny_vae(**STATISTICS), transformer=transformer, scheduler=dynamic_flow())


def ernie(kind: str) -> Any:
    """Texts of any length, padded by the pipeline; both prompts in one call."""
    transformer = diffusers.ErnieImageTransformer2DModel(
        hidden_size=32, num_attention_heads=2, num_layers=2, ffn_hidden_size=32, in_channels=16, out_channels=16, text_in_dim=16,
        rope_axes_dim=(8, 4, 4),
    )  # fmt: skip
    return assemble(kind, transformer=transformer, vae=flux2_vae(), scheduler=diffusers.FlowMatchEulerDiscreteScheduler())


def prx(kind: str) -> Any:
    """A time for the whole call, both prompts in one call."""
    transformer = diffusers.PRXTransformer2DModel(
        in_channels=4, patch_size=2, context_in_dim=16, hidden_size=32, mlp_ratio=2.0, num_heads=2, depth=2, axes_dim=[8, 8]
    )
    return assemble(kind, transformer=transformer, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=shifted_vae())


def fibo2(kind: str) -> Any:
    """Text squeezed into as many tokens as its length says."""
    transformer = diffusers.BriaFibo2Transformer2DModel(
        in_channels=4, patch_size=2, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, cap_feat_dim=16, injection_layer_ids=(1,),
        perceiver_num_layers=1, min_num_gist_tokens=2, max_num_gist_tokens=8, gist_step=2, gist_min_text_len=2, gist_max_text_len=8,
        axes_dims=(8, 4, 4), axes_lens=(64, 32, 32),
    )  # fmt: skip
    return assemble(kind, transformer=transformer, scheduler=dynamic_flow(), vae=flux2_vae())


def _prior(seed: int) -> torch.Tensor:
    return torch.randint(0, 32, (1, 16), generator=torch.Generator().manual_seed(seed))


TEXT_TO_IMAGE = asking(SIDE, **texts(apart=200, prompt_embeds=(1, TEXT_TOKENS, 16)))
CONTROL = more(TEXT_TO_IMAGE, control_image=pixels(SIDE))
# The tokens of the image beside the prompt.
WITH_PRIOR = more(TEXT_TO_IMAGE, prior_token_ids=_prior)
# Prompts as a list of texts, the negative one shorter.
LISTED = asking(64, prompt_embeds=[noise(TEXT_TOKENS, 16)], negative_prompt_embeds=[noise(TEXT_TOKENS - 2, 16, at=200)])
MASKS = {
    "prompt_attention_mask": padded(TEXT_TOKENS),
    "negative_prompt_attention_mask": ones(1, TEXT_TOKENS, dtype=torch.bool),
}
MASKED = more(TEXT_TO_IMAGE, **MASKS, use_resolution_binning=False)
# Text of two layers of the encoder.
BUNDLED = asking(64, **texts(apart=200, prompt_embeds=(1, 2, TEXT_TOKENS, 16)), prompt_embeds_mask=padded(TEXT_TOKENS))
EDIT = more(BUNDLED, image=[pixels(64)])

FAMILIES = [
    entry("CogView4Pipeline", "CogView4", cogview4, TEXT_TO_IMAGE),
    entry("CogView4ControlPipeline", "CogView4", cogview4, CONTROL),
    entry("GlmImagePipeline", "GLM-Image", glm_image, WITH_PRIOR),
    entry("ErnieImagePipeline", "Ernie Image", ernie, LISTED),
    # PRX has a time for one image only, and fails at two.
    entry("PRXPipeline", "PRX", prx, MASKED, doubled=None),
    entry("BriaFibo2Pipeline", "Bria Fibo 2", fibo2, BUNDLED),
    entry("BriaFibo2Pipeline (edit)", "Bria Fibo 2", fibo2, EDIT),
]
