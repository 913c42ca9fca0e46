# SPDX-License-Identifier: Apache-2.0
"""Tiny pipelines of HunyuanVideo, its image to video, SkyReels V1 and FramePack, of diffusers' real classes.

Weights are random, and prompts are embeddings with a mask.
"""

from functools import partial
from typing import Any

import diffusers

from support.families.rig.tables import OfSeed, asking, assemble, more, noise, pixels
from support.families.videos.shared import FRAMES, SIDE, TEXT_TOKENS, family, first_tokens, tiny_hunyuan_vae, tiny_siglip

TRANSFORMER = {
    "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 10, "num_layers": 1, "num_single_layers": 1,
    "num_refiner_layers": 1, "patch_size": 2, "patch_size_t": 1, "guidance_embeds": True, "text_embed_dim": 16,
    "pooled_projection_dim": 8, "rope_axes_dim": (2, 4, 4),
}  # fmt: skip


def pipeline(kind: str, *, transformer: Any = None, **parts: Any) -> Any:
    """A pipeline of the class `kind`, by default on a guidance-distilled transformer of two blocks."""
    return assemble(
        kind,
        transformer=transformer or diffusers.HunyuanVideoTransformer3DModel(**TRANSFORMER),
        vae=tiny_hunyuan_vae(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        **parts,
    )


def from_first_frame(kind: str, **shape: Any) -> Any:
    """Image to video; `shape` says how the first frame goes in. SkyReels V1 has its latents beside the others."""
    transformer = diffusers.HunyuanVideoTransformer3DModel(**TRANSFORMER | {"guidance_embeds": False} | shape)
    return pipeline(kind, transformer=transformer)


def framepack(kind: str) -> Any:
    """FramePack: sections of video, the last first, each seeing what was made before at coarser scales."""
    shape = TRANSFORMER | {"image_condition_type": None, "has_image_proj": True, "image_proj_dim": 8, "has_clean_x_embedder": True}
    return pipeline(kind, transformer=diffusers.HunyuanVideoFramepackTransformer3DModel(**shape), **tiny_siglip())


# A prompt of another length for each seed.
PROMPT: dict[str, OfSeed] = {
    "prompt_embeds": noise(1, TEXT_TOKENS, 16),
    "pooled_prompt_embeds": noise(1, 8, at=100),
    "prompt_attention_mask": lambda seed: first_tokens(2 + seed % 4),
}
NEGATIVE: dict[str, OfSeed] = {
    "negative_prompt_embeds": noise(1, TEXT_TOKENS, 16, at=200),
    "negative_pooled_prompt_embeds": noise(1, 8, at=300),
    "negative_prompt_attention_mask": lambda seed: first_tokens(1),
}
text_to_video = asking(SIDE, num_frames=FRAMES, **PROMPT)
# True guidance: a second model call a step.
with_negative = asking(SIDE, scale="true_cfg_scale", guidance_scale=1.0, num_frames=FRAMES, **PROMPT, **NEGATIVE)
image_to_video = more(with_negative, image=pixels())
# FramePack makes one section of two latent frames here.
framepack_video = more(text_to_video, image=pixels(), latent_window_size=2)
concatenated = partial(from_first_frame, image_condition_type="latent_concat", in_channels=4 + 1 + 4)
replaced = partial(from_first_frame, image_condition_type="token_replace")

FAMILIES = [
    family("HunyuanVideoPipeline", "HunyuanVideo", pipeline, text_to_video),
    family("HunyuanVideoPipeline (true guidance)", "HunyuanVideo", pipeline, with_negative),
    family("HunyuanVideoImageToVideoPipeline", "HunyuanVideo", concatenated, image_to_video, images=True),
    family("HunyuanVideoImageToVideoPipeline (first frame replaced)", "HunyuanVideo", replaced, image_to_video, images=True),
    family("HunyuanSkyreelsImageToVideoPipeline", "SkyReels V1", partial(from_first_frame, in_channels=8), image_to_video, images=True),
    family("HunyuanVideoFramepackPipeline", "FramePack", framepack, framepack_video, images=True),
]
