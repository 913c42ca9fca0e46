# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion 3 and 3.5."""

from diffusion_worker.config import StepCache
from diffusion_worker.runner.families.record import ModelRecord, PipelineRecord, Record, SequencePlan, TokenCount, TokenSplit, Workaround

RECORDS: tuple[Record, ...] = (
    ModelRecord(
        "SD3Transformer2DModel",
        signatures={
            "forward": (
                "hidden_states, encoder_hidden_states=None, pooled_projections=None, timestep=None, "
                "block_controlnet_hidden_states=None, joint_attention_kwargs=None, return_dict=True, skip_layers=None"
            )
        },
        sequence=SequencePlan(
            tokens=TokenCount.PATCHED,
            splits=(TokenSplit("pos_embed", 0, 1, 3),),
            gathered="proj_out",
            joint_processor="JointAttnProcessor2_0",
            # The text is on every rank: it is short, and 333 tokens long.
            why="diffusers has no plan to split the tokens of this class, and its attention processor could follow none",
        ),
        step_caches=frozenset({StepCache.FIRST_BLOCK, StepCache.TAYLOR_SEER}),
    ),
    ModelRecord(
        "SD3ControlNetModel",
        signatures={
            "forward": (
                "hidden_states, controlnet_cond, conditioning_scale=1.0, encoder_hidden_states=None, "
                "pooled_projections=None, timestep=None, joint_attention_kwargs=None, return_dict=True"
            )
        },
    ),
    ModelRecord(
        "SD3MultiControlNetModel",
        signatures={
            "forward": (
                "hidden_states, controlnet_cond, conditioning_scale, pooled_projections, encoder_hidden_states=None, "
                "timestep=None, joint_attention_kwargs=None, return_dict=True"
            )
        },
    ),
    PipelineRecord(
        "StableDiffusion3InpaintPipeline",
        masked_channels=33,
        workarounds=frozenset({Workaround.SD3_INPAINTING}),
    ),
)
