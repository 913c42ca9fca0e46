# SPDX-License-Identifier: Apache-2.0
"""Tiny Kandinsky 5 video pipelines. Prompts are two embeddings; where each prompt ends is told by cumulative lengths."""

from collections.abc import Callable
from typing import Any

import diffusers
import torch

from support.families.rig.family import Arguments, Family, build_seeded, image, seeded

# Pixels and frames. The VAE divides sides by 8 and keeps every fourth frame. Image to video scales the first four
# frames of the latents to the moments of those after them, so there have to be more.
SIDE = 32
FRAMES = 21
TEXT_TOKENS = 6

FLOAT32 = "its transformer computes times in float32 and cannot take them in float64"


def pipeline(kind: str, *, visual_cond: bool) -> Any:
    """A pipeline of the class `kind`; `visual_cond`: the transformer also sees given frames."""
    absent: dict[str, Any] = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    return getattr(diffusers, kind)(
        transformer=diffusers.Kandinsky5Transformer3DModel(
            in_visual_dim=4,
            out_visual_dim=4,
            in_text_dim=16,
            in_text_dim2=8,
            time_dim=16,
            model_dim=16,
            ff_dim=16,
            num_text_blocks=1,
            num_visual_blocks=1,
            axes_dims=(4, 6, 6),
            visual_cond=visual_cond,
        ),
        vae=diffusers.AutoencoderKLHunyuanVideo(
            latent_channels=4,
            down_block_types=("HunyuanVideoDownBlock3D",) * 4,
            up_block_types=("HunyuanVideoUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            layers_per_block=1,
            norm_num_groups=4,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        **absent,
    )


def text_to_video(seed: int, steps: int, guidance: float) -> Arguments:
    """A prompt, a size and a number of frames."""
    arguments = {"num_inference_steps": steps, "guidance_scale": guidance, "height": SIDE, "width": SIDE, "num_frames": FRAMES}
    for number, name in enumerate(("prompt", "negative_prompt")):
        arguments |= {
            f"{name}_embeds_qwen": seeded(seed + 100 * number, 1, TEXT_TOKENS, 16),
            f"{name}_embeds_clip": seeded(seed + 100 * number + 50, 1, 8),
            f"{name}_cu_seqlens": torch.tensor([0, TEXT_TOKENS], dtype=torch.int32),
        }
    return arguments


def image_to_video(seed: int, steps: int, guidance: float) -> Arguments:
    """The first frame as well."""
    return text_to_video(seed, steps, guidance) | {"image": image(seed, SIDE, SIDE)}


def _two_prompts() -> Arguments:
    arguments = text_to_video(1, 2, 1.0)
    return {
        name: torch.tensor([0, TEXT_TOKENS, 2 * TEXT_TOKENS], dtype=torch.int32)
        if "cu_seqlens" in name
        else value.repeat(2, *(1,) * (value.dim() - 1))
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor)
    }


def _family(kind: str, request: Callable[[int, int, float], Arguments], *, visual_cond: bool) -> Family:
    make = build_seeded(lambda: pipeline(kind, visual_cond=visual_cond))
    return Family(kind, "Kandinsky 5", make, request, tolerance=1e-4, reason=FLOAT32, compared_in=torch.float32, doubled=_two_prompts())


FAMILIES = [
    _family("Kandinsky5T2VPipeline", text_to_video, visual_cond=False),
    _family("Kandinsky5I2VPipeline", image_to_video, visual_cond=True),
]
