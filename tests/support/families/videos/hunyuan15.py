# SPDX-License-Identifier: Apache-2.0
"""Tiny HunyuanVideo 1.5 pipelines of diffusers' real classes, with guidance in a guider component.

Weights are random, and prompts are embeddings with masks.
"""

from typing import Any

import diffusers

from support.families.rig.tables import OfSeed, asking, assemble, more, pixels, texts
from support.families.videos.shared import FRAMES, SIDE, TEXT_TOKENS, call_with_guider, family, first_tokens, tiny_siglip


def pipeline(kind: str, **parts: Any) -> Any:
    """A pipeline of the class `kind` on a transformer of one block."""
    built = assemble(
        kind,
        transformer=diffusers.HunyuanVideo15Transformer3DModel(
            in_channels=4 + 4 + 1, out_channels=4, num_attention_heads=2, attention_head_dim=8, num_layers=1, num_refiner_layers=1,
            text_embed_dim=16, text_embed_2_dim=8, image_embed_dim=8, rope_axes_dim=(2, 2, 4), target_size=SIDE,
        ),
        vae=diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, spatial_compression_ratio=8,
            temporal_compression_ratio=4,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        guider=diffusers.ClassifierFreeGuidance(),
        **parts,
    )  # fmt: skip
    built.vision_num_semantic_tokens = 4
    return built


def from_first_frame(kind: str) -> Any:
    """Image to video: the first frame as latents and as 4 tokens."""
    return pipeline(kind, **tiny_siglip())


# Two prompts of other lengths for each seed.
PROMPTS = texts(step=50, prompt_embeds=(1, TEXT_TOKENS, 16), prompt_embeds_2=(1, TEXT_TOKENS, 8))
MASKS: dict[str, OfSeed] = {
    "prompt_embeds_mask": lambda seed: first_tokens(2 + seed % 4),
    "prompt_embeds_mask_2": lambda seed: first_tokens(1 + seed % 4),
    "negative_prompt_embeds_mask": lambda seed: first_tokens(2),
    "negative_prompt_embeds_mask_2": lambda seed: first_tokens(1),
}
text_to_video = asking(SIDE, num_frames=FRAMES, **PROMPTS, **MASKS)
# The first frame also gives the size.
image_to_video = more(text_to_video, image=pixels(), without=("height", "width"))
GUIDED = {"call": call_with_guider}

FAMILIES = [
    family("HunyuanVideo15Pipeline", "HunyuanVideo 1.5", pipeline, text_to_video, **GUIDED),
    family("HunyuanVideo15ImageToVideoPipeline", "HunyuanVideo 1.5", from_first_frame, image_to_video, **GUIDED),
]
