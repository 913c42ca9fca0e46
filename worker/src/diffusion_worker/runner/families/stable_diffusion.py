# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion 1.5, 2 and XL, their ControlNets and motion modules, Stable Video Diffusion, DeepFloyd IF and UniDiffuser."""

from diffusion_worker.runner.families.record import ArgumentRole, ModelRecord, PipelineRecord, Record, Role

GRADIENTS = "needs gradients of the model, which the worker does not compute"
ENLARGES = "it serves no edits: it enlarges the image that it is given"
CONTROL_MODES = "it serves no edits: each of its images needs a number for the kind of control, which no request has"

RECORDS: tuple[Record, ...] = (
    ModelRecord(
        "UNet2DConditionModel",
        signatures={
            "forward": (
                "sample, timestep, encoder_hidden_states, class_labels=None, timestep_cond=None, attention_mask=None, "
                "cross_attention_kwargs=None, added_cond_kwargs=None, down_block_additional_residuals=None, "
                "mid_block_additional_residual=None, down_intrablock_additional_residuals=None, "
                "encoder_attention_mask=None, return_dict=True"
            )
        },
    ),
    ModelRecord(
        "ControlNetModel",
        signatures={
            "forward": (
                "sample, timestep, encoder_hidden_states, controlnet_cond, conditioning_scale=1.0, class_labels=None, "
                "timestep_cond=None, attention_mask=None, added_cond_kwargs=None, cross_attention_kwargs=None, "
                "guess_mode=False, return_dict=True"
            )
        },
    ),
    ModelRecord(
        "MultiControlNetModel",
        signatures={
            "forward": (
                "sample, timestep, encoder_hidden_states, controlnet_cond, conditioning_scale, class_labels=None, "
                "timestep_cond=None, attention_mask=None, added_cond_kwargs=None, cross_attention_kwargs=None, "
                "guess_mode=False, return_dict=True"
            )
        },
    ),
    ModelRecord(
        "T2IAdapter",
        signatures={"forward": "x"},
    ),
    ModelRecord(
        "UNetMotionModel",
        signatures={
            "forward": (
                "sample, timestep, encoder_hidden_states, timestep_cond=None, attention_mask=None, "
                "cross_attention_kwargs=None, added_cond_kwargs=None, down_block_additional_residuals=None, "
                "mid_block_additional_residual=None, return_dict=True"
            )
        },
        roles=(ArgumentRole("encoder_hidden_states", Role.ROW, "it holds the prompt once for each frame of a row"),),
    ),
    ModelRecord(
        "UNetSpatioTemporalConditionModel",
        signatures={"forward": "sample, timestep, encoder_hidden_states, added_time_ids, return_dict=True"},
    ),
    PipelineRecord("StableDiffusionAttendAndExcitePipeline", impossible=GRADIENTS),
    PipelineRecord("StableDiffusionPix2PixZeroPipeline", impossible=GRADIENTS),
    PipelineRecord("UniDiffuserPipeline", image_or_words=True),
    PipelineRecord("KolorsPipeline", edits_by="KolorsImg2ImgPipeline"),
    PipelineRecord("IFImg2ImgSuperResolutionPipeline", no_edit=ENLARGES),
    PipelineRecord("IFInpaintingSuperResolutionPipeline", no_edit=ENLARGES),
    PipelineRecord("IFSuperResolutionPipeline", no_edit=ENLARGES),
    PipelineRecord("LDMSuperResolutionPipeline", no_edit=ENLARGES),
    PipelineRecord("StableDiffusionLatentUpscalePipeline", no_edit=ENLARGES),
    PipelineRecord("StableDiffusionUpscalePipeline", no_edit=ENLARGES),
    PipelineRecord("StableDiffusionXLControlNetUnionImg2ImgPipeline", no_edit=CONTROL_MODES),
    PipelineRecord("StableDiffusionXLControlNetUnionInpaintPipeline", no_edit=CONTROL_MODES),
    PipelineRecord("StableDiffusionXLControlNetUnionPipeline", no_edit=CONTROL_MODES),
)
