# SPDX-License-Identifier: Apache-2.0
"""Tiny Sana video pipelines, on Wan's VAE. Prompts are embeddings with a mask."""

from collections.abc import Callable
from typing import Any

import diffusers
import torch

from support.families.rig.family import Arguments, Family, build_seeded, image, seeded
from support.families.rig.two_rows import of_two_prompts
from support.families.videos import wan

# Pixels and frames. The VAE divides sides by 8 and keeps every fourth frame.
SIDE = 32
FRAMES = 5
TEXT_TOKENS = 6


def pipeline(kind: str, scheduler: Any) -> Any:
    """A pipeline of the class `kind` on a transformer of one block."""
    return getattr(diffusers, kind)(
        transformer=diffusers.SanaVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=12,
            num_layers=1,
            num_cross_attention_heads=2,
            cross_attention_head_dim=12,
            cross_attention_dim=24,
            caption_channels=16,
            sample_size=4,
            patch_size=(1, 2, 2),
            rope_max_seq_len=32,
        ),
        vae=wan.tiny_wan_vae(),
        scheduler=scheduler,
        text_encoder=None,
        tokenizer=None,
    )


def text_to_video(seed: int, steps: int, guidance: float) -> Arguments:
    """A prompt of another length for each seed, a size and a number of frames."""
    return {
        "prompt_embeds": seeded(seed, 1, TEXT_TOKENS, 16),
        "prompt_attention_mask": _mask(2 + seed % 4),
        "negative_prompt": None,
        "negative_prompt_embeds": seeded(seed + 100, 1, TEXT_TOKENS, 16),
        "negative_prompt_attention_mask": _mask(1),
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "height": SIDE,
        "width": SIDE,
        "frames": FRAMES,
        "use_resolution_binning": False,
    }


def image_to_video(seed: int, steps: int, guidance: float) -> Arguments:
    """The first frame as well."""
    return text_to_video(seed, steps, guidance) | {"image": image(seed, SIDE, SIDE)}


def _mask(tokens: int) -> torch.Tensor:
    return (torch.arange(TEXT_TOKENS) < tokens).long()[None]


def _family(kind: str, scheduler: Callable[[], Any], request: Callable[[int, int, float], Arguments]) -> Family:
    return Family(
        kind,
        "Sana Video",
        build_seeded(lambda: pipeline(kind, scheduler())),
        request,
        output_type="pt",
        tolerance=1e-6,
        reason="its linear attention computes in float32 whatever it is given",
        doubled=of_two_prompts(request),
    )


FAMILIES = [
    _family(
        "SanaVideoPipeline",
        lambda: diffusers.DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=7.0),
        text_to_video,
    ),
    _family("SanaImageToVideoPipeline", diffusers.FlowMatchEulerDiscreteScheduler, image_to_video),
]
