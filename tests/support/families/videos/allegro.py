# SPDX-License-Identifier: Apache-2.0
"""A tiny Allegro pipeline of diffusers' real classes. Weights are random, and prompts are embeddings with a mask."""

from functools import partial

import diffusers
import torch

from support.families.rig.family import plain_ddim
from support.families.rig.tables import on
from support.families.videos.shared import SIDE, family, prompted, short_prompts

vae = partial(diffusers.AutoencoderKLAllegro, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=2, latent_channels=4)
pipeline = on(
    "AllegroTransformer3DModel", vae=vae, scheduler=plain_ddim, num_attention_heads=2, attention_head_dim=12, in_channels=4,
    out_channels=4, num_layers=1, cross_attention_dim=24, sample_width=SIDE // 8, sample_height=SIDE // 8, sample_frames=2,
    caption_channels=16,
)  # fmt: skip
text_to_video = prompted(**short_prompts(torch.long), negative_prompt=None)

FAMILIES = [family("AllegroPipeline", "Allegro", pipeline, text_to_video)]
