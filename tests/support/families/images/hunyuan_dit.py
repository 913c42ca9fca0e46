# SPDX-License-Identifier: Apache-2.0
"""Hunyuan-DiT: two masked prompts, a style and the sizes of the image as rows, a table of angles for all."""

from typing import Any

from diffusers import DDPMScheduler, HunyuanDiT2DModel

from support.families.rig.family import tiny_vae
from support.families.rig.tables import asking, assemble, entry, masks, texts

SHORT, LONG = 6, 8


def _pipeline(kind: str) -> Any:
    transformer = HunyuanDiT2DModel(
        sample_size=16, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=3, in_channels=4,
        cross_attention_dim=32, cross_attention_dim_t5=24, pooled_projection_dim=16, hidden_size=24, text_len=SHORT,
        text_len_t5=LONG, activation_fn="gelu-approximate",
    )  # fmt: skip
    scheduler, vae = DDPMScheduler(clip_sample=False), tiny_vae(levels=4)
    return assemble(kind, transformer=transformer, scheduler=scheduler, vae=vae, requires_safety_checker=False)


PROMPTS = asking(
    32,
    **texts(prompt_embeds=(1, SHORT, 32), prompt_embeds_2=(1, LONG, 24)),
    **masks(prompt_attention_mask=SHORT, prompt_attention_mask_2=LONG),
    original_size=lambda seed: (32 + seed, 32),
    use_resolution_binning=False,
)
FLOAT32 = "its layer norms compute in float32 whatever they are given"

FAMILIES = [entry("HunyuanDiTPipeline", "Hunyuan-DiT", _pipeline, PROMPTS, repeats=False, tolerance=1e-6, reason=FLOAT32)]
