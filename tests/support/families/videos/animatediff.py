# SPDX-License-Identifier: Apache-2.0
"""Tiny AnimateDiff pipelines of diffusers' real classes: an image model with motion modules.

Weights are random, and prompts are embeddings.
"""

from typing import Any

import diffusers

from support.families.rig.family import tiny_vae
from support.families.rig.tables import assemble, film
from support.families.videos.shared import family, from_video, prompted

# Pixels and frames. The VAE halves sides and keeps every frame.
SIDE = 16
FRAMES = 3


def pipeline(kind: str) -> Any:
    """A pipeline with motion modules at every resolution."""
    return assemble(
        kind,
        unet=diffusers.UNet2DConditionModel(
            block_out_channels=(16, 32), layers_per_block=1, sample_size=SIDE // 2, cross_attention_dim=16, attention_head_dim=8,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), norm_num_groups=8,
        ),
        motion_adapter=diffusers.MotionAdapter(
            block_out_channels=(16, 32), motion_layers_per_block=1, motion_num_attention_heads=2, motion_norm_num_groups=8,
        ),
        vae=tiny_vae(),
        scheduler=diffusers.DDIMScheduler(beta_schedule="linear", clip_sample=False),
    )  # fmt: skip


text_to_video = prompted(SIDE, num_frames=FRAMES)
video_to_video = from_video(text_to_video, film(FRAMES, SIDE))

FAMILIES = [
    family("AnimateDiffPipeline", "AnimateDiff", pipeline, text_to_video, output_type="pt"),
    family("AnimateDiffVideoToVideoPipeline", "AnimateDiff", pipeline, video_to_video, images=True, output_type="pt"),
]
