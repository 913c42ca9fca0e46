# SPDX-License-Identifier: Apache-2.0
"""Requests, parts and builders that several families of tiny video pipelines share.

Real: diffusers' classes. Not real: the weights, which are random, and the prompts, which are embeddings that no encoder made.
"""

from functools import partial
from typing import Any

import diffusers
import torch
import transformers

from support.families.rig.family import Arguments, call_pipeline
from support.families.rig.tables import OfSeed, Request, asking, entry, halfway, texts

# Pixels, frames and tokens where a family needs no others. Most VAEs divide sides by 8 and keep every fourth frame.
SIDE = 32
FRAMES = 5
TEXT_TOKENS = 6

# The number of videos repeats no embeddings that are given. Latents are what most of them are compared by.
family = partial(entry, repeats=False, output_type="latent")


def in_float32(reason: str) -> dict[str, Any]:
    """Fields of a family that cannot be compared in float64, for this reason."""
    return {"compared_in": torch.float32, "tolerance": 1e-4, "reason": reason}


def tiny_hunyuan_vae() -> Any:
    """HunyuanVideo's VAE with 4 latent channels."""
    return diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4, down_block_types=("HunyuanVideoDownBlock3D",) * 4, up_block_types=("HunyuanVideoUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4,
    )  # fmt: skip


def tiny_siglip() -> dict[str, Any]:
    """An image encoder that makes 4 tokens of an image, and what prepares images for it."""
    config = transformers.SiglipVisionConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=16
    )
    return {
        "image_encoder": transformers.SiglipVisionModel(config),
        "feature_extractor": transformers.SiglipImageProcessor(size={"height": 32, "width": 32}),
    }


def prompted(side: int = SIDE, *, tokens: int = TEXT_TOKENS, width: int = 16, num_frames: int = FRAMES, **given: Any) -> Request:
    """Text to video: a prompt and a negative one, a size, a number of frames, and what else is given, as in `asking`."""
    return asking(side, num_frames=num_frames, **texts(prompt_embeds=(1, tokens, width)), **given)


def first_tokens(count: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
    """[1, tokens]: 1 for the first tokens, so many as the prompt has."""
    return (torch.arange(TEXT_TOKENS) < count).to(dtype)[None]


def short_prompts(dtype: torch.dtype) -> dict[str, OfSeed]:
    """Masks of a prompt of another length for each seed, and of a negative prompt of one token."""
    return {
        "prompt_attention_mask": lambda seed: first_tokens(2 + seed % 4, dtype),
        "negative_prompt_attention_mask": lambda seed: first_tokens(1, dtype),
    }


def from_video(request: Request, video: OfSeed) -> Request:
    """A video to start from, as long as the result."""
    return halfway(request, without=("num_frames",), video=video)


def call_with_guider(view: Any, arguments: Arguments) -> Any:
    """The strength of guidance is the guider's, not an argument of the call."""
    view.guider = view.guider.new(guidance_scale=arguments["guidance_scale"])
    return call_pipeline(view, {name: value for name, value in arguments.items() if name != "guidance_scale"})
