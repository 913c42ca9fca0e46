# SPDX-License-Identifier: Apache-2.0
"""DiT, PixArt, Sana and PRX."""

from diffusion_worker.config import StepCache
from diffusion_worker.runner.families.record import ModelRecord, PipelineRecord, Record

RECORDS: tuple[Record, ...] = (
    ModelRecord(
        "DiTTransformer2DModel",
        signatures={"forward": "hidden_states, timestep=None, class_labels=None, cross_attention_kwargs=None, return_dict=True"},
        unsharded="it calls a layer of its first block outside that block, when the block's weights are not gathered",
        step_caches=frozenset({StepCache.FIRST_BLOCK}),
    ),
    ModelRecord(
        "PixArtTransformer2DModel",
        signatures={
            "forward": (
                "hidden_states, encoder_hidden_states=None, timestep=None, added_cond_kwargs=None, "
                "cross_attention_kwargs=None, attention_mask=None, encoder_attention_mask=None, return_dict=True"
            )
        },
        step_caches=frozenset({StepCache.FIRST_BLOCK}),
    ),
    ModelRecord(
        "SanaTransformer2DModel",
        signatures={
            "forward": (
                "hidden_states, encoder_hidden_states, timestep, guidance=None, encoder_attention_mask=None, "
                "attention_mask=None, attention_kwargs=None, controlnet_block_samples=None, return_dict=True"
            )
        },
    ),
    ModelRecord(
        "SanaVideoTransformer3DModel",
        signatures={
            "forward": (
                "hidden_states, encoder_hidden_states, timestep, guidance=None, encoder_attention_mask=None, "
                "attention_mask=None, attention_kwargs=None, controlnet_block_samples=None, return_dict=True"
            )
        },
    ),
    ModelRecord(
        "PRXTransformer2DModel",
        signatures={
            "forward": ("hidden_states, timestep, encoder_hidden_states, attention_mask=None, attention_kwargs=None, return_dict=True")
        },
    ),
    ModelRecord(
        "AutoencoderDC",
        signatures={"encode": "x, return_dict=True", "decode": "z, return_dict=True"},
    ),
    PipelineRecord("SanaSprintPipeline", edits_by="SanaSprintImg2ImgPipeline"),
    PipelineRecord("SanaVideoPipeline", in_float32=("vae",)),
    PipelineRecord("SanaImageToVideoPipeline", in_float32=("vae",)),
)
