# SPDX-License-Identifier: Apache-2.0
"""Requests, parts and builders that several families of tiny video pipelines share.

Real: diffusers' classes. Not real: the weights, which are random, and the prompts, which are embeddings that no encoder made.
"""

from collections.abc import Callable
from typing import Any

import diffusers
import torch
import transformers

from support.families.rig.family import Arguments, Family, build_seeded, call_pipeline, image, seeded, token_mask
from support.families.rig.tables import Request, more
from support.families.rig.two_rows import of_two_prompts

# The masks of a prompt and of its negative, by the seed and the number of tokens.
Masks = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]

# Pixels, frames and tokens where a family needs no others. Most VAEs divide sides by 8 and keep every fourth frame.
SIDE = 32
FRAMES = 5
TEXT_TOKENS = 6


def family(name: str, group: str, make: Callable[[str], Any], request: Request, *, images: bool = False, **fields: Any) -> Family:
    """A family whose pipeline is made from the name of its class, which is `name` up to a variant in brackets.

    `images`: two videos need two images or videos as well.
    """
    kind = name.partition(" (")[0]
    return Family(name, group, build_seeded(lambda: make(kind)), request, **{"doubled": of_two_prompts(request, images=images)} | fields)


def in_float32(reason: str) -> dict[str, Any]:
    """Fields of a family that cannot be compared in float64, for this reason."""
    return {"compared_in": torch.float32, "tolerance": 1e-4, "reason": reason}


# --- parts ----------------------------------------------------------------------------------------------------------------


def assembled(kind: str, *, encoders: int = 1, **parts: Any) -> Any:
    """A pipeline of diffusers' class `kind`, with None for so many text encoders and their tokenizers."""
    absent: dict[str, Any] = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")[: 2 * encoders])
    return getattr(diffusers, kind)(**absent | parts)


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


# --- requests -------------------------------------------------------------------------------------------------------------


def sized(steps: int, guidance: float, side: int = SIDE, frames: int = FRAMES) -> Arguments:
    """Arguments of every request: steps, guidance, a size and a number of frames."""
    return {"num_inference_steps": steps, "guidance_scale": guidance, "height": side, "width": side, "num_frames": frames}


def prompted(
    *, masks: Masks | None = None, tokens: int = TEXT_TOKENS, width: int = 16, side: int = SIDE, length: int = FRAMES, **others: Any
) -> Request:
    """Text to video: a prompt and a negative one, with masks where the pipeline takes them, a size, and `others` as they are."""

    def request(seed: int, steps: int, guidance: float) -> Arguments:
        arguments = sized(steps, guidance, side, length)
        arguments |= {"prompt_embeds": seeded(seed, 1, tokens, width), "negative_prompt_embeds": seeded(seed + 100, 1, tokens, width)}
        if masks:
            arguments["prompt_attention_mask"], arguments["negative_prompt_attention_mask"] = masks(seed, tokens)
        return arguments | others

    return request


def first_tokens(count: int, dtype: torch.dtype = torch.long, tokens: int = TEXT_TOKENS) -> torch.Tensor:
    """[1, tokens]: 1 for the first tokens, so many as the prompt has."""
    return (torch.arange(tokens) < count).to(dtype)[None]


def short_prompts(dtype: torch.dtype) -> Masks:
    """Masks of a prompt of another length for each seed, and of a negative prompt of one token."""
    return lambda seed, tokens: (first_tokens(2 + seed % 4, dtype, tokens), first_tokens(1, dtype, tokens))


def long_prompts(seed: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks of prompts that lack two tokens at most."""
    return token_mask(seed, tokens), token_mask(seed + 1, tokens)


def with_frame(request: Request, **others: Any) -> Request:
    """The first frame as well."""

    def framed(seed: int, steps: int, guidance: float) -> Arguments:
        arguments = request(seed, steps, guidance)
        return arguments | {"image": image(seed, arguments["width"], arguments["height"])} | others

    return framed


def with_video(request: Request, name: str = "video", **others: Any) -> Request:
    """A video as well, of the request's size and length."""

    def shown(seed: int, steps: int, guidance: float) -> Arguments:
        arguments = request(seed, steps, guidance)
        frames = [image(1000 * seed + frame, arguments["width"], arguments["height"]) for frame in range(arguments["num_frames"])]
        return arguments | {name: frames} | others

    return shown


def from_video(request: Request) -> Request:
    """A video to start from, as long as the result. Half the schedule is run, so twice the steps are asked for."""
    return more(with_video(request, strength=0.5), times=2, without=("num_frames",))


def call_with_guider(view: Any, arguments: Arguments) -> Any:
    """The strength of guidance is the guider's, not an argument of the call."""
    view.guider = view.guider.new(guidance_scale=arguments["guidance_scale"])
    return call_pipeline(view, {name: value for name, value in arguments.items() if name != "guidance_scale"})
