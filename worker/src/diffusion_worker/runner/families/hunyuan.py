# SPDX-License-Identifier: Apache-2.0
"""Hunyuan-DiT, HunyuanImage, and HunyuanVideo with Framepack and 1.5."""

from diffusion_worker.config import StepCache
from diffusion_worker.runner.families.record import ModelRecord, PipelineRecord, Record

RECORDS: tuple[Record, ...] = (
    ModelRecord(
        "HunyuanDiT2DModel",
        signatures={
            "forward": (
                "hidden_states, timestep, encoder_hidden_states=None, text_embedding_mask=None, "
                "encoder_hidden_states_t5=None, text_embedding_mask_t5=None, image_meta_size=None, style=None, "
                "image_rotary_emb=None, controlnet_block_samples=None, return_dict=True"
            )
        },
    ),
    ModelRecord(
        "HunyuanImageTransformer2DModel",
        signatures={
            "forward": (
                "hidden_states, timestep, encoder_hidden_states, encoder_attention_mask, timestep_r=None, "
                "encoder_hidden_states_2=None, encoder_attention_mask_2=None, guidance=None, attention_kwargs=None, "
                "return_dict=True"
            )
        },
        step_caches=frozenset({StepCache.FIRST_BLOCK}),
    ),
    ModelRecord(
        "HunyuanVideoTransformer3DModel",
        signatures={
            "forward": (
                "hidden_states, timestep, encoder_hidden_states, encoder_attention_mask, pooled_projections, "
                "guidance=None, attention_kwargs=None, return_dict=True"
            )
        },
        step_caches=frozenset({StepCache.FIRST_BLOCK, StepCache.TAYLOR_SEER}),
    ),
    ModelRecord(
        "HunyuanVideoFramepackTransformer3DModel",
        signatures={
            "forward": (
                "hidden_states, timestep, encoder_hidden_states, encoder_attention_mask, pooled_projections, image_embeds, "
                "indices_latents, guidance=None, latents_clean=None, indices_latents_clean=None, latents_history_2x=None, "
                "indices_latents_history_2x=None, latents_history_4x=None, indices_latents_history_4x=None, "
                "attention_kwargs=None, return_dict=True"
            )
        },
    ),
    ModelRecord(
        "HunyuanVideo15Transformer3DModel",
        signatures={
            "forward": (
                "hidden_states, timestep, encoder_hidden_states, encoder_attention_mask, timestep_r=None, "
                "encoder_hidden_states_2=None, encoder_attention_mask_2=None, image_embeds=None, attention_kwargs=None, "
                "return_dict=True"
            )
        },
        step_caches=frozenset({StepCache.TAYLOR_SEER}),
    ),
    ModelRecord(
        "AutoencoderKLHunyuanImage",
        signatures={"encode": "x, return_dict=True", "decode": "z, return_dict=True"},
    ),
    ModelRecord(
        "AutoencoderKLHunyuanVideo",
        signatures={"encode": "x, return_dict=True", "decode": "z, return_dict=True"},
    ),
    ModelRecord(
        "AutoencoderKLHunyuanVideo15",
        signatures={"encode": "x, return_dict=True", "decode": "z, return_dict=True"},
    ),
    PipelineRecord("HunyuanImageRefinerPipeline", no_edit="it serves no edits: it refines an image"),
)
