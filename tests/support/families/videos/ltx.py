# SPDX-License-Identifier: Apache-2.0
"""Tiny LTX-Video pipelines. Prompts are embeddings with a mask."""

from collections.abc import Callable
from typing import Any

import diffusers
import torch

from support.families.rig.family import Arguments, Family, build_seeded, image, seeded
from support.families.rig.two_rows import of_two_prompts

# Pixels and frames. The VAE divides sides by 8 (once by its own blocks, by 4 when it patches) and keeps every second frame.
SIDE = 32
FRAMES = 5
TEXT_TOKENS = 6


def pipeline(kind: str, *, shifts: bool = True) -> Any:
    """A pipeline of the class `kind` on a transformer of two blocks; `shifts` moves the schedule by the video's size."""
    return getattr(diffusers, kind)(
        transformer=diffusers.LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            num_attention_heads=2,
            attention_head_dim=8,
            cross_attention_dim=16,
            num_layers=2,
            caption_channels=16,
        ),
        vae=diffusers.AutoencoderKLLTXVideo(
            latent_channels=8,
            block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 8, 8, 8),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1, 1),
            spatio_temporal_scaling=(True, True, False, False),
            decoder_spatio_temporal_scaling=(True, True, False, False),
            decoder_inject_noise=(False, False, False, False, False),
            upsample_residual=(False, False, False, False),
            upsample_factor=(1, 1, 1, 1),
            timestep_conditioning=False,
            patch_size=1,
            patch_size_t=1,
            encoder_causal=True,
            decoder_causal=False,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=shifts),
        text_encoder=None,
        tokenizer=None,
    )


def text_to_video(seed: int, steps: int, guidance: float) -> Arguments:
    """A prompt of another length for each seed, a size and a number of frames."""
    return {
        "prompt_embeds": seeded(seed, 1, TEXT_TOKENS, 16),
        "prompt_attention_mask": _mask(2 + seed % 4),
        "negative_prompt_embeds": seeded(seed + 100, 1, TEXT_TOKENS, 16),
        "negative_prompt_attention_mask": _mask(1),
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "height": SIDE,
        "width": SIDE,
        "num_frames": FRAMES,
        "frame_rate": 25,
    }


def image_to_video(seed: int, steps: int, guidance: float) -> Arguments:
    """The first frame as well."""
    return text_to_video(seed, steps, guidance) | {"image": image(seed, SIDE, SIDE)}


def conditioned_video(seed: int, steps: int, guidance: float) -> Arguments:
    """An image that the video shows from a frame on, with a strength."""
    return image_to_video(seed, steps, guidance) | {"strength": 0.8}


def _mask(tokens: int) -> torch.Tensor:
    return (torch.arange(TEXT_TOKENS) < tokens).float()[None]


def _family(kind: str, request: Callable[[int, int, float], Arguments], *, shifts: bool = True) -> Family:
    return Family(
        kind,
        "LTX",
        build_seeded(lambda: pipeline(kind, shifts=shifts)),
        request,
        output_type="pt",
        doubled=of_two_prompts(request),
    )


FAMILIES = [
    _family("LTXPipeline", text_to_video),
    _family("LTXImageToVideoPipeline", image_to_video),
    _family("LTXConditionPipeline", conditioned_video, shifts=False),
]
