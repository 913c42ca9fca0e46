# SPDX-License-Identifier: Apache-2.0
"""Kandinsky, Stable Cascade and Wuerstchen."""

from diffusion_worker.runner.families.record import MOST_REFERENCES, ModelRecord, PipelineRecord, Record

RECORDS: tuple[Record, ...] = (
    ModelRecord(
        "Kandinsky3UNet",
        signatures={"forward": "sample, timestep, encoder_hidden_states=None, encoder_attention_mask=None, return_dict=True"},
    ),
    ModelRecord(
        "Kandinsky5Transformer3DModel",
        signatures={
            "forward": (
                "hidden_states, encoder_hidden_states, timestep, pooled_projections, visual_rope_pos, text_rope_pos, "
                "scale_factor=(1.0, 1.0, 1.0), sparse_params=None, return_dict=True"
            )
        },
    ),
    ModelRecord(
        "StableCascadeUNet",
        signatures={
            "forward": (
                "sample, timestep_ratio, clip_text_pooled, clip_text=None, clip_img=None, effnet=None, pixels=None, "
                "sca=None, crp=None, return_dict=True"
            )
        },
    ),
    ModelRecord(
        "PaellaVQModel",
        signatures={"encode": "x, return_dict=True", "decode": "h, force_not_quantize=True, return_dict=True"},
    ),
    ModelRecord(
        "VQModel",
        signatures={"encode": "x, return_dict=True", "decode": "h, force_not_quantize=False, return_dict=True, shape=None"},
    ),
    PipelineRecord("StableCascadeCombinedPipeline", references=MOST_REFERENCES),
)
