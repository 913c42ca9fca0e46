# SPDX-License-Identifier: Apache-2.0
"""Tiny LTX-2 pipelines: video and sound from one transformer. Prompts are the hidden states of all layers of a text encoder."""

from collections.abc import Callable
from typing import Any

import diffusers
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder

from support.families.rig.family import Arguments, Family, build_seeded, image, seeded, token_mask
from support.families.rig.two_rows import of_two_prompts

# Pixels and frames. The VAE divides sides by 8 (by 4 when it patches): latents of 4 x 4.
SIDE = 32
FRAMES = 5
TEXT_TOKENS = 8
TEXT_CHANNELS = 16
TEXT_LAYERS = 2


def pipeline(kind: str) -> Any:
    """A pipeline of the class `kind` on a transformer of two blocks."""
    return getattr(diffusers, kind)(
        transformer=diffusers.LTX2VideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=8,
            cross_attention_dim=16,
            audio_in_channels=4,
            audio_out_channels=4,
            audio_num_attention_heads=2,
            audio_attention_head_dim=4,
            audio_cross_attention_dim=8,
            num_layers=2,
            caption_channels=TEXT_CHANNELS,
            rope_type="split",
        ),
        connectors=LTX2TextConnectors(
            caption_channels=TEXT_CHANNELS,
            text_proj_in_factor=TEXT_LAYERS,
            video_connector_num_attention_heads=2,
            video_connector_attention_head_dim=8,
            video_connector_num_layers=1,
            video_connector_num_learnable_registers=None,
            audio_connector_num_attention_heads=2,
            audio_connector_attention_head_dim=8,
            audio_connector_num_layers=1,
            audio_connector_num_learnable_registers=None,
            connector_rope_base_seq_len=32,
            rope_type="split",
        ),
        vae=diffusers.AutoencoderKLLTX2Video(
            latent_channels=4,
            block_out_channels=(8,),
            decoder_block_out_channels=(8,),
            layers_per_block=(1,),
            decoder_layers_per_block=(1, 1),
            spatio_temporal_scaling=(True,),
            decoder_spatio_temporal_scaling=(True,),
            decoder_inject_noise=(False, False),
            downsample_type=("spatial",),
            upsample_residual=(False,),
            upsample_factor=(1,),
            patch_size=4,
            decoder_causal=False,
        ),
        audio_vae=diffusers.AutoencoderKLLTX2Audio(
            base_channels=4,
            ch_mult=(1,),
            num_res_blocks=1,
            resolution=32,
            latent_channels=2,
            mel_bins=8,
        ),
        vocoder=LTX2Vocoder(
            in_channels=16,
            hidden_channels=8,
            upsample_kernel_sizes=[4, 4],
            upsample_factors=[2, 2],
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1, 3, 5]],
            output_sampling_rate=16000,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        text_encoder=None,
        tokenizer=None,
    )


def text_to_video(seed: int, steps: int, guidance: float) -> Arguments:
    """A prompt of another length for each seed; guided by the prompt only, which is two rows of one call."""
    return {
        "prompt_embeds": seeded(seed, 1, TEXT_TOKENS, TEXT_CHANNELS * TEXT_LAYERS),
        "prompt_attention_mask": token_mask(seed, TEXT_TOKENS),
        "negative_prompt_embeds": seeded(seed + 100, 1, TEXT_TOKENS, TEXT_CHANNELS * TEXT_LAYERS),
        "negative_prompt_attention_mask": token_mask(seed + 1, TEXT_TOKENS),
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "stg_scale": 0.0,
        "audio_stg_scale": 0.0,
        "modality_scale": 1.0,
        "audio_modality_scale": 1.0,
        "height": SIDE,
        "width": SIDE,
        "num_frames": FRAMES,
        "frame_rate": 25.0,
    }


def fully_guided(seed: int, steps: int, guidance: float) -> Arguments:
    """Guided three ways, as by default: by the prompt, by blocks that are left out, and by each modality alone."""
    scales = {"stg_scale": 1.0, "audio_stg_scale": 1.0, "modality_scale": 3.0, "audio_modality_scale": 3.0}
    return text_to_video(seed, steps, guidance) | scales | {"spatio_temporal_guidance_blocks": [1]}


def image_to_video(seed: int, steps: int, guidance: float) -> Arguments:
    """The first frame as well."""
    return text_to_video(seed, steps, guidance) | {"image": image(seed, SIDE, SIDE), "image_crf": 0}


def _family(kind: str, request: Callable[[int, int, float], Arguments], variant: str = "") -> Family:
    name = f"{kind} ({variant})" if variant else kind
    return Family(name, "LTX 2", build_seeded(lambda: pipeline(kind)), request, doubled=of_two_prompts(request))


FAMILIES = [
    _family("LTX2Pipeline", text_to_video),
    _family("LTX2Pipeline", fully_guided, "guided three ways"),
    _family("LTX2ImageToVideoPipeline", image_to_video),
]
