# SPDX-License-Identifier: Apache-2.0
"""Tiny Kandinsky 5 video pipelines of diffusers' real classes. Weights are random.

Prompts are two embeddings, and cumulative lengths say where each prompt ends.
"""

from functools import partial
from typing import Any

import diffusers
import torch

from support.families.rig.family import Arguments
from support.families.rig.tables import asking, assemble, more, of_two_prompts, pixels, texts
from support.families.videos.shared import SIDE, TEXT_TOKENS, family, in_float32, tiny_hunyuan_vae

# Image to video scales the first four frames of the latents to the moments of those after them, so there have to be more.
FRAMES = 21


def pipeline(kind: str, *, visual_cond: bool = False) -> Any:
    """A pipeline of the class `kind`; `visual_cond`: the transformer also sees given frames."""
    return assemble(
        kind,
        transformer=diffusers.Kandinsky5Transformer3DModel(
            in_visual_dim=4, out_visual_dim=4, in_text_dim=16, in_text_dim2=8, time_dim=16, model_dim=16, ff_dim=16, num_text_blocks=1,
            num_visual_blocks=1, axes_dims=(4, 6, 6), visual_cond=visual_cond,
        ),
        vae=tiny_hunyuan_vae(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
    )  # fmt: skip


def lengths(prompts: int) -> Arguments:
    """Cumulative lengths of so many prompts, and of their negatives."""
    ends = [TEXT_TOKENS * number for number in range(prompts + 1)]
    return {f"{name}_cu_seqlens": torch.tensor(ends, dtype=torch.int32) for name in ("prompt", "negative_prompt")}


PROMPTS = texts(step=50, prompt_embeds_qwen=(1, TEXT_TOKENS, 16), prompt_embeds_clip=(1, 8))
text_to_video = asking(SIDE, num_frames=FRAMES, **PROMPTS, **lengths(1))
image_to_video = more(text_to_video, image=pixels())
SINGLE = in_float32("its transformer computes times in float32 and cannot take them in float64")
FIELDS = SINGLE | {"doubled": of_two_prompts(text_to_video) | lengths(2)}

FAMILIES = [
    family("Kandinsky5T2VPipeline", "Kandinsky 5", pipeline, text_to_video, **FIELDS),
    family("Kandinsky5I2VPipeline", "Kandinsky 5", partial(pipeline, visual_cond=True), image_to_video, **FIELDS),
]
