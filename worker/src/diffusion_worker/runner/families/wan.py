# SPDX-License-Identifier: Apache-2.0
"""Wan, and the models that were made of it: VACE, SkyReels V2, ChronoEdit, AnyFlow."""

from diffusion_worker.config import StepCache
from diffusion_worker.runner.families.record import ModelRecord, Record, SequencePlan, TokenCount

RECORDS: tuple[Record, ...] = (
    ModelRecord(
        "WanTransformer3DModel",
        version="diffusers 0.42.1",
        signatures={
            "forward": (
                "hidden_states, timestep, encoder_hidden_states, encoder_hidden_states_image=None, return_dict=True, attention_kwargs=None"
            )
        },
        sequence=SequencePlan(tokens=TokenCount.PATCHED),
        step_caches=frozenset({StepCache.FIRST_BLOCK}),
    ),
    ModelRecord(
        "WanVACETransformer3DModel",
        version="diffusers 0.42.1",
        signatures={
            "forward": (
                "hidden_states, timestep, encoder_hidden_states, encoder_hidden_states_image=None, "
                "control_hidden_states=None, control_hidden_states_scale=None, return_dict=True, attention_kwargs=None"
            )
        },
    ),
    ModelRecord(
        "SkyReelsV2Transformer3DModel",
        version="diffusers 0.42.1",
        signatures={
            "forward": (
                "hidden_states, timestep, encoder_hidden_states, encoder_hidden_states_image=None, "
                "enable_diffusion_forcing=False, fps=None, return_dict=True, attention_kwargs=None"
            )
        },
    ),
    ModelRecord(
        "ChronoEditTransformer3DModel",
        version="diffusers 0.42.1",
        signatures={
            "forward": (
                "hidden_states, timestep, encoder_hidden_states, encoder_hidden_states_image=None, return_dict=True, attention_kwargs=None"
            )
        },
    ),
    ModelRecord(
        "AnyFlowTransformer3DModel",
        version="diffusers 0.42.1",
        signatures={
            "forward": (
                "hidden_states, timestep, r_timestep, encoder_hidden_states, encoder_hidden_states_image=None, "
                "attention_kwargs=None, return_dict=True"
            )
        },
    ),
    ModelRecord(
        "AutoencoderKLWan",
        version="diffusers 0.42.1",
        signatures={"encode": "x, return_dict=True", "decode": "z, return_dict=True"},
    ),
)
