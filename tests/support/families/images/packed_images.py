# SPDX-License-Identifier: Apache-2.0
"""Tiny pipelines of families with a sequence of packed latents: Bria, Ovis-Image, Krea 2, NucleusMoE and HunyuanImage."""

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from diffusers.guiders import AdaptiveProjectedMixGuidance

from support.families.images.qwen import small_vae
from support.families.rig.family import Arguments, Family, build_seeded, seeded, tiny_vae

# Pixels. The VAE halves them and the pipelines pack 2 x 2: 16 tokens.
SIDE = 16
TEXT_TOKENS = 6
HEADS = {"attention_head_dim": 16, "num_attention_heads": 2}
ROTARY = {"axes_dims_rope": (8, 4, 4)}


def _flow(**config: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, **config)


def bria() -> Any:
    """Positive and negative prompt in one call: two rows."""
    transformer = diffusers.BriaTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, joint_attention_dim=16, axes_dims_rope=[0, 8, 8], **HEADS
    )
    vae = tiny_vae(scaling_factor=1.5, shift_factor=0.1)
    return diffusers.BriaPipeline(transformer=transformer, scheduler=_flow(), vae=vae, text_encoder=None, tokenizer=None)


def ovis() -> Any:
    """Two calls a step; tables of positions without a batch dimension."""
    transformer = diffusers.OvisImageTransformer2DModel(
        in_channels=16, out_channels=16, num_layers=1, num_single_layers=1, joint_attention_dim=16, **HEADS, **ROTARY
    )
    return diffusers.OvisImagePipeline(_flow(), tiny_vae(scaling_factor=1.5, shift_factor=0.1), None, None, transformer)


def krea2() -> Any:
    """Text of several layers of the encoder."""
    transformer = diffusers.Krea2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_key_value_heads=1,
        intermediate_size=32,
        timestep_embed_dim=16,
        text_hidden_dim=16,
        num_text_layers=2,
        text_num_attention_heads=2,
        text_num_key_value_heads=1,
        text_intermediate_size=32,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        **HEADS,
        **ROTARY,
    )
    return diffusers.Krea2Pipeline(_flow(), small_vae(), None, None, transformer, text_encoder_select_layers=(0, 1))


def nucleus() -> Any:
    """A mixture of experts that choose tokens, each row's by themselves."""
    transformer = diffusers.NucleusMoEImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=5,
        joint_attention_dim=16,
        num_experts=4,
        moe_intermediate_dim=16,
        capacity_factors=1.0,
        mlp_ratio=8.0,
        **HEADS,
        **ROTARY,
    )
    for name, parameter in transformer.named_parameters():
        if "experts" in name:  # made by torch.empty
            torch.nn.init.normal_(parameter, std=0.2)
    return diffusers.NucleusMoEImagePipeline(transformer, _flow(), small_vae(), None, None)


def hunyuan_image(*, guided: bool = False) -> Any:
    """Two texts and their masks; distilled, or with a guider that keeps a momentum from step to step."""
    transformer = diffusers.HunyuanImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        guidance_embeds=not guided,
        text_embed_dim=16,
        text_embed_2_dim=16,
        rope_axes_dim=(8, 8),
        **HEADS,
    )
    vae = diffusers.AutoencoderKLHunyuanImage(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 32),
        layers_per_block=1,
        spatial_compression_ratio=2,
        sample_size=SIDE,
        scaling_factor=1.5,
    )
    guider = AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=1) if guided else None
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    return diffusers.HunyuanImagePipeline(scheduler, vae, None, None, None, None, transformer, guider)


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


def wordless(seed: int, steps: int, guidance: float) -> Arguments:
    """Ovis has an empty negative prompt by default, and takes either words or embeddings."""
    return text_to_image(seed, steps, guidance) | {"negative_prompt": None}


def masked(seed: int, steps: int, guidance: float) -> Arguments:
    """With masks of the texts; the last tokens of the prompt are padding, as many as the seed says."""
    mask = torch.ones(1, TEXT_TOKENS, dtype=torch.bool)
    mask[:, TEXT_TOKENS - seed % 3 - 1 :] = False
    return text_to_image(seed, steps, guidance) | {
        "prompt_embeds_mask": mask,
        "negative_prompt_embeds_mask": torch.ones(1, TEXT_TOKENS, dtype=torch.bool),
    }


def layered(seed: int, steps: int, guidance: float) -> Arguments:
    """Text of two layers."""
    return masked(seed, steps, guidance) | {
        "prompt_embeds": seeded(seed, 1, TEXT_TOKENS, 2, 16),
        "negative_prompt_embeds": seeded(seed + 200, 1, TEXT_TOKENS, 2, 16),
    }


def two_texts(seed: int, steps: int, guidance: float) -> Arguments:
    """A prompt and the words to be written in the image; guidance is the model's own."""
    both = masked(seed, steps, guidance)
    kept = ("prompt_embeds", "prompt_embeds_mask", "num_inference_steps", "height", "width")
    return {name: both[name] for name in kept} | {
        "prompt_embeds_2": seeded(seed + 100, 1, TEXT_TOKENS, 16),
        "prompt_embeds_mask_2": torch.ones(1, TEXT_TOKENS, dtype=torch.bool),
        "distilled_guidance_scale": guidance,
    }


def guided_texts(seed: int, steps: int, guidance: float) -> Arguments:
    """Guidance is the guider's."""
    both = {name: value for name, value in two_texts(seed, steps, guidance).items() if name != "distilled_guidance_scale"}
    return both | {
        "negative_prompt_embeds": seeded(seed + 200, 1, TEXT_TOKENS, 16),
        "negative_prompt_embeds_mask": torch.ones(1, TEXT_TOKENS, dtype=torch.bool),
        "negative_prompt_embeds_2": seeded(seed + 300, 1, TEXT_TOKENS, 16),
        "negative_prompt_embeds_mask_2": torch.ones(1, TEXT_TOKENS, dtype=torch.bool),
    }


def _family(
    kind: str, family: str, make: Callable[[], Any], request: Callable[[int, int, float], Arguments], *, doubled: Arguments | None = None
) -> Family:
    return Family(kind, family, build_seeded(make), request, output_type="pt", doubled=doubled or {"num_images_per_prompt": 2})


# The number of images repeats no embeddings that are given.
TWO_PROMPTS = {"prompt_embeds": seeded(7, 2, TEXT_TOKENS, 16), "negative_prompt_embeds": seeded(8, 2, TEXT_TOKENS, 16)}


FAMILIES = [
    _family("BriaPipeline", "Bria", bria, text_to_image, doubled=TWO_PROMPTS),
    _family("OvisImagePipeline", "Ovis-Image", ovis, wordless),
    _family("Krea2Pipeline", "Krea 2", krea2, layered),
    _family("NucleusMoEImagePipeline", "NucleusMoE", nucleus, masked),
    _family("HunyuanImagePipeline", "HunyuanImage", hunyuan_image, two_texts),
    _family("HunyuanImagePipeline (guider)", "HunyuanImage", lambda: hunyuan_image(guided=True), guided_texts),
]
