# SPDX-License-Identifier: Apache-2.0
"""A tiny Stable Video Diffusion pipeline of diffusers' real classes with random weights.

A request has no prompt, but an image and how much it shall move.
"""

from typing import Any

import diffusers
import transformers

from support.families.rig.tables import asking, assemble, pixels
from support.families.videos.shared import family

# Pixels. The VAE halves sides and keeps every frame.
SIDE = 16


def pipeline(kind: str) -> Any:
    """A pipeline whose image encoder sees images of 224 pixels: the pipeline makes no others."""
    config = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, projection_dim=16, num_hidden_layers=1, num_attention_heads=2, image_size=224, patch_size=112
    )
    return assemble(
        kind,
        unet=diffusers.UNetSpatioTemporalConditionModel(
            block_out_channels=(32, 32), layers_per_block=1, sample_size=SIDE // 2, in_channels=8, out_channels=4,
            down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), cross_attention_dim=16, num_attention_heads=2,
            projection_class_embeddings_input_dim=3 * 8, addition_time_embed_dim=8,
        ),
        vae=diffusers.AutoencoderKLTemporalDecoder(
            block_out_channels=(32, 32), down_block_types=("DownEncoderBlock2D",) * 2, latent_channels=4, layers_per_block=1,
        ),
        image_encoder=transformers.CLIPVisionModelWithProjection(config),
        feature_extractor=transformers.CLIPImageProcessor(crop_size=32, size=32),
        scheduler=diffusers.EulerDiscreteScheduler(
            prediction_type="v_prediction", timestep_type="continuous", use_karras_sigmas=True, sigma_min=0.002, sigma_max=700.0,
        ),
    )  # fmt: skip


# The amount of motion depends on the seed.
image_to_video = asking(SIDE, scale="max_guidance_scale", num_frames=2, image=pixels(SIDE), motion_bucket_id=lambda seed: 100 + seed)
FIELDS = {"output_type": "pt", "doubled": {"num_videos_per_prompt": 2}}

FAMILIES = [family("StableVideoDiffusionPipeline", "Stable Video Diffusion", pipeline, image_to_video, **FIELDS)]
