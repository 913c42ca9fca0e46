# SPDX-License-Identifier: Apache-2.0
"""A tiny Latte pipeline. Prompts are embeddings."""

from typing import Any

import diffusers

from support.families.rig.family import Arguments, Family, build_seeded, seeded, tiny_vae
from support.families.rig.two_rows import of_two_prompts

# Pixels and frames. The VAE halves sides and keeps every frame.
SIDE = 16
FRAMES = 2
TEXT_TOKENS = 6


def pipeline() -> Any:
    """A pipeline on a transformer of one block, which also predicts a variance that is thrown away."""
    return diffusers.LattePipeline(
        transformer=diffusers.LatteTransformer3DModel(
            sample_size=SIDE // 2,
            num_layers=1,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=2,
            caption_channels=16,
            in_channels=4,
            cross_attention_dim=16,
            out_channels=8,
            attention_bias=True,
            activation_fn="gelu-approximate",
            num_embeds_ada_norm=1000,
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            video_length=FRAMES,
        ),
        vae=tiny_vae(),
        scheduler=diffusers.DDIMScheduler(clip_sample=False),
        text_encoder=None,
        tokenizer=None,
    )


def text_to_video(seed: int, steps: int, guidance: float) -> Arguments:
    """A prompt, a size and a number of frames."""
    return {
        "prompt_embeds": seeded(seed, 1, TEXT_TOKENS, 16),
        "negative_prompt": None,
        "negative_prompt_embeds": seeded(seed + 100, 1, TEXT_TOKENS, 16),
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "height": SIDE,
        "width": SIDE,
        "video_length": FRAMES,
    }


FAMILIES = [Family("LattePipeline", "Latte", build_seeded(pipeline), text_to_video, doubled=of_two_prompts(text_to_video))]
