# SPDX-License-Identifier: Apache-2.0
"""A tiny EasyAnimate pipeline of diffusers' real classes. Weights are random, and prompts are embeddings with a mask."""

from typing import Any

import diffusers
import torch

from support.families.videos.shared import SIDE, assembled, family, prompted


def pipeline(kind: str) -> Any:
    """A pipeline on a transformer of two blocks."""
    return assembled(
        kind,
        transformer=diffusers.EasyAnimateTransformer3DModel(
            num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, patch_size=2, sample_width=SIDE // 8,
            sample_height=SIDE // 8, num_layers=2, mmdit_layers=2, time_embed_dim=4, text_embed_dim=16,
        ),
        vae=diffusers.AutoencoderKLMagvit(
            latent_channels=4, block_out_channels=[8, 8, 8, 8], layers_per_block=1, norm_num_groups=4, spatial_group_norm=False,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
    )  # fmt: skip


def full_prompts(seed: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks that leave no token out."""
    return torch.ones(1, tokens), torch.ones(1, tokens)


FAMILIES = [family("EasyAnimatePipeline", "EasyAnimate", pipeline, prompted(masks=full_prompts))]
