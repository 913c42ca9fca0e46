# SPDX-License-Identifier: Apache-2.0
"""A tiny Motif video pipeline of diffusers' real classes, with guidance in a guider component, on Wan's VAE.

Weights are random, and prompts are embeddings with a mask.
"""

from typing import Any

import diffusers

from support.families.rig.tables import assemble, masks
from support.families.videos import wan
from support.families.videos.shared import TEXT_TOKENS, call_with_guider, family, in_float32, prompted


def pipeline(kind: str) -> Any:
    """A pipeline on a transformer of three blocks."""
    return assemble(
        kind,
        transformer=diffusers.MotifVideoTransformer3DModel(
            in_channels=4 + 4 + 1, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=1, num_single_layers=2,
            num_decoder_layers=1, text_embed_dim=16, rope_axes_dim=(4, 4, 4),
        ),
        vae=wan.tiny_wan_vae(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        guider=diffusers.ClassifierFreeGuidance(),
    )  # fmt: skip


text_to_video = prompted(**masks(prompt_attention_mask=TEXT_TOKENS))
SINGLE = in_float32("the transformer computes its times in float32 and cannot take them in float64")

FAMILIES = [family("MotifVideoPipeline", "Motif video", pipeline, text_to_video, output_type="pt", call=call_with_guider, **SINGLE)]
