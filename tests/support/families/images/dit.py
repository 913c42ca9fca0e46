# SPDX-License-Identifier: Apache-2.0
"""DiT: an image of a class, whose number is a row."""

from typing import Any

from diffusers import DDIMScheduler, DiTTransformer2DModel

from support.families.rig.family import tiny_vae
from support.families.rig.tables import asking, assemble, entry


def _pipeline(kind: str) -> Any:
    transformer = DiTTransformer2DModel(
        sample_size=16, num_layers=2, patch_size=4, attention_head_dim=8, num_attention_heads=2, in_channels=4, out_channels=8
    )
    return assemble(kind, transformer=transformer, vae=tiny_vae(), scheduler=DDIMScheduler(clip_sample=False))


A_CLASS = asking(class_labels=lambda seed: [seed])

FAMILIES = [entry("DiTPipeline", "DiT", _pipeline, A_CLASS, doubled={"class_labels": [1, 7]})]
