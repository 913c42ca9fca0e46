# SPDX-License-Identifier: Apache-2.0
"""DiT: an image of a class, whose number is a row."""

from typing import Any

from diffusers import DDIMScheduler, DiTPipeline, DiTTransformer2DModel

from support.families.rig.family import Arguments, Family, build_seeded, tiny_vae


def _pipeline() -> Any:
    transformer = DiTTransformer2DModel(
        sample_size=16, num_layers=2, patch_size=4, attention_head_dim=8, num_attention_heads=2, in_channels=4, out_channels=8
    )
    return DiTPipeline(transformer=transformer, vae=tiny_vae(), scheduler=DDIMScheduler(clip_sample=False))


def _a_class(seed: int, steps: int, guidance: float) -> Arguments:
    return {"class_labels": [seed], "num_inference_steps": steps, "guidance_scale": guidance}


FAMILIES = [
    Family("DiTPipeline", "DiT", build_seeded(_pipeline), _a_class, output_type="pt", doubled={"class_labels": [1, 7]}),
]
