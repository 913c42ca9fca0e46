# SPDX-License-Identifier: Apache-2.0
"""Tiny LTX-2 pipelines of diffusers' real classes: video and sound from one transformer.

Weights are random. Prompts are the hidden states of all layers of a text encoder, which is not there.
"""

from typing import Any

import diffusers
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder

from support.families.rig.tables import assemble, masks, more, pixels
from support.families.videos.shared import family, prompted

TEXT_TOKENS = 8
TEXT_CHANNELS = 16
TEXT_LAYERS = 2


def pipeline(kind: str) -> Any:
    """A pipeline of the class `kind` on a transformer of two blocks. The VAE divides sides by 8 (by 4 when it patches)."""
    return assemble(
        kind,
        transformer=diffusers.LTX2VideoTransformer3DModel(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16,
            audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=2, audio_attention_head_dim=4,
            audio_cross_attention_dim=8, num_layers=2, caption_channels=TEXT_CHANNELS, rope_type="split",
        ),
        connectors=LTX2TextConnectors(
            caption_channels=TEXT_CHANNELS, text_proj_in_factor=TEXT_LAYERS,
            video_connector_num_attention_heads=2, video_connector_attention_head_dim=8, video_connector_num_layers=1,
            video_connector_num_learnable_registers=None,
            audio_connector_num_attention_heads=2, audio_connector_attention_head_dim=8, audio_connector_num_layers=1,
            audio_connector_num_learnable_registers=None, connector_rope_base_seq_len=32, rope_type="split",
        ),
        vae=diffusers.AutoencoderKLLTX2Video(
            latent_channels=4, block_out_channels=(8,), decoder_block_out_channels=(8,), layers_per_block=(1,),
            decoder_layers_per_block=(1, 1), spatio_temporal_scaling=(True,), decoder_spatio_temporal_scaling=(True,),
            decoder_inject_noise=(False, False), downsample_type=("spatial",), upsample_residual=(False,), upsample_factor=(1,),
            patch_size=4, decoder_causal=False,
        ),
        audio_vae=diffusers.AutoencoderKLLTX2Audio(
            base_channels=4, ch_mult=(1,), num_res_blocks=1, resolution=32, latent_channels=2, mel_bins=8,
        ),
        vocoder=LTX2Vocoder(
            in_channels=16, hidden_channels=8, upsample_kernel_sizes=[4, 4], upsample_factors=[2, 2], resnet_kernel_sizes=[3],
            resnet_dilations=[[1, 3, 5]], output_sampling_rate=16000,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    )  # fmt: skip


# Guided by the prompt only, which is two rows of one call.
text_to_video = prompted(
    tokens=TEXT_TOKENS, width=TEXT_CHANNELS * TEXT_LAYERS, **masks(prompt_attention_mask=TEXT_TOKENS), frame_rate=25.0,
    stg_scale=0.0, audio_stg_scale=0.0, modality_scale=1.0, audio_modality_scale=1.0,
)  # fmt: skip
# Guided three ways, as by default: by the prompt, by blocks that are left out, and by each modality alone.
fully_guided = more(
    text_to_video, stg_scale=1.0, audio_stg_scale=1.0, modality_scale=3.0, audio_modality_scale=3.0, spatio_temporal_guidance_blocks=[1]
)

FAMILIES = [
    family("LTX2Pipeline", "LTX 2", pipeline, text_to_video),
    family("LTX2Pipeline (guided three ways)", "LTX 2", pipeline, fully_guided),
    family("LTX2ImageToVideoPipeline", "LTX 2", pipeline, more(text_to_video, image=pixels(), image_crf=0)),
]
