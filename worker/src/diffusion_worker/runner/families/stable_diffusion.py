# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion 1.5, 2 and XL, their ControlNets and motion modules, Stable Video Diffusion, DeepFloyd IF and UniDiffuser."""

from diffusion_worker.runner.families.record import ArgumentRole, ModelRecord, PipelineRecord, Record, Role

GRADIENTS = "needs gradients of the model, which the worker does not compute"
ENLARGES = "it serves no edits: it enlarges the image that it is given"
CONTROL_MODES = "it serves no edits: each of its images needs a number for the kind of control, which no request has"

RECORDS: tuple[Record, ...] = (
    ModelRecord(
        "UNet2DConditionModel",
        version="diffusers 0.42.1",
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
        version="diffusers 0.42.1",
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
        version="diffusers 0.42.1",
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
        version="diffusers 0.42.1",
        signatures={"forward": "x"},
    ),
    ModelRecord(
        "UNetMotionModel",
        version="diffusers 0.42.1",
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
        version="diffusers 0.42.1",
        signatures={"forward": "sample, timestep, encoder_hidden_states, added_time_ids, return_dict=True"},
    ),
    PipelineRecord("StableDiffusionAttendAndExcitePipeline", version="diffusers 0.42.1", impossible=GRADIENTS),
    PipelineRecord("StableDiffusionPix2PixZeroPipeline", version="diffusers 0.42.1", impossible=GRADIENTS),
    PipelineRecord("UniDiffuserPipeline", version="diffusers 0.42.1", image_or_words=True),
    PipelineRecord("KolorsPipeline", version="diffusers 0.42.1", edits_by="KolorsImg2ImgPipeline"),
    PipelineRecord("IFImg2ImgSuperResolutionPipeline", version="diffusers 0.42.1", no_edit=ENLARGES),
    PipelineRecord("IFInpaintingSuperResolutionPipeline", version="diffusers 0.42.1", no_edit=ENLARGES),
    PipelineRecord("IFSuperResolutionPipeline", version="diffusers 0.42.1", no_edit=ENLARGES),
    PipelineRecord("LDMSuperResolutionPipeline", version="diffusers 0.42.1", no_edit=ENLARGES),
    PipelineRecord("StableDiffusionLatentUpscalePipeline", version="diffusers 0.42.1", no_edit=ENLARGES),
    PipelineRecord("StableDiffusionUpscalePipeline", version="diffusers 0.42.1", no_edit=ENLARGES),
    PipelineRecord("StableDiffusionXLControlNetUnionImg2ImgPipeline", version="diffusers 0.42.1", no_edit=CONTROL_MODES),
    PipelineRecord("StableDiffusionXLControlNetUnionInpaintPipeline", version="diffusers 0.42.1", no_edit=CONTROL_MODES),
    PipelineRecord("StableDiffusionXLControlNetUnionPipeline", version="diffusers 0.42.1", no_edit=CONTROL_MODES),
)
