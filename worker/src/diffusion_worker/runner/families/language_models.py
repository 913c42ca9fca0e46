# SPDX-License-Identifier: Apache-2.0
"""Language models that encode the prompts of pipelines."""

from diffusion_worker.runner.families.record import ModelRecord, Record

RECORDS: tuple[Record, ...] = (
    ModelRecord(
        "BertModel",
        library="transformers",
        signatures={
            "forward": (
                "input_ids=None, attention_mask=None, token_type_ids=None, position_ids=None, inputs_embeds=None, "
                "encoder_hidden_states=None, encoder_attention_mask=None, past_key_values=None, use_cache=None, **kwargs"
            )
        },
    ),
    ModelRecord(
        "Gemma2Model",
        library="transformers",
        signatures={
            "forward": (
                "input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, use_cache=None, **kwargs"
            )
        },
    ),
    ModelRecord(
        "Gemma3ForConditionalGeneration",
        library="transformers",
        signatures={
            "forward": (
                "input_ids=None, pixel_values=None, attention_mask=None, position_ids=None, past_key_values=None, "
                "token_type_ids=None, inputs_embeds=None, labels=None, use_cache=None, logits_to_keep=0, "
                "mm_encoder_outputs=None, **kwargs"
            )
        },
    ),
    ModelRecord(
        "GemmaModel",
        library="transformers",
        signatures={
            "forward": (
                "input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, use_cache=None, **kwargs"
            )
        },
    ),
    ModelRecord(
        "GlmModel",
        library="transformers",
        signatures={
            "forward": (
                "input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, use_cache=None, **kwargs"
            )
        },
    ),
    ModelRecord(
        "LlamaForCausalLM",
        library="transformers",
        signatures={
            "forward": (
                "input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, "
                "labels=None, use_cache=None, logits_to_keep=0, **kwargs"
            )
        },
    ),
    ModelRecord(
        "LlamaModel",
        library="transformers",
        signatures={
            "forward": (
                "input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, use_cache=None, **kwargs"
            )
        },
    ),
    ModelRecord(
        "LlavaForConditionalGeneration",
        library="transformers",
        signatures={
            "forward": (
                "input_ids=None, pixel_values=None, attention_mask=None, position_ids=None, past_key_values=None, "
                "inputs_embeds=None, vision_feature_layer=None, vision_feature_select_strategy=None, labels=None, "
                "logits_to_keep=0, image_sizes=None, mm_encoder_outputs=None, **kwargs"
            )
        },
    ),
    ModelRecord(
        "Ministral3ForCausalLM",
        library="transformers",
        signatures={
            "forward": (
                "input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, "
                "labels=None, use_cache=None, logits_to_keep=0, **kwargs"
            )
        },
    ),
    ModelRecord(
        "Mistral3ForConditionalGeneration",
        library="transformers",
        signatures={
            "forward": (
                "input_ids=None, pixel_values=None, attention_mask=None, position_ids=None, past_key_values=None, "
                "inputs_embeds=None, labels=None, use_cache=None, logits_to_keep=0, image_sizes=None, "
                "mm_encoder_outputs=None, **kwargs"
            )
        },
    ),
    ModelRecord(
        "Mistral3Model",
        library="transformers",
        signatures={
            "forward": (
                "input_ids=None, pixel_values=None, attention_mask=None, position_ids=None, past_key_values=None, "
                "inputs_embeds=None, vision_feature_layer=None, use_cache=None, image_sizes=None, mm_encoder_outputs=None, "
                "**kwargs"
            )
        },
    ),
    ModelRecord(
        "Qwen2VLForConditionalGeneration",
        library="transformers",
        signatures={
            "forward": (
                "input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, "
                "labels=None, use_cache=None, pixel_values=None, pixel_values_videos=None, image_grid_thw=None, "
                "video_grid_thw=None, mm_token_type_ids=None, logits_to_keep=0, mm_encoder_outputs=None, **kwargs"
            )
        },
    ),
    ModelRecord(
        "Qwen2_5_VLTextModel",
        library="transformers",
        signatures={
            "forward": (
                "input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, use_cache=None, **kwargs"
            )
        },
    ),
    ModelRecord(
        "Qwen3ForCausalLM",
        library="transformers",
        signatures={
            "forward": (
                "input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, "
                "labels=None, use_cache=None, logits_to_keep=0, **kwargs"
            )
        },
    ),
    ModelRecord(
        "Qwen3Model",
        library="transformers",
        signatures={
            "forward": (
                "input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, use_cache=None, **kwargs"
            )
        },
    ),
    ModelRecord(
        "Qwen3VLForConditionalGeneration",
        library="transformers",
        signatures={
            "forward": (
                "input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, "
                "labels=None, pixel_values=None, pixel_values_videos=None, image_grid_thw=None, video_grid_thw=None, "
                "mm_token_type_ids=None, logits_to_keep=0, mm_encoder_outputs=None, **kwargs"
            )
        },
    ),
    ModelRecord(
        "Qwen3VLModel",
        library="transformers",
        signatures={
            "forward": (
                "input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, "
                "pixel_values=None, pixel_values_videos=None, image_grid_thw=None, video_grid_thw=None, "
                "mm_token_type_ids=None, mm_encoder_outputs=None, **kwargs"
            )
        },
    ),
    ModelRecord(
        "Qwen3_5ForConditionalGeneration",
        library="transformers",
        signatures={
            "forward": (
                "input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, "
                "labels=None, pixel_values=None, pixel_values_videos=None, image_grid_thw=None, video_grid_thw=None, "
                "mm_token_type_ids=None, logits_to_keep=0, mm_encoder_outputs=None, **kwargs"
            )
        },
    ),
    ModelRecord(
        "SmolLM3ForCausalLM",
        library="transformers",
        signatures={
            "forward": (
                "input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, "
                "labels=None, use_cache=None, logits_to_keep=0, **kwargs"
            )
        },
    ),
    ModelRecord(
        "T5Gemma2Encoder",
        library="transformers",
        signatures={
            "forward": (
                "input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, pixel_values=None, "
                "mm_encoder_outputs=None, token_type_ids=None, **kwargs"
            )
        },
    ),
    ModelRecord(
        "T5GemmaEncoder",
        library="transformers",
        signatures={"forward": "input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **kwargs"},
    ),
    ModelRecord(
        "UMT5EncoderModel",
        library="transformers",
        signatures={"forward": "input_ids=None, attention_mask=None, inputs_embeds=None, **kwargs"},
    ),
)
