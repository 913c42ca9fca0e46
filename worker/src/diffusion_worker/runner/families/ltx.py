# SPDX-License-Identifier: Apache-2.0
"""LTX-Video and LTX 2."""

from diffusion_worker.config import StepCache
from diffusion_worker.runner.families.record import ModelRecord, Record, SequencePlan, TokenCount, TokenSplit

RECORDS: tuple[Record, ...] = (
    ModelRecord(
        "LTXVideoTransformer3DModel",
        signatures={
            "forward": (
                "hidden_states, encoder_hidden_states, timestep, encoder_attention_mask, num_frames=None, height=None, "
                "width=None, rope_interpolation_scale=None, video_coords=None, attention_kwargs=None, return_dict=True"
            )
        },
        sequence=SequencePlan(
            tokens=TokenCount.PACKED,
            splits=(
                TokenSplit("", "hidden_states", 1, 3),
                TokenSplit("", "timestep", 1, 2),
                TokenSplit("rope", 0, 1, 3),
                TokenSplit("rope", 1, 1, 3),
            ),
            gathered="proj_out",
            text_attention="attn2",
            # With an image to start from each token has a time of its own.
            why="diffusers' own plan also splits the text over ranks, and then fails: the text's mask has the heads of all ranks",
        ),
        step_caches=frozenset({StepCache.FIRST_BLOCK}),
    ),
    ModelRecord(
        "LTX2VideoTransformer3DModel",
        signatures={
            "forward": (
                "hidden_states, audio_hidden_states, encoder_hidden_states, audio_encoder_hidden_states, timestep, "
                "audio_timestep=None, sigma=None, audio_sigma=None, encoder_attention_mask=None, "
                "audio_encoder_attention_mask=None, num_frames=None, height=None, width=None, fps=24.0, "
                "audio_num_frames=None, video_coords=None, audio_coords=None, isolate_modalities=False, "
                "spatio_temporal_guidance_blocks=None, perturbation_mask=None, use_cross_timestep=False, "
                "attention_kwargs=None, video_self_attention_mask=None, video_keyframes_mask=None, return_dict=True"
            )
        },
        step_caches=frozenset({StepCache.TAYLOR_SEER}),
    ),
    ModelRecord(
        "LTX2TextConnectors",
        signatures={"forward": "text_encoder_hidden_states, attention_mask, padding_side='left', scale_factor=8"},
    ),
    ModelRecord(
        "LTX2Vocoder",
        signatures={"forward": "hidden_states, time_last=False"},
    ),
    ModelRecord(
        "AutoencoderKLLTXVideo",
        signatures={"encode": "x, return_dict=True", "decode": "z, temb=None, return_dict=True"},
    ),
    ModelRecord(
        "AutoencoderKLLTX2Video",
        signatures={"encode": "x, causal=None, return_dict=True", "decode": "z, temb=None, causal=None, return_dict=True"},
    ),
    ModelRecord(
        "AutoencoderKLLTX2Audio",
        signatures={"encode": "x, return_dict=True", "decode": "z, return_dict=True"},
    ),
)
