# SPDX-License-Identifier: Apache-2.0
"""Tiny AnimateDiff pipelines: an image model with motion modules. Prompts are embeddings."""

from collections.abc import Callable
from typing import Any

import diffusers

from support.families.rig.family import Arguments, Family, build_seeded, image, seeded, tiny_vae
from support.families.rig.two_rows import of_two_prompts

# Pixels and frames. The VAE halves sides and keeps every frame.
SIDE = 16
FRAMES = 3
TEXT_TOKENS = 6


def pipeline(kind: str) -> Any:
    """A pipeline of the class `kind`, with motion modules at every resolution."""
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(16, 32),
        layers_per_block=1,
        sample_size=SIDE // 2,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    motion = diffusers.MotionAdapter(
        block_out_channels=(16, 32), motion_layers_per_block=1, motion_num_attention_heads=2, motion_norm_num_groups=8
    )
    return getattr(diffusers, kind)(
        unet=unet,
        motion_adapter=motion,
        vae=tiny_vae(),
        scheduler=diffusers.DDIMScheduler(beta_schedule="linear", clip_sample=False),
        text_encoder=None,
        tokenizer=None,
    )


def text_to_video(seed: int, steps: int, guidance: float) -> Arguments:
    """A prompt, a size and a number of frames."""
    return {
        "prompt_embeds": seeded(seed, 1, TEXT_TOKENS, 16),
        "negative_prompt_embeds": seeded(seed + 100, 1, TEXT_TOKENS, 16),
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "height": SIDE,
        "width": SIDE,
        "num_frames": FRAMES,
    }


def video_to_video(seed: int, steps: int, guidance: float) -> Arguments:
    """A video to start from. Half the schedule is run, so twice the steps are asked for."""
    video = [image(1000 * seed + frame, SIDE, SIDE) for frame in range(FRAMES)]
    arguments = text_to_video(seed, 2 * steps, guidance) | {"video": video, "strength": 0.5}
    del arguments["num_frames"]
    return arguments


def _family(kind: str, request: Callable[[int, int, float], Arguments]) -> Family:
    return Family(
        kind, "AnimateDiff", build_seeded(lambda: pipeline(kind)), request, output_type="pt", doubled=of_two_prompts(request, images=True)
    )


FAMILIES = [_family("AnimateDiffPipeline", text_to_video), _family("AnimateDiffVideoToVideoPipeline", video_to_video)]
