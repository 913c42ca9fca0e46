# SPDX-License-Identifier: Apache-2.0
"""Lumina, Z-Image and OmniGen."""

from diffusion_worker.runner.families.record import MOST_REFERENCES, ArgumentRole, ModelRecord, PipelineRecord, Positions, Record, Role

RECORDS: tuple[Record, ...] = (
    ModelRecord(
        "LuminaNextDiT2DModel",
        signatures={
            "forward": (
                "hidden_states, timestep, encoder_hidden_states, encoder_mask, image_rotary_emb, "
                "cross_attention_kwargs=None, return_dict=True"
            )
        },
        positions=Positions(side=384),
    ),
    ModelRecord(
        "Lumina2Transformer2DModel",
        signatures={
            "forward": ("hidden_states, timestep, encoder_hidden_states, encoder_attention_mask, attention_kwargs=None, return_dict=True")
        },
    ),
    ModelRecord(
        "ZImageTransformer2DModel",
        signatures={
            "forward": (
                "x, t, cap_feats, return_dict=True, controlnet_block_samples=None, siglip_feats=None, "
                "image_noise_mask=None, patch_size=2, f_patch_size=1, joint_attention_kwargs=None"
            )
        },
    ),
    ModelRecord(
        "ZImageControlNetModel",
        signatures={"forward": "x, t, cap_feats, control_context, conditioning_scale=1.0, patch_size=2, f_patch_size=1"},
    ),
    ModelRecord(
        "OmniGenTransformer2DModel",
        signatures={
            "forward": (
                "hidden_states, timestep, input_ids, input_img_latents, input_image_sizes, attention_mask, position_ids, return_dict=True"
            )
        },
        roles=(ArgumentRole("position_ids", Role.EQUAL, "the model reads these positions of the first row only, unlike Ideogram 4"),),
    ),
    PipelineRecord("ZImageOmniPipeline", references=MOST_REFERENCES),
)
