# SPDX-License-Identifier: Apache-2.0
"""Tiny Sana video pipelines of diffusers' real classes, on Wan's VAE. Weights are random, and prompts are embeddings with a mask."""

from functools import partial
from typing import Any

import diffusers
import torch

from support.families.rig.tables import assemble, more, pixels
from support.families.videos import wan
from support.families.videos.shared import FRAMES, family, prompted, short_prompts


def pipeline(kind: str, scheduler: Any = diffusers.FlowMatchEulerDiscreteScheduler) -> Any:
    """A pipeline of the class `kind` on a transformer of one block."""
    return assemble(
        kind,
        transformer=diffusers.SanaVideoTransformer3DModel(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=1, num_cross_attention_heads=2,
            cross_attention_head_dim=12, cross_attention_dim=24, caption_channels=16, sample_size=4, patch_size=(1, 2, 2),
            rope_max_seq_len=32,
        ),
        vae=wan.tiny_wan_vae(),
        scheduler=scheduler(),
    )  # fmt: skip


text_to_video = more(
    prompted(**short_prompts(torch.long), frames=FRAMES, negative_prompt=None, use_resolution_binning=False), without=("num_frames",)
)
flow_dpm = partial(diffusers.DPMSolverMultistepScheduler, prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=7.0)
FIELDS = {"output_type": "pt", "tolerance": 1e-6, "reason": "its linear attention computes in float32 whatever it is given"}

FAMILIES = [
    family("SanaVideoPipeline", "Sana Video", partial(pipeline, scheduler=flow_dpm), text_to_video, **FIELDS),
    family("SanaImageToVideoPipeline", "Sana Video", pipeline, more(text_to_video, image=pixels()), **FIELDS),
]
