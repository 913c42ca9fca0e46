# SPDX-License-Identifier: Apache-2.0
"""Tiny pipelines of families whose latents are images: CogView4, GLM-Image, ErnieImage, PRX and Bria Fibo 2."""

from collections.abc import Callable
from typing import Any

import diffusers
import torch

from support.families.images.flux2 import vae as flux2_vae
from support.families.rig.family import Arguments, Family, build_seeded, image, seeded, tiny_vae

# Pixels. The VAE halves them and a patch has 2 x 2: 16 tokens.
SIDE = 16
TEXT_TOKENS = 6
STATISTICS = {"latents_mean": [0.1] * 4, "latents_std": [1.3] * 4}


def _flow() -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)


def cogview4(kind: str = "CogView4Pipeline", *, in_channels: int = 4) -> Any:
    """Sizes and crops as rows of numbers; two calls a step."""
    transformer = diffusers.CogView4Transformer2DModel(
        patch_size=2,
        in_channels=in_channels,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        text_embed_dim=16,
        time_embed_dim=8,
        condition_dim=4,
        pos_embed_max_size=16,
        sample_size=16,
        rope_axes_dim=(8, 8),
    )
    return getattr(diffusers, kind)(None, None, tiny_vae(scaling_factor=1.5, shift_factor=0.1), transformer, _flow())


def glm_image() -> Any:
    """An image's tokens, made by a language model, are given; a cache for reference images is always passed."""
    transformer = diffusers.GlmImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        text_embed_dim=16,
        time_embed_dim=8,
        condition_dim=4,
        prior_vq_quantizer_codebook_size=32,
    )
    return diffusers.GlmImagePipeline(None, None, None, None, tiny_vae(**STATISTICS), transformer, _flow())


def ernie() -> Any:
    """Texts of any length, padded by the pipeline; both prompts in one call."""
    transformer = diffusers.ErnieImageTransformer2DModel(
        hidden_size=32,
        num_attention_heads=2,
        num_layers=2,
        ffn_hidden_size=32,
        in_channels=16,
        out_channels=16,
        text_in_dim=16,
        rope_axes_dim=(8, 4, 4),
    )
    return diffusers.ErnieImagePipeline(transformer, flux2_vae(), None, None, diffusers.FlowMatchEulerDiscreteScheduler())


def prx() -> Any:
    """A time for the whole call, both prompts in one call."""
    transformer = diffusers.PRXTransformer2DModel(
        in_channels=4, patch_size=2, context_in_dim=16, hidden_size=32, mlp_ratio=2.0, num_heads=2, depth=2, axes_dim=[8, 8]
    )
    vae = tiny_vae(scaling_factor=1.5, shift_factor=0.1)
    return diffusers.PRXPipeline(transformer, diffusers.FlowMatchEulerDiscreteScheduler(), None, None, vae)


def fibo2() -> Any:
    """Text squeezed into as many tokens as its length says."""
    transformer = diffusers.BriaFibo2Transformer2DModel(
        in_channels=4,
        patch_size=2,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        cap_feat_dim=16,
        injection_layer_ids=(1,),
        perceiver_num_layers=1,
        min_num_gist_tokens=2,
        max_num_gist_tokens=8,
        gist_step=2,
        gist_min_text_len=2,
        gist_max_text_len=8,
        axes_dims=(8, 4, 4),
        axes_lens=(64, 32, 32),
    )
    return diffusers.BriaFibo2Pipeline(transformer, _flow(), flux2_vae(), None, None)


def text_to_image(seed: int, steps: int, guidance: float) -> Arguments:
    """A prompt, a negative prompt and a size."""
    return {
        "prompt_embeds": seeded(seed, 1, TEXT_TOKENS, 16),
        "negative_prompt_embeds": seeded(seed + 200, 1, TEXT_TOKENS, 16),
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "height": SIDE,
        "width": SIDE,
    }


def control(seed: int, steps: int, guidance: float) -> Arguments:
    """An image to follow."""
    return text_to_image(seed, steps, guidance) | {"control_image": image(seed, SIDE, SIDE)}


def with_prior(seed: int, steps: int, guidance: float) -> Arguments:
    """The tokens of the image beside the prompt."""
    tokens = torch.randint(0, 32, (1, 16), generator=torch.Generator().manual_seed(seed))
    return text_to_image(seed, steps, guidance) | {"prior_token_ids": tokens}


def listed(seed: int, steps: int, guidance: float) -> Arguments:
    """Prompts as a list of texts, the negative one shorter."""
    texts = {"prompt_embeds": [seeded(seed, TEXT_TOKENS, 16)], "negative_prompt_embeds": [seeded(seed + 200, TEXT_TOKENS - 2, 16)]}
    return text_to_image(seed, steps, guidance) | texts | {"height": 64, "width": 64}


def masked(seed: int, steps: int, guidance: float) -> Arguments:
    """With masks of the texts; the last tokens of the prompt are padding, as many as the seed says."""
    mask = torch.ones(1, TEXT_TOKENS, dtype=torch.bool)
    mask[:, TEXT_TOKENS - seed % 3 - 1 :] = False
    masks = {"prompt_attention_mask": mask, "negative_prompt_attention_mask": torch.ones(1, TEXT_TOKENS, dtype=torch.bool)}
    return text_to_image(seed, steps, guidance) | masks | {"use_resolution_binning": False}


def bundled(seed: int, steps: int, guidance: float) -> Arguments:
    """Text of two layers of the encoder; the last tokens of the prompt are padding, as many as the seed says."""
    mask = torch.ones(1, TEXT_TOKENS, dtype=torch.bool)
    mask[:, TEXT_TOKENS - seed % 3 - 1 :] = False
    return text_to_image(seed, steps, guidance) | {
        "prompt_embeds": seeded(seed, 1, 2, TEXT_TOKENS, 16),
        "prompt_embeds_mask": mask,
        "negative_prompt_embeds": seeded(seed + 200, 1, 2, TEXT_TOKENS, 16),
        "height": 64,
        "width": 64,
    }


def edit(seed: int, steps: int, guidance: float) -> Arguments:
    """An image to change."""
    return bundled(seed, steps, guidance) | {"image": [image(seed, 64, 64)]}


def _family(kind: str, family: str, make: Callable[[], Any], request: Callable[[int, int, float], Arguments], variant: str = "") -> Family:
    name = f"{kind} ({variant})" if variant else kind
    # PRX has a time for one image only, and fails at two.
    doubled = None if kind == "PRXPipeline" else {"num_images_per_prompt": 2}
    return Family(name, family, build_seeded(make), request, output_type="pt", doubled=doubled)


FAMILIES = [
    _family("CogView4Pipeline", "CogView4", cogview4, text_to_image),
    _family("CogView4ControlPipeline", "CogView4", lambda: cogview4("CogView4ControlPipeline", in_channels=8), control),
    _family("GlmImagePipeline", "GLM-Image", glm_image, with_prior),
    _family("ErnieImagePipeline", "Ernie Image", ernie, listed),
    _family("PRXPipeline", "PRX", prx, masked),
    _family("BriaFibo2Pipeline", "Bria Fibo 2", fibo2, bundled),
    _family("BriaFibo2Pipeline", "Bria Fibo 2", fibo2, edit, "edit"),
]
