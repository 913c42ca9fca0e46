# SPDX-License-Identifier: Apache-2.0
"""Language models with a record: a short and a long prompt as one call give what each gives alone, padded at either end."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder
from transformers.models.t5gemma2.modeling_t5gemma2 import T5Gemma2Encoder

from diffusion_worker.runner.families import language_models
from diffusion_worker.runner.merging import trust_in
from diffusion_worker.runner.model_call.call import ModelCall, group_key, merge, split

pytestmark = pytest.mark.slow

TOKENS, SHORT = 12, 7
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DECODER = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
# Positions of time, height and width.
AXES = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4, "partial_rotary_factor": 1.0}}
LINEAR = {
    f"linear_{name}": size for name, size in (("num_value_heads", 2), ("num_key_heads", 2), ("key_head_dim", 8), ("value_head_dim", 8))
}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28, "patch_size": 14}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32}


def seeing(config: Any, text: str, vision: str) -> Any:
    """Return a configuration of a model that also takes images, which these tests do not give it."""
    return config(text_config=DECODER | {"model_type": text}, vision_config=VISION | {"model_type": vision})


def qwen3_vl() -> Any:
    return hf.Qwen3VLConfig(text_config=DECODER | AXES, vision_config=QWEN_VISION | {"deepstack_visual_indexes": [0]})


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "BertModel": lambda: hf.BertModel(hf.BertConfig(**SIZES)),
    "Gemma2Model": lambda: hf.Gemma2Model(hf.Gemma2Config(**DECODER)),
    "Gemma3ForConditionalGeneration": lambda: hf.Gemma3ForConditionalGeneration(hf.Gemma3Config(text_config=DECODER, vision_config=VISION)),
    "GemmaModel": lambda: hf.GemmaModel(hf.GemmaConfig(**DECODER)),
    "GlmModel": lambda: hf.GlmModel(hf.GlmConfig(**DECODER)),
    "LlamaForCausalLM": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)),
    "LlamaModel": lambda: hf.LlamaModel(hf.LlamaConfig(**DECODER)),
    "LlavaForConditionalGeneration": lambda: hf.LlavaForConditionalGeneration(seeing(hf.LlavaConfig, "llama", "clip_vision_model")),
    "Ministral3ForCausalLM": lambda: hf.Ministral3ForCausalLM(hf.Ministral3Config(**DECODER)),
    "Mistral3ForConditionalGeneration": lambda: hf.Mistral3ForConditionalGeneration(seeing(hf.Mistral3Config, "mistral", "pixtral")),
    "Mistral3Model": lambda: hf.Mistral3Model(seeing(hf.Mistral3Config, "mistral", "pixtral")),
    "Qwen2VLForConditionalGeneration": lambda: hf.Qwen2VLForConditionalGeneration(
        hf.Qwen2VLConfig(text_config=DECODER | AXES, vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4})
    ),
    "Qwen2_5_VLTextModel": lambda: hf.Qwen2_5_VLTextModel(hf.Qwen2_5_VLTextConfig(**DECODER, **AXES)),
    "Qwen3ForCausalLM": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**DECODER)),
    "Qwen3Model": lambda: hf.Qwen3Model(hf.Qwen3Config(**DECODER)),
    "Qwen3VLForConditionalGeneration": lambda: hf.Qwen3VLForConditionalGeneration(qwen3_vl()),
    "Qwen3VLModel": lambda: hf.Qwen3VLModel(qwen3_vl()),
    "Qwen3_5ForConditionalGeneration": lambda: hf.Qwen3_5ForConditionalGeneration(
        hf.Qwen3_5Config(
            text_config=DECODER | AXES | LINEAR | {"layer_types": ["linear_attention", "full_attention"]}, vision_config=QWEN_VISION
        )
    ),
    "SmolLM3ForCausalLM": lambda: hf.SmolLM3ForCausalLM(hf.SmolLM3Config(**DECODER)),
    "T5Gemma2Encoder": lambda: T5Gemma2Encoder(
        hf.T5Gemma2Config(encoder={"text_config": DECODER, "vision_config": VISION}, decoder=DECODER).encoder
    ),
    "T5GemmaEncoder": lambda: T5GemmaEncoder(hf.T5GemmaConfig(encoder=DECODER, decoder=DECODER).encoder),
    "UMT5EncoderModel": lambda: hf.UMT5EncoderModel(hf.UMT5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)),
}


ENCODERS = (hf.BertModel, hf.UMT5EncoderModel, T5GemmaEncoder, T5Gemma2Encoder)


def call_of(model: torch.nn.Module, seed: int, valid: torch.Tensor) -> ModelCall:
    """Return a call for one prompt of random tokens where `valid` is 1; as in the pipelines, it asks for no cache of a decoder."""
    tokens = torch.randint(3, 60, valid.shape, generator=torch.Generator().manual_seed(seed))
    arguments = {"input_ids": torch.where(valid == 1, tokens, 0), "attention_mask": valid, "output_hidden_states": True}
    arguments |= {} if isinstance(model, ENCODERS) else {"use_cache": False}
    return ModelCall("text_encoder", "forward", arguments, module=model)


def apart(one: Any, other: Any) -> float:
    """Return the largest difference of two outputs' hidden states over all layers."""
    return max(float((a - b).abs().max()) for a, b in zip(one.hidden_states, other.hidden_states, strict=True))


def test_each_language_model_on_record_is_tested_here() -> None:
    assert list(MODELS) == [record.name for record in language_models.RECORDS]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padded_before", [False, True])
@torch.no_grad()
def test_two_prompts_as_one_call_give_what_each_gives_alone(name: str, padded_before: bool) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    assert trust_in(type(model), "forward").ok
    full, short = torch.ones(1, TOKENS, dtype=torch.long), torch.ones(1, TOKENS, dtype=torch.long)
    short[:, slice(0, TOKENS - SHORT) if padded_before else slice(SHORT, TOKENS)] = 0
    calls = [call_of(model, 1, full), call_of(model, 2, short)]
    assert group_key(calls[0]) == group_key(calls[1]) is not None
    alone = [model(**call.arguments) for call in calls]
    together = split(model(**merge(calls).arguments), [1, 1])
    for one, other in zip(together, alone, strict=True):
        assert apart(one, other) < 1e-5
    assert apart(*alone) > 0.1
