# SPDX-License-Identifier: Apache-2.0
"""PixArt and Sana: cross-attention transformers with masked prompts; Sana Sprint with embedded guidance and a scheduler that adds noise."""

from typing import Any

from diffusers import (
    AutoencoderDC,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    PixArtAlphaPipeline,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    SanaPipeline,
    SanaSprintPipeline,
    SanaTransformer2DModel,
    SCMScheduler,
)

from support.families.rig.family import Arguments, Family, build_seeded, seeded, tiny_vae, token_mask

TWO_IMAGES = {"num_images_per_prompt": 2}
TOKENS = 8


def _pixart(kind: Any, **config: Any) -> Any:
    transformer = PixArtTransformer2DModel(
        num_layers=2,
        patch_size=2,
        attention_head_dim=12,
        num_attention_heads=2,
        caption_channels=32,
        in_channels=4,
        cross_attention_dim=24,
        out_channels=8,
        norm_type="ada_norm_single",
        **config,
    )
    return kind(transformer=transformer, scheduler=DDIMScheduler(clip_sample=False), vae=tiny_vae(), text_encoder=None, tokenizer=None)


def _tiny_dc_vae() -> AutoencoderDC:
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {
            "block_types": ("ResBlock", "EfficientViTBlock"),
            "block_out_channels": (8, 8),
            "qkv_multiscales": ((), (5,)),
        }.items()
    }
    return AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        attention_head_dim=2,
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        **sides,
    )


def _sana(kind: Any, scheduler: Any, **config: Any) -> Any:
    transformer = SanaTransformer2DModel(
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=32,
        sample_size=32,
        **config,
    )
    return kind(transformer=transformer, scheduler=scheduler, vae=_tiny_dc_vae(), text_encoder=None, tokenizer=None)


def _prompts(seed: int, steps: int, guidance: float) -> Arguments:
    return {
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "prompt_embeds": seeded(seed, 1, TOKENS, 32),
        "prompt_attention_mask": token_mask(seed, TOKENS),
        "height": 32,
        "width": 32,
        "use_resolution_binning": False,
    }


def _guided(seed: int, steps: int, guidance: float) -> Arguments:
    return _prompts(seed, steps, guidance) | {
        "negative_prompt": None,
        "negative_prompt_embeds": seeded(seed + 100, 1, TOKENS, 32),
        "negative_prompt_attention_mask": token_mask(seed + 1, TOKENS),
    }


def _sprint(seed: int, steps: int, guidance: float) -> Arguments:
    # The step in between is defined for two steps only.
    return _prompts(seed, steps, guidance) | {"intermediate_timesteps": None}


FAMILIES = [
    Family(
        name="PixArtAlphaPipeline",
        family="PixArt",
        # This sample size has the sizes of the image as a condition.
        build=build_seeded(lambda: _pixart(PixArtAlphaPipeline, sample_size=128, use_additional_conditions=True)),
        request=_guided,
        output_type="pt",
        doubled=TWO_IMAGES,
    ),
    Family(
        name="PixArtSigmaPipeline",
        family="PixArt",
        build=build_seeded(lambda: _pixart(PixArtSigmaPipeline, sample_size=8, use_additional_conditions=False)),
        request=_guided,
        output_type="pt",
        doubled=TWO_IMAGES,
    ),
    Family(
        name="SanaPipeline",
        family="Sana",
        build=build_seeded(lambda: _sana(SanaPipeline, FlowMatchEulerDiscreteScheduler())),
        request=_guided,
        output_type="pt",
        doubled=TWO_IMAGES,
    ),
    Family(
        name="SanaSprintPipeline",
        family="Sana",
        build=build_seeded(lambda: _sana(SanaSprintPipeline, SCMScheduler(), guidance_embeds=True, qk_norm="rms_norm_across_heads")),
        request=_sprint,
        output_type="pt",
        doubled=TWO_IMAGES,
    ),
]
