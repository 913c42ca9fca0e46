# SPDX-License-Identifier: Apache-2.0
"""A tiny EasyAnimate pipeline of diffusers' real classes. Weights are random, and prompts are embeddings with a mask."""

from functools import partial

import diffusers
import torch

from support.families.rig.family import flow
from support.families.rig.tables import on, ones
from support.families.videos.shared import SIDE, TEXT_TOKENS, family, prompted

vae = partial(
    diffusers.AutoencoderKLMagvit,
    latent_channels=4, block_out_channels=[8, 8, 8, 8], layers_per_block=1, norm_num_groups=4, spatial_group_norm=False,
)  # fmt: skip
pipeline = on(
    "EasyAnimateTransformer3DModel", vae=vae, scheduler=partial(flow, shift=5.0), num_attention_heads=2, attention_head_dim=16,
    in_channels=4, out_channels=4, patch_size=2, sample_width=SIDE // 8, sample_height=SIDE // 8, num_layers=2, mmdit_layers=2,
    time_embed_dim=4, text_embed_dim=16,
)  # fmt: skip
every_token = ones(1, TEXT_TOKENS, dtype=torch.float32)
text_to_video = prompted(prompt_attention_mask=every_token, negative_prompt_attention_mask=every_token)

FAMILIES = [family("EasyAnimatePipeline", "EasyAnimate", pipeline, text_to_video)]
