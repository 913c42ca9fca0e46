# SPDX-License-Identifier: Apache-2.0
"""Models that several families share: the VAE of Stable Diffusion, encoders of text and images."""

from diffusion_worker.runner.families.record import ModelRecord, Record, TileShape

RECORDS: tuple[Record, ...] = (
    ModelRecord(
        "AutoencoderKL",
        signatures={"encode": "x, return_dict=True", "decode": "z, return_dict=True, generator=None"},
        tiles=TileShape.IMAGE,
    ),
    ModelRecord(
        "CLIPTextModel",
        library="transformers",
        signatures={"forward": "input_ids=None, attention_mask=None, position_ids=None, **kwargs"},
    ),
    ModelRecord(
        "CLIPTextModelWithProjection",
        library="transformers",
        signatures={"forward": "input_ids=None, attention_mask=None, position_ids=None, **kwargs"},
    ),
    ModelRecord(
        "CLIPVisionModel",
        library="transformers",
        signatures={"forward": "pixel_values=None, interpolate_pos_encoding=False, **kwargs"},
    ),
    ModelRecord(
        "CLIPVisionModelWithProjection",
        library="transformers",
        signatures={"forward": "pixel_values=None, interpolate_pos_encoding=False, **kwargs"},
    ),
    ModelRecord(
        "SiglipVisionModel",
        library="transformers",
        signatures={"forward": "pixel_values, interpolate_pos_encoding=False, **kwargs"},
    ),
    ModelRecord(
        "T5EncoderModel",
        library="transformers",
        signatures={"forward": "input_ids=None, attention_mask=None, inputs_embeds=None, **kwargs"},
    ),
    ModelRecord(
        "Qwen2_5_VLForConditionalGeneration",
        library="transformers",
        signatures={
            "forward": (
                "input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, "
                "labels=None, use_cache=None, pixel_values=None, pixel_values_videos=None, image_grid_thw=None, "
                "video_grid_thw=None, mm_token_type_ids=None, second_per_grid_ts=None, logits_to_keep=0, "
                "mm_encoder_outputs=None, **kwargs"
            )
        },
    ),
)
