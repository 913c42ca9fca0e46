# SPDX-License-Identifier: Apache-2.0
"""Bria and its FIBO."""

from diffusion_worker.config import StepCache
from diffusion_worker.runner.families.record import ModelRecord, PipelineRecord, Record

RECORDS: tuple[Record, ...] = (
    ModelRecord(
        "BriaTransformer2DModel",
        signatures={
            "forward": (
                "hidden_states, encoder_hidden_states=None, pooled_projections=None, timestep=None, img_ids=None, "
                "txt_ids=None, guidance=None, attention_kwargs=None, return_dict=True, controlnet_block_samples=None, "
                "controlnet_single_block_samples=None"
            )
        },
        step_caches=frozenset({StepCache.TAYLOR_SEER}),
    ),
    ModelRecord(
        "BriaFiboTransformer2DModel",
        signatures={
            "forward": (
                "hidden_states, encoder_hidden_states=None, text_encoder_layers=None, pooled_projections=None, "
                "timestep=None, img_ids=None, txt_ids=None, guidance=None, joint_attention_kwargs=None, return_dict=True"
            )
        },
    ),
    ModelRecord(
        "BriaFibo2Transformer2DModel",
        signatures={
            "forward": (
                "hidden_states, timestep, encoder_hidden_states, encoder_attention_mask=None, context_latents=None, return_dict=True"
            )
        },
    ),
    PipelineRecord("BriaFibo2Pipeline", references=1),
    PipelineRecord("BriaPipeline", in_float32=("vae",)),
)
