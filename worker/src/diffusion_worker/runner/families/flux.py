# SPDX-License-Identifier: Apache-2.0
"""FLUX.1 with Kontext, ControlNets and VisualCloze, and Chroma."""

from diffusion_worker.config import StepCache
from diffusion_worker.runner.families.record import ModelRecord, PipelineRecord, Record, SequencePlan, TokenCount

TRIED = "diffusers' own plan for --tensor was tried with this class and works"
EXAMPLES = "it serves no edits: it takes rows of example images, and an edit changes one image"

RECORDS: tuple[Record, ...] = (
    ModelRecord(
        "FluxTransformer2DModel",
        signatures={
            "forward": (
                "hidden_states, encoder_hidden_states=None, pooled_projections=None, timestep=None, img_ids=None, "
                "txt_ids=None, guidance=None, joint_attention_kwargs=None, controlnet_block_samples=None, "
                "controlnet_single_block_samples=None, return_dict=True, controlnet_blocks_repeat=False"
            )
        },
        sequence=SequencePlan(tokens=TokenCount.PACKED, pack=2, text="encoder_hidden_states"),
        tensor=TRIED,
        step_caches=frozenset({StepCache.FIRST_BLOCK, StepCache.TAYLOR_SEER, StepCache.MAG_CACHE}),
        mag_ratios="FLUX_MAG_RATIOS",
    ),
    ModelRecord(
        "FluxControlNetModel",
        signatures={
            "forward": (
                "hidden_states, controlnet_cond, controlnet_mode=None, conditioning_scale=1.0, encoder_hidden_states=None, "
                "pooled_projections=None, timestep=None, img_ids=None, txt_ids=None, guidance=None, "
                "joint_attention_kwargs=None, return_dict=True"
            )
        },
    ),
    ModelRecord(
        "ChromaTransformer2DModel",
        signatures={
            "forward": (
                "hidden_states, encoder_hidden_states=None, timestep=None, img_ids=None, txt_ids=None, "
                "attention_mask=None, joint_attention_kwargs=None, controlnet_block_samples=None, "
                "controlnet_single_block_samples=None, return_dict=True, controlnet_blocks_repeat=False"
            )
        },
    ),
    ModelRecord(
        "FluxMultiControlNetModel",
        signatures={
            "forward": (
                "hidden_states, controlnet_cond, controlnet_mode, conditioning_scale, encoder_hidden_states=None, "
                "pooled_projections=None, timestep=None, img_ids=None, txt_ids=None, guidance=None, "
                "joint_attention_kwargs=None, return_dict=True"
            )
        },
    ),
    PipelineRecord("FluxKontextPipeline", references=1, inpaints_by="FluxKontextInpaintPipeline"),
    PipelineRecord("FluxKontextModularPipeline", references=1),
    PipelineRecord("ChromaPipeline", edits_by="ChromaImg2ImgPipeline", inpaints_by="ChromaInpaintPipeline"),
    PipelineRecord("VisualClozePipeline", no_edit=EXAMPLES, cuts_arrays=True),
    PipelineRecord("VisualClozeGenerationPipeline", no_edit=EXAMPLES, cuts_arrays=True),
)
