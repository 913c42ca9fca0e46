# SPDX-License-Identifier: Apache-2.0
"""Tiny video pipelines of models outside of larger families: Allegro, AnimateDiff, CogVideoX, EasyAnimate, Latte, Mochi, Stable Video
Diffusion.

Weights are random, and prompts are embeddings, some of them with a mask. Stable Video Diffusion has an image in place of a prompt.
"""

import warnings
from functools import partial
from typing import Any

import torch
import transformers

from support.families.rig.family import flow, plain_ddim, tiny_vae
from support.families.rig.tables import asking, assemble, film, halfway, more, on, part, pixels, valid
from support.families.videos.shared import SIDE, TEXT_TOKENS, family, prompted, short_prompts

# Pixels for AnimateDiff, Latte and Stable Video Diffusion, whose VAEs halve sides and keep every frame.
HALVED_SIDE = 16
# CogVideoX needs more: its VAE keeps every fourth frame.
COGVIDEO_FRAMES = 9
SAMPLES = {"sample_width": SIDE // 8, "sample_height": SIDE // 8}
COGVIDEO_BLOCKS = {"down_block_types": ("CogVideoXDownBlock3D",) * 4, "up_block_types": ("CogVideoXUpBlock3D",) * 4}

allegro = on(
    "AllegroTransformer3DModel", scheduler=plain_ddim, attention_head_dim=12, num_layers=1, cross_attention_dim=24, sample_frames=2,
    vae=part("AutoencoderKLAllegro", block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=2, latent_channels=4), **SAMPLES,
)  # fmt: skip
# An image model with motion modules at every resolution.
animatediff = partial(
    assemble,
    unet=part(
        "UNet2DConditionModel", block_out_channels=(16, 32), layers_per_block=1, sample_size=HALVED_SIDE // 2, cross_attention_dim=16,
        attention_head_dim=8, norm_num_groups=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
    motion_adapter=part(
        "MotionAdapter", block_out_channels=(16, 32), motion_layers_per_block=1, motion_num_attention_heads=2, motion_norm_num_groups=8,
    ),
    vae=tiny_vae,
    scheduler=partial(plain_ddim, beta_schedule="linear"),
)  # fmt: skip
cogvideo_vae = part(
    "AutoencoderKLCogVideoX", block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=2, **COGVIDEO_BLOCKS
)
on_cogvideo = partial(
    on, "CogVideoXTransformer3DModel", vae=cogvideo_vae, scheduler=part("CogVideoXDDIMScheduler"), time_embed_dim=4, num_layers=1,
    sample_frames=COGVIDEO_FRAMES, patch_size=2, temporal_compression_ratio=4, max_text_seq_length=TEXT_TOKENS,
    use_rotary_positional_embeddings=True, **SAMPLES,
)  # fmt: skip
cogvideo = on_cogvideo()
cogvideo_dpm = partial(cogvideo, scheduler=part("CogVideoXDPMScheduler"))
with_condition = on_cogvideo(in_channels=8)
magvit = part(
    "AutoencoderKLMagvit", latent_channels=4, block_out_channels=[8, 8, 8, 8], layers_per_block=1, norm_num_groups=4,
    spatial_group_norm=False,
)  # fmt: skip
easyanimate = on(
    "EasyAnimateTransformer3DModel", vae=magvit, scheduler=partial(flow, shift=5.0), patch_size=2, num_layers=2, mmdit_layers=2,
    time_embed_dim=4, **SAMPLES,
)  # fmt: skip
# The transformer also predicts a variance that is thrown away.
latte = on(
    "LatteTransformer3DModel", vae=tiny_vae, scheduler=plain_ddim, sample_size=HALVED_SIDE // 2, num_layers=1, patch_size=2,
    attention_head_dim=8, cross_attention_dim=16, out_channels=8, attention_bias=True, activation_fn="gelu-approximate",
    num_embeds_ada_norm=1000, norm_type="ada_norm_single", norm_elementwise_affine=False, video_length=2,
)  # fmt: skip
# The VAE divides sides by 8 and keeps every sixth frame.
mochi_vae = part(
    "AutoencoderKLMochi", latent_channels=12, out_channels=3, encoder_block_out_channels=(32, 32, 32, 32),
    decoder_block_out_channels=(32, 32, 32, 32), layers_per_block=(1, 1, 1, 1, 1),
)  # fmt: skip
on_mochi = on(
    "MochiTransformer3DModel", vae=mochi_vae, scheduler=partial(flow, invert_sigmas=True), patch_size=2, attention_head_dim=8,
    num_layers=2, pooled_projection_dim=16, in_channels=12, out_channels=None, time_embed_dim=4, max_sequence_length=TEXT_TOKENS,
)  # fmt: skip


def mochi(kind: str) -> Any:
    """Build a Mochi pipeline without torch's warning about autocast to float32 on a CPU; its positions are in float32 anyway."""
    built = on_mochi(kind)
    forward = built.transformer.rope.forward

    def quiet(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="In CPU autocast")
            return forward(*args, **kwargs)

    built.transformer.rope.forward = quiet
    return built


def clip_vision() -> Any:
    """Build an image encoder for images of 224 pixels, the only size that Stable Video Diffusion makes."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "projection_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.CLIPVisionModelWithProjection(transformers.CLIPVisionConfig(**sizes, image_size=224, patch_size=112))


svd = partial(
    assemble,
    unet=part(
        "UNetSpatioTemporalConditionModel", block_out_channels=(32, 32), layers_per_block=1, sample_size=HALVED_SIDE // 2, in_channels=8,
        out_channels=4, down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), cross_attention_dim=16, num_attention_heads=2,
        projection_class_embeddings_input_dim=3 * 8, addition_time_embed_dim=8,
    ),
    vae=part(
        "AutoencoderKLTemporalDecoder", block_out_channels=(32, 32), down_block_types=("DownEncoderBlock2D",) * 2, latent_channels=4,
        layers_per_block=1,
    ),
    image_encoder=clip_vision,
    feature_extractor=lambda: transformers.CLIPImageProcessor(crop_size=32, size=32),
    scheduler=part(
        "EulerDiscreteScheduler", prediction_type="v_prediction", timestep_type="continuous", use_karras_sigmas=True, sigma_min=0.002,
        sigma_max=700.0,
    ),
)  # fmt: skip

allegro_video = prompted(**short_prompts(), negative_prompt=None)
animated = prompted(HALVED_SIDE, num_frames=3)
animated_again = halfway(animated, video=film(3, HALVED_SIDE), without=("num_frames",))
cogvideo_text = prompted(num_frames=COGVIDEO_FRAMES, max_sequence_length=TEXT_TOKENS)
# A video to follow, or to start from, is as long as the result.
follow_video = more(cogvideo_text, control_video=film(COGVIDEO_FRAMES), without=("num_frames",))
video_to_video = halfway(cogvideo_text, video=film(COGVIDEO_FRAMES), without=("num_frames",))
every_token = valid(TEXT_TOKENS, dtype=torch.float32)
easyanimate_video = prompted(prompt_attention_mask=every_token, negative_prompt_attention_mask=every_token)
latte_video = more(prompted(HALVED_SIDE, video_length=2, negative_prompt=None), without=("num_frames",))
mochi_video = prompted(**short_prompts(torch.bool), num_frames=7)
# No prompt, but an image and its amount of motion, which depends on the seed.
MOTION = {"motion_bucket_id": lambda seed: 100 + seed}
svd_video = asking(HALVED_SIDE, scale="max_guidance_scale", num_frames=2, image=pixels(HALVED_SIDE), **MOTION)
SVD = {"output_type": "pt", "doubled": {"num_videos_per_prompt": 2}}

FAMILIES = [
    family("AllegroPipeline", "Allegro", allegro, allegro_video),
    family("AnimateDiffPipeline", "AnimateDiff", animatediff, animated, output_type="pt"),
    family("AnimateDiffVideoToVideoPipeline", "AnimateDiff", animatediff, animated_again, images=True, output_type="pt"),
    family("CogVideoXPipeline", "CogVideoX", cogvideo, cogvideo_text),
    family("CogVideoXPipeline (DPM)", "CogVideoX", cogvideo_dpm, cogvideo_text),
    family("CogVideoXImageToVideoPipeline", "CogVideoX", with_condition, more(cogvideo_text, image=pixels()), images=True),
    family("CogVideoXVideoToVideoPipeline", "CogVideoX", cogvideo, video_to_video),
    family("CogVideoXFunControlPipeline", "CogVideoX", with_condition, follow_video, images=True),
    family("EasyAnimatePipeline", "EasyAnimate", easyanimate, easyanimate_video),
    family("LattePipeline", "Latte", latte, latte_video),
    family("MochiPipeline", "Mochi", mochi, mochi_video),
    family("StableVideoDiffusionPipeline", "Stable Video Diffusion", svd, svd_video, **SVD),
]
