# SPDX-License-Identifier: Apache-2.0
"""Tiny LTX-Video pipelines of diffusers' real classes. Weights are random, and prompts are embeddings with a mask."""

from functools import partial
from typing import Any

import diffusers
import torch

from support.families.rig.tables import assemble, more, pixels
from support.families.videos.shared import family, prompted, short_prompts


def pipeline(kind: str, *, shifts: bool = True) -> Any:
    """A pipeline of the class `kind` on a transformer of two blocks; `shifts` moves the schedule by the video's size.

    The VAE divides sides by 8 (once by its own blocks, by 4 when it patches) and keeps every second frame.
    """
    return assemble(
        kind,
        transformer=diffusers.LTXVideoTransformer3DModel(
            in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16, num_layers=2,
            caption_channels=16,
        ),
        vae=diffusers.AutoencoderKLLTXVideo(
            latent_channels=8, block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8),
            layers_per_block=(1, 1, 1, 1, 1), decoder_layers_per_block=(1, 1, 1, 1, 1),
            spatio_temporal_scaling=(True, True, False, False), decoder_spatio_temporal_scaling=(True, True, False, False),
            decoder_inject_noise=(False, False, False, False, False), upsample_residual=(False, False, False, False),
            upsample_factor=(1, 1, 1, 1), timestep_conditioning=False, patch_size=1, patch_size_t=1, encoder_causal=True,
            decoder_causal=False,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=shifts),
    )  # fmt: skip


text_to_video = prompted(**short_prompts(torch.float32), frame_rate=25)
image_to_video = more(text_to_video, image=pixels())
# The video shows the image from a frame on, with a strength.
conditioned_video = more(image_to_video, strength=0.8)

FAMILIES = [
    family("LTXPipeline", "LTX", pipeline, text_to_video, output_type="pt"),
    family("LTXImageToVideoPipeline", "LTX", pipeline, image_to_video, output_type="pt"),
    family("LTXConditionPipeline", "LTX", partial(pipeline, shifts=False), conditioned_video, output_type="pt"),
]
