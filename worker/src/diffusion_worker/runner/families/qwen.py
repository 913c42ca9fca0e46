# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image with editing, layers and ControlNets, and Qwen-Image 2.1."""

from diffusion_worker.config import StepCache
from diffusion_worker.runner.families.record import (
    MOST_REFERENCES,
    ModelRecord,
    PipelineRecord,
    Record,
    SequencePlan,
    TileShape,
    TokenCount,
    Workaround,
)

TRIED = "diffusers' own plan for --tensor was tried with this class and works"
LAYERS = "it serves no edits: it takes an image apart into layers"

RECORDS: tuple[Record, ...] = (
    ModelRecord(
        "QwenImageTransformer2DModel",
        signatures={
            "forward": (
                "hidden_states, encoder_hidden_states=None, encoder_hidden_states_mask=None, timestep=None, "
                "img_shapes=None, guidance=None, attention_kwargs=None, controlnet_block_samples=None, "
                "additional_t_cond=None, return_dict=True"
            )
        },
        sequence=SequencePlan(tokens=TokenCount.PACKED, pads_text=True),
        tensor=TRIED,
        step_caches=frozenset({StepCache.FIRST_BLOCK, StepCache.TAYLOR_SEER}),
    ),
    ModelRecord(
        "QwenImage21Transformer2DModel",
        signatures={
            "forward": (
                "hidden_states, encoder_hidden_states, timestep, img_shapes, img_mask, encoder_hidden_states_mask=None, "
                "attention_kwargs=None, kv_cache=None, kv_cache_mode=None, return_dict=True"
            )
        },
        step_caches=frozenset({StepCache.TAYLOR_SEER}),
    ),
    ModelRecord(
        "QwenImageControlNetModel",
        signatures={
            "forward": (
                "hidden_states, controlnet_cond, conditioning_scale=1.0, encoder_hidden_states=None, "
                "encoder_hidden_states_mask=None, timestep=None, img_shapes=None, joint_attention_kwargs=None, "
                "return_dict=True"
            )
        },
    ),
    ModelRecord(
        "AutoencoderKLQwenImage",
        signatures={"encode": "x, return_dict=True", "decode": "z, return_dict=True"},
        tiles=TileShape.FRAME,
    ),
    ModelRecord(
        "AutoencoderKLQwenImage21",
        signatures={"encode": "x, return_dict=True", "decode": "z, return_dict=True"},
    ),
    PipelineRecord("QwenImageEditPipeline", references=1, needs_reference=True),
    PipelineRecord("QwenImageEditModularPipeline", references=1, needs_reference=True),
    PipelineRecord("QwenImageEditPlusPipeline", references=MOST_REFERENCES, needs_reference=True),
    PipelineRecord("QwenImageEditPlusModularPipeline", references=MOST_REFERENCES, needs_reference=True),
    PipelineRecord(
        "QwenImage21Pipeline",
        references=MOST_REFERENCES,
        packs=2,
        harmless="every request sets the same hook on the model, and the hook keeps no values",
        workarounds=frozenset({Workaround.HOOK_BEHIND_STAND_IN}),
    ),
    PipelineRecord("QwenImage21ModularPipeline", references=MOST_REFERENCES),
    PipelineRecord("QwenImage21TurboModularPipeline", references=MOST_REFERENCES),
    PipelineRecord("QwenImageLayeredPipeline", no_edit=LAYERS),
    PipelineRecord("QwenImageLayeredModularPipeline", no_edit=LAYERS),
)
