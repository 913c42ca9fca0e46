# SPDX-License-Identifier: Apache-2.0
"""Tiny pipelines of HunyuanVideo, its image to video, SkyReels V1, FramePack and HunyuanVideo 1.5; Kandinsky 5 has the same VAE.

The guidance of HunyuanVideo 1.5 is in a guider component. Kandinsky 5 has cumulative lengths that say where each prompt ends.
Weights are random, and prompts are embeddings, most of them with masks.
"""

from functools import partial
from typing import Any

import torch
import transformers

from support.families.rig.family import Arguments, flow
from support.families.rig.tables import asking, more, of_two_prompts, on, part, pixels, texts, valid
from support.families.videos.shared import FRAMES, SIDE, TEXT_TOKENS, call_with_guider, family, in_float32, short_prompts

# Kandinsky scales the first four frames of the latents to the moments of those after them, so there have to be more.
KANDINSKY_FRAMES = 21
TRANSFORMER = "HunyuanVideoTransformer3DModel"

hunyuan_vae = part(
    "AutoencoderKLHunyuanVideo", latent_channels=4, down_block_types=("HunyuanVideoDownBlock3D",) * 4,
    up_block_types=("HunyuanVideoUpBlock3D",) * 4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4,
)  # fmt: skip
on_hunyuan = partial(
    on, vae=hunyuan_vae, scheduler=partial(flow, shift=7.0), attention_head_dim=10, num_layers=1, patch_size=2, patch_size_t=1,
    guidance_embeds=True, pooled_projection_dim=8, rope_axes_dim=(2, 4, 4),
)  # fmt: skip


def siglip() -> Any:
    """Build a SigLIP vision encoder for 32 x 32 pixels: four patches of 16 x 16, each embedded with width 8."""
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32}
    return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**sizes, patch_size=16))


SIGLIP = {
    "image_encoder": siglip,
    "feature_extractor": lambda: transformers.SiglipImageProcessor(size={"height": 32, "width": 32}),
}
# Image to video has the latents of the first frame beside the others, or in their place.
first_frame = partial(on_hunyuan, TRANSFORMER, guidance_embeds=False)
concatenated = first_frame(image_condition_type="latent_concat", in_channels=4 + 1 + 4)
replaced = first_frame(image_condition_type="token_replace")
# Sections of video, the last first; each gets the earlier ones at coarser scales.
on_framepack = on_hunyuan(
    "HunyuanVideoFramepackTransformer3DModel", image_condition_type=None, has_image_proj=True, image_proj_dim=8, has_clean_x_embedder=True
)
on_hunyuan_15 = partial(
    on(
        "HunyuanVideo15Transformer3DModel", scheduler=partial(flow, shift=7.0), in_channels=4 + 4 + 1, attention_head_dim=8, num_layers=1,
        text_embed_2_dim=8, image_embed_dim=8, rope_axes_dim=(2, 2, 4), target_size=SIDE,
        vae=part(
            "AutoencoderKLHunyuanVideo15", latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1,
            spatial_compression_ratio=8, temporal_compression_ratio=4,
        ),
    ),
    guider=part("ClassifierFreeGuidance"),
)  # fmt: skip
on_kandinsky = partial(
    on, "Kandinsky5Transformer3DModel", vae=hunyuan_vae, scheduler=partial(flow, shift=5.0), in_visual_dim=4, out_visual_dim=4,
    in_text_dim=16, in_text_dim2=8, time_dim=16, model_dim=16, ff_dim=16, num_text_blocks=1, num_visual_blocks=1, axes_dims=(4, 6, 6),
)  # fmt: skip


def hunyuan_15(kind: str, **parts: Any) -> Any:
    """Build a HunyuanVideo 1.5 pipeline of diffusers' class `kind`.

    It expects 4 image tokens, as `siglip` makes them, and not the 729 of the real encoder.
    """
    built = on_hunyuan_15(kind, **parts)
    built.vision_num_semantic_tokens = 4
    return built


# A prompt of another length for each seed.
PROMPTS = texts(apart=200, step=100, prompt_embeds=(1, TEXT_TOKENS, 16), pooled_prompt_embeds=(1, 8)) | short_prompts()
# True guidance: a second model call a step.
with_negative = asking(SIDE, scale="true_cfg_scale", guidance_scale=1.0, num_frames=FRAMES, **PROMPTS)
text_to_video = asking(SIDE, num_frames=FRAMES, **{name: value for name, value in PROMPTS.items() if not name.startswith("negative")})
image_to_video = more(with_negative, image=pixels())
# FramePack makes one section of two latent frames here.
framepack_video = more(text_to_video, image=pixels(), latent_window_size=2)
# Two prompts of other lengths for each seed.
text_to_video_15 = asking(
    SIDE,
    num_frames=FRAMES,
    **texts(step=50, prompt_embeds=(1, TEXT_TOKENS, 16), prompt_embeds_2=(1, TEXT_TOKENS, 8)),
    prompt_embeds_mask=valid(TEXT_TOKENS, lambda seed: 2 + seed % 4),
    prompt_embeds_mask_2=valid(TEXT_TOKENS, lambda seed: 1 + seed % 4),
    negative_prompt_embeds_mask=valid(TEXT_TOKENS, lambda _: 2),
    negative_prompt_embeds_mask_2=valid(TEXT_TOKENS, lambda _: 1),
)
# The first frame also gives the size.
image_to_video_15 = more(text_to_video_15, image=pixels(), without=("height", "width"))


def lengths(prompts: int) -> Arguments:
    """Return `cu_seqlens` of prompts and negative prompts, by argument.

    They are int32, from 0 in steps of TEXT_TOKENS, as every prompt has so many.
    """
    ends = [TEXT_TOKENS * number for number in range(prompts + 1)]
    return {f"{name}_cu_seqlens": torch.tensor(ends, dtype=torch.int32) for name in ("prompt", "negative_prompt")}


QWEN_AND_CLIP = texts(step=50, prompt_embeds_qwen=(1, TEXT_TOKENS, 16), prompt_embeds_clip=(1, 8))
kandinsky_video = asking(SIDE, num_frames=KANDINSKY_FRAMES, **QWEN_AND_CLIP, **lengths(1))
SINGLE = in_float32("its transformer computes times in float32 and cannot take them in float64")
KANDINSKY = SINGLE | {"doubled": of_two_prompts(kandinsky_video) | lengths(2)}
GUIDED = {"call": call_with_guider}

FAMILIES = [
    family("HunyuanVideoPipeline", "HunyuanVideo", on_hunyuan(TRANSFORMER), text_to_video),
    family("HunyuanVideoPipeline (true guidance)", "HunyuanVideo", on_hunyuan(TRANSFORMER), with_negative),
    family("HunyuanVideoImageToVideoPipeline", "HunyuanVideo", concatenated, image_to_video, images=True),
    family("HunyuanVideoImageToVideoPipeline (first frame replaced)", "HunyuanVideo", replaced, image_to_video, images=True),
    family("HunyuanSkyreelsImageToVideoPipeline", "SkyReels V1", first_frame(in_channels=8), image_to_video, images=True),
    family("HunyuanVideoFramepackPipeline", "FramePack", partial(on_framepack, **SIGLIP), framepack_video, images=True),
    family("HunyuanVideo15Pipeline", "HunyuanVideo 1.5", hunyuan_15, text_to_video_15, **GUIDED),
    family("HunyuanVideo15ImageToVideoPipeline", "HunyuanVideo 1.5", partial(hunyuan_15, **SIGLIP), image_to_video_15, **GUIDED),
    family("Kandinsky5T2VPipeline", "Kandinsky 5", on_kandinsky(visual_cond=False), kandinsky_video, **KANDINSKY),
    family("Kandinsky5I2VPipeline", "Kandinsky 5", on_kandinsky(visual_cond=True), more(kandinsky_video, image=pixels()), **KANDINSKY),
]
