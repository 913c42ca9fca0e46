# SPDX-License-Identifier: Apache-2.0
"""Image models with few facts of their own."""

from diffusion_worker.config import StepCache
from diffusion_worker.runner.families.record import MOST_REFERENCES, ArgumentRole, ModelRecord, PipelineRecord, Positions, Record, Role

RECORDS: tuple[Record, ...] = (
    ModelRecord(
        "AuraFlowTransformer2DModel",
        signatures={"forward": "hidden_states, encoder_hidden_states=None, timestep=None, attention_kwargs=None, return_dict=True"},
        step_caches=frozenset({StepCache.TAYLOR_SEER}),
        positions=Positions(by_area=True),
    ),
    ModelRecord(
        "AnimaTextConditioner",
        signatures={"forward": "source_hidden_states, target_input_ids, target_attention_mask=None, source_attention_mask=None"},
    ),
    ModelRecord(
        "ErnieImageTransformer2DModel",
        signatures={"forward": "hidden_states, timestep, text_bth, text_lens, return_dict=True"},
    ),
    ModelRecord(
        "HiDreamImageTransformer2DModel",
        signatures={
            "forward": (
                "hidden_states, timesteps=None, encoder_hidden_states_t5=None, encoder_hidden_states_llama3=None, "
                "pooled_embeds=None, img_ids=None, img_sizes=None, hidden_states_masks=None, attention_kwargs=None, "
                "return_dict=True"
            )
        },
        roles=(ArgumentRole("encoder_hidden_states_llama3", Role.COLUMN, "its first dimension is the layers, its second the rows"),),
    ),
    ModelRecord(
        "Ideogram4Transformer2DModel",
        signatures={
            "forward": (
                "hidden_states, timestep, encoder_hidden_states, position_ids, segment_ids, indicator, "
                "attention_kwargs=None, return_dict=True"
            )
        },
    ),
    ModelRecord(
        "Krea2Transformer2DModel",
        signatures={
            "forward": (
                "hidden_states, encoder_hidden_states, timestep, position_ids, encoder_attention_mask=None, "
                "attention_kwargs=None, return_dict=True"
            )
        },
    ),
    ModelRecord(
        "LongCatImageTransformer2DModel",
        signatures={
            "forward": (
                "hidden_states, encoder_hidden_states=None, timestep=None, img_ids=None, txt_ids=None, guidance=None, return_dict=True"
            )
        },
        step_caches=frozenset({StepCache.TAYLOR_SEER}),
    ),
    ModelRecord(
        "NucleusMoEImageTransformer2DModel",
        signatures={
            "forward": (
                "hidden_states, img_shapes, encoder_hidden_states=None, encoder_hidden_states_mask=None, timestep=None, "
                "attention_kwargs=None, return_dict=True"
            )
        },
    ),
    ModelRecord(
        "OvisImageTransformer2DModel",
        signatures={
            "forward": (
                "hidden_states, encoder_hidden_states=None, timestep=None, img_ids=None, txt_ids=None, "
                "joint_attention_kwargs=None, return_dict=True"
            )
        },
        step_caches=frozenset({StepCache.TAYLOR_SEER}),
    ),
    ModelRecord(
        "UVit2DModel",
        signatures={"forward": "input_ids, encoder_hidden_states, pooled_text_emb, micro_conds, cross_attention_kwargs=None"},
    ),
    PipelineRecord("AmusedPipeline", edits_by="AmusedImg2ImgPipeline", inpaints_by="AmusedInpaintPipeline"),
    PipelineRecord("DreamLitePipeline", references=1),
    PipelineRecord("DreamLiteMobilePipeline", references=1),
    PipelineRecord("JoyImageEditPipeline", references=1),
    PipelineRecord("JoyImageEditPlusPipeline", references=MOST_REFERENCES),
)
