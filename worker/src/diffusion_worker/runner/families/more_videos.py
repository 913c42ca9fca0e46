# SPDX-License-Identifier: Apache-2.0
"""Video models with few facts of their own."""

from diffusion_worker.config import StepCache
from diffusion_worker.runner.families.record import ModelRecord, PipelineRecord, Positions, Record

RECORDS: tuple[Record, ...] = (
    ModelRecord(
        "AllegroTransformer3DModel",
        signatures={
            "forward": (
                "hidden_states, encoder_hidden_states, timestep, attention_mask=None, encoder_attention_mask=None, "
                "image_rotary_emb=None, return_dict=True"
            )
        },
    ),
    ModelRecord(
        "CosmosTransformer3DModel",
        signatures={
            "forward": (
                "hidden_states, timestep, encoder_hidden_states, block_controlnet_hidden_states=None, attention_mask=None, "
                "fps=None, condition_mask=None, padding_mask=None, return_dict=True"
            )
        },
        positions=Positions(one_table=True, learned="CosmosLearnablePositionalEmbed"),
    ),
    ModelRecord(
        "EasyAnimateTransformer3DModel",
        signatures={
            "forward": (
                "hidden_states, timestep, timestep_cond=None, encoder_hidden_states=None, encoder_hidden_states_t5=None, "
                "inpaint_latents=None, control_latents=None, return_dict=True"
            )
        },
    ),
    ModelRecord(
        "LatteTransformer3DModel",
        signatures={
            "forward": (
                "hidden_states, timestep=None, encoder_hidden_states=None, encoder_attention_mask=None, "
                "enable_temporal_attentions=True, return_dict=True"
            )
        },
    ),
    ModelRecord(
        "MochiTransformer3DModel",
        signatures={
            "forward": ("hidden_states, encoder_hidden_states, timestep, encoder_attention_mask, attention_kwargs=None, return_dict=True")
        },
        step_caches=frozenset({StepCache.FIRST_BLOCK}),
    ),
    ModelRecord(
        "MotifVideoTransformer3DModel",
        signatures={
            "forward": (
                "hidden_states, timestep, encoder_hidden_states, encoder_attention_mask=None, image_embeds=None, "
                "attention_kwargs=None, return_dict=True"
            )
        },
        step_caches=frozenset({StepCache.TAYLOR_SEER}),
    ),
    ModelRecord(
        "AutoencoderKLAllegro",
        signatures={"encode": "x, return_dict=True", "decode": "z, return_dict=True"},
    ),
    ModelRecord(
        "AutoencoderKLCosmos",
        signatures={"encode": "x, return_dict=True", "decode": "z, return_dict=True"},
    ),
    ModelRecord(
        "AutoencoderKLMagvit",
        signatures={"encode": "x, return_dict=True", "decode": "z, return_dict=True"},
    ),
    ModelRecord(
        "AutoencoderKLMochi",
        signatures={"encode": "x, return_dict=True", "decode": "z, return_dict=True"},
    ),
    ModelRecord(
        "AutoencoderKLTemporalDecoder",
        signatures={"encode": "x, return_dict=True", "decode": "z, num_frames, return_dict=True"},
    ),
    PipelineRecord("AllegroPipeline", in_float32=("vae",)),
)
