# SPDX-License-Identifier: Apache-2.0
"""CogVideoX, CogView and GLM-Image."""

from diffusion_worker.config import StepCache
from diffusion_worker.runner.families.record import MOST_REFERENCES, CacheRecord, ModelRecord, PipelineRecord, Record

RECORDS: tuple[Record, ...] = (
    ModelRecord(
        "CogVideoXTransformer3DModel",
        signatures={
            "forward": (
                "hidden_states, encoder_hidden_states, timestep, timestep_cond=None, ofs=None, image_rotary_emb=None, "
                "attention_kwargs=None, return_dict=True"
            )
        },
        step_caches=frozenset({StepCache.FIRST_BLOCK}),
    ),
    ModelRecord(
        "CogView3PlusTransformer2DModel",
        signatures={"forward": "hidden_states, encoder_hidden_states, timestep, original_size, target_size, crop_coords, return_dict=True"},
    ),
    ModelRecord(
        "CogView4Transformer2DModel",
        signatures={
            "forward": (
                "hidden_states, encoder_hidden_states, timestep, original_size, target_size, crop_coords, "
                "attention_kwargs=None, return_dict=True, attention_mask=None, image_rotary_emb=None"
            )
        },
        step_caches=frozenset({StepCache.FIRST_BLOCK}),
    ),
    ModelRecord(
        "GlmImageTransformer2DModel",
        signatures={
            "forward": (
                "hidden_states, encoder_hidden_states, prior_token_id, prior_token_drop, timestep, target_size, "
                "crop_coords, attention_kwargs=None, return_dict=True, attention_mask=None, kv_caches=None, "
                "image_rotary_emb=None"
            )
        },
    ),
    ModelRecord(
        "AutoencoderKLCogVideoX",
        signatures={"encode": "x, return_dict=True", "decode": "z, return_dict=True"},
    ),
    PipelineRecord("GlmImagePipeline", references=MOST_REFERENCES),
    CacheRecord(
        "GlmImageKVCache", layers="caches", mode="mode", why="the pipeline passes this cache at every step, also without reference images"
    ),
)
