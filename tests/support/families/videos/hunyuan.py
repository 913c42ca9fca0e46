# SPDX-License-Identifier: Apache-2.0
"""Tiny pipelines of HunyuanVideo, its image to video, SkyReels V1 and FramePack. Prompts are embeddings with a mask."""

from collections.abc import Callable
from typing import Any

import diffusers
import torch
import transformers

from support.families.rig.family import Arguments, Family, build_seeded, image, seeded
from support.families.rig.two_rows import of_two_prompts

# Pixels and frames. The VAE divides sides by 8 and keeps every fourth frame: latents of 2 frames, 4 x 4.
SIDE = 32
FRAMES = 5
TEXT_TOKENS = 6

TRANSFORMER = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 10,
    "num_layers": 1,
    "num_single_layers": 1,
    "num_refiner_layers": 1,
    "patch_size": 2,
    "patch_size_t": 1,
    "guidance_embeds": True,
    "text_embed_dim": 16,
    "pooled_projection_dim": 8,
    "rope_axes_dim": (2, 4, 4),
}


def pipeline(kind: str, *, transformer: Any = None, **parts: Any) -> Any:
    """A pipeline of the class `kind`, by default on a guidance-distilled transformer of two blocks."""
    absent: dict[str, Any] = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    return getattr(diffusers, kind)(
        transformer=transformer or diffusers.HunyuanVideoTransformer3DModel(**TRANSFORMER),
        vae=diffusers.AutoencoderKLHunyuanVideo(
            latent_channels=4,
            down_block_types=("HunyuanVideoDownBlock3D",) * 4,
            up_block_types=("HunyuanVideoUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            layers_per_block=1,
            norm_num_groups=4,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        **absent | parts,
    )


def with_first_frame(image_condition_type: str, in_channels: int) -> Any:
    """Image to video; the type says how the first frame goes in."""
    shape = TRANSFORMER | {"in_channels": in_channels, "image_condition_type": image_condition_type, "guidance_embeds": False}
    transformer = diffusers.HunyuanVideoTransformer3DModel(**shape)
    return pipeline("HunyuanVideoImageToVideoPipeline", transformer=transformer, image_processor=None)


def skyreels() -> Any:
    """SkyReels V1: latents and the first frame's beside them."""
    transformer = diffusers.HunyuanVideoTransformer3DModel(**TRANSFORMER | {"in_channels": 8, "guidance_embeds": False})
    return pipeline("HunyuanSkyreelsImageToVideoPipeline", transformer=transformer)


def framepack() -> Any:
    """FramePack: sections of video, the last first, each seeing what was made before at coarser scales."""
    shape = TRANSFORMER | {"image_condition_type": None, "has_image_proj": True, "image_proj_dim": 8, "has_clean_x_embedder": True}
    config = transformers.SiglipVisionConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=16
    )
    return pipeline(
        "HunyuanVideoFramepackPipeline",
        transformer=diffusers.HunyuanVideoFramepackTransformer3DModel(**shape),
        image_encoder=transformers.SiglipVisionModel(config),
        feature_extractor=transformers.SiglipImageProcessor(size={"height": 32, "width": 32}),
    )


def text_to_video(seed: int, steps: int, guidance: float) -> Arguments:
    """A prompt of another length for each seed, a size and a number of frames."""
    return {
        "prompt_embeds": seeded(seed, 1, TEXT_TOKENS, 16),
        "pooled_prompt_embeds": seeded(seed + 100, 1, 8),
        "prompt_attention_mask": _mask(2 + seed % 4),
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "height": SIDE,
        "width": SIDE,
        "num_frames": FRAMES,
    }


def with_negative(seed: int, steps: int, guidance: float) -> Arguments:
    """True guidance: a second model call a step."""
    return text_to_video(seed, steps, 1.0) | {
        "negative_prompt_embeds": seeded(seed + 200, 1, TEXT_TOKENS, 16),
        "negative_pooled_prompt_embeds": seeded(seed + 300, 1, 8),
        "negative_prompt_attention_mask": _mask(1),
        "true_cfg_scale": guidance,
    }


def image_to_video(seed: int, steps: int, guidance: float) -> Arguments:
    """The first frame as well."""
    return with_negative(seed, steps, guidance) | {"image": image(seed, SIDE, SIDE)}


def framepack_video(seed: int, steps: int, guidance: float) -> Arguments:
    """The first frame; one section of two latent frames."""
    return text_to_video(seed, steps, guidance) | {"image": image(seed, SIDE, SIDE), "latent_window_size": 2}


def _mask(tokens: int) -> torch.Tensor:
    return (torch.arange(TEXT_TOKENS) < tokens).long()[None]


def _family(name: str, make: Callable[[], Any], request: Callable[[int, int, float], Arguments], family: str = "HunyuanVideo") -> Family:
    return Family(
        name,
        family,
        build_seeded(make),
        request,
        doubled=of_two_prompts(request, images="image" in request(1, 1, 1.0)),
    )


FAMILIES = [
    _family("HunyuanVideoPipeline", lambda: pipeline("HunyuanVideoPipeline"), text_to_video),
    _family("HunyuanVideoPipeline (true guidance)", lambda: pipeline("HunyuanVideoPipeline"), with_negative),
    _family("HunyuanVideoImageToVideoPipeline", lambda: with_first_frame("latent_concat", 4 + 1 + 4), image_to_video),
    _family("HunyuanVideoImageToVideoPipeline (first frame replaced)", lambda: with_first_frame("token_replace", 4), image_to_video),
    _family("HunyuanSkyreelsImageToVideoPipeline", skyreels, image_to_video, "SkyReels V1"),
    _family("HunyuanVideoFramepackPipeline", framepack, framepack_video, "FramePack"),
]
