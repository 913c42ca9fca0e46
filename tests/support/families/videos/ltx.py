# SPDX-License-Identifier: Apache-2.0
"""Tiny pipelines of LTX-Video, and of LTX-2, which makes video and sound with one transformer.

Weights are random, and prompts are embeddings with a mask. Those of LTX-2 are the hidden states of all layers of a text encoder,
which is not there.
"""

from functools import partial

import torch
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder

from support.families.rig.family import dynamic_flow, flow
from support.families.rig.tables import masks, more, on, part, pixels
from support.families.videos.shared import family, prompted, short_prompts

TEXT_TOKENS = 8
TEXT_LAYERS = 2

# The VAE divides sides by 8 (once by its own blocks, by 4 when it patches) and keeps every second frame.
vae = part(
    "AutoencoderKLLTXVideo", latent_channels=8, block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8),
    layers_per_block=(1, 1, 1, 1, 1), decoder_layers_per_block=(1, 1, 1, 1, 1), spatio_temporal_scaling=(True, True, False, False),
    decoder_spatio_temporal_scaling=(True, True, False, False), decoder_inject_noise=(False, False, False, False, False),
    upsample_residual=(False, False, False, False), upsample_factor=(1, 1, 1, 1), timestep_conditioning=False, patch_size=1,
    patch_size_t=1, encoder_causal=True, decoder_causal=False,
)  # fmt: skip
# The schedule is shifted by the video's size.
pipeline = on(
    "LTXVideoTransformer3DModel", vae=vae, scheduler=dynamic_flow, in_channels=8, out_channels=8, attention_head_dim=8,
    cross_attention_dim=16, num_layers=2,
)  # fmt: skip
vae_2 = part(
    "AutoencoderKLLTX2Video", latent_channels=4, block_out_channels=(8,), decoder_block_out_channels=(8,), layers_per_block=(1,),
    decoder_layers_per_block=(1, 1), spatio_temporal_scaling=(True,), decoder_spatio_temporal_scaling=(True,),
    decoder_inject_noise=(False, False), downsample_type=("spatial",), upsample_residual=(False,), upsample_factor=(1,),
    patch_size=4, decoder_causal=False,
)  # fmt: skip
on_ltx2 = on(
    "LTX2VideoTransformer3DModel", vae=vae_2, scheduler=dynamic_flow, attention_head_dim=8, cross_attention_dim=16,
    audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=2, audio_attention_head_dim=4, audio_cross_attention_dim=8,
    num_layers=2, rope_type="split",
)  # fmt: skip
# Connectors from the text encoder to the transformer, with one block for video and one for sound.
CONNECTOR = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "num_learnable_registers": None}
connectors = partial(
    LTX2TextConnectors, caption_channels=16, text_proj_in_factor=TEXT_LAYERS, connector_rope_base_seq_len=32, rope_type="split",
    **{f"{kind}_connector_{name}": value for kind in ("video", "audio") for name, value in CONNECTOR.items()},
)  # fmt: skip
vocoder = partial(
    LTX2Vocoder, in_channels=16, hidden_channels=8, upsample_kernel_sizes=[4, 4], upsample_factors=[2, 2], resnet_kernel_sizes=[3],
    resnet_dilations=[[1, 3, 5]], output_sampling_rate=16000,
)  # fmt: skip
audio_vae = part("AutoencoderKLLTX2Audio", base_channels=4, ch_mult=(1,), num_res_blocks=1, resolution=32, latent_channels=2, mel_bins=8)
ltx2 = partial(on_ltx2, connectors=connectors, audio_vae=audio_vae, vocoder=vocoder)

text_to_video = prompted(**short_prompts(torch.float32), frame_rate=25)
image_to_video = more(text_to_video, image=pixels())
# The video shows the image from a given frame on, with a strength.
conditioned_video = more(image_to_video, strength=0.8)
# Guided by the prompt only, which is two rows of one call.
text_to_both = prompted(
    tokens=TEXT_TOKENS, width=16 * TEXT_LAYERS, **masks(prompt_attention_mask=TEXT_TOKENS), frame_rate=25.0,
    stg_scale=0.0, audio_stg_scale=0.0, modality_scale=1.0, audio_modality_scale=1.0,
)  # fmt: skip
# Three kinds of guidance, as by default: by the prompt, by skipped blocks, and by each modality alone.
fully_guided = more(
    text_to_both, stg_scale=1.0, audio_stg_scale=1.0, modality_scale=3.0, audio_modality_scale=3.0, spatio_temporal_guidance_blocks=[1]
)

FAMILIES = [
    family("LTXPipeline", "LTX", pipeline, text_to_video, output_type="pt"),
    family("LTXImageToVideoPipeline", "LTX", pipeline, image_to_video, output_type="pt"),
    family("LTXConditionPipeline", "LTX", partial(pipeline, scheduler=flow), conditioned_video, output_type="pt"),
    family("LTX2Pipeline", "LTX 2", ltx2, text_to_both),
    family("LTX2Pipeline (guided three ways)", "LTX 2", ltx2, fully_guided),
    family("LTX2ImageToVideoPipeline", "LTX 2", ltx2, more(text_to_both, image=pixels(), image_crf=0)),
]
