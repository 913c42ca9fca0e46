# SPDX-License-Identifier: Apache-2.0
"""Tiny image pipelines whose prompts are words: a tokenizer of letters and tiny text encoders before the denoiser.

OmniGen, LongCat-Image and Bria Fibo take no embeddings; Flux and Qwen-Image are called as the images API calls them.
"""

from typing import Any

import diffusers
import transformers

from support.families.images import flux
from support.families.rig.family import Arguments, dynamic_flow, shifted_vae, tiny_vae
from support.families.rig.tables import asking, assemble, entry, more
from support.families.rig.texts import letters
from support.families.videos.wan import tiny_wan_vae

# Pixels. The VAE halves them and a patch has 2 x 2: 16 tokens.
SIDE = 16
PROMPTS = ("a red fox", "a green hare", "two blue birds on a roof")


def omnigen(kind: str) -> Any:
    """Build a pipeline whose denoiser is a language model: it gets the prompt's tokens, padded to the longest prompt of the request."""
    transformer = diffusers.OmniGenTransformer2DModel(
        in_channels=4, patch_size=2, hidden_size=32, num_attention_heads=2, num_key_value_heads=2, intermediate_size=32, num_layers=1,
        pad_token_id=0, vocab_size=128, pos_embed_max_size=32, time_step_dim=16,
        rope_scaling={"long_factor": [1.0] * 8, "short_factor": [1.0] * 8},
    )  # fmt: skip
    transformer.register_forward_pre_hook(_mask_of_the_models_precision, with_kwargs=True)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True, num_train_timesteps=1)
    # The processor assumes a VAE that shrinks images by eight.
    return assemble(kind, transformer=transformer, scheduler=scheduler, vae=tiny_vae(levels=4, scaling_factor=1.5), tokenizer=letters())


def _mask_of_the_models_precision(module: Any, args: Any, kwargs: Arguments) -> tuple[Any, Arguments]:
    """Convert the mask to the model's dtype: the model multiplies it by the minimum of that dtype, which gives NaN in float64."""
    return args, kwargs | {"attention_mask": kwargs["attention_mask"].to(module.dtype)}


def vision_language_model() -> Any:
    """Build a Qwen 2.5 VL with one layer in each part."""
    text = {
        "vocab_size": 128, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    return transformers.Qwen2_5_VLForConditionalGeneration(transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision))


def longcat(kind: str) -> Any:
    """Build a LongCat-Image pipeline that takes prompts as words.

    A tiny Qwen 2.5 VL encodes their letters, which are padded to 24 tokens.
    """
    transformer = diffusers.LongCatImageTransformer2DModel(
        in_channels=64, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=16,
        pooled_projection_dim=16, axes_dims_rope=[8, 4, 4],
    )  # fmt: skip
    parts = {"vae": shifted_vae(16), "text_encoder": vision_language_model(), "tokenizer": letters()}
    pipeline = assemble(kind, scheduler=dynamic_flow(), transformer=transformer, **parts)
    pipeline.tokenizer_max_length = 24
    return pipeline


def fibo(kind: str) -> Any:
    """Build a Bria Fibo pipeline: a tiny SmolLM3 encodes letters, and each block of the transformer gets another of its layers."""
    language = transformers.SmolLM3Config(
        vocab_size=128, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    transformer = diffusers.BriaFiboTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
        axes_dims_rope=[8, 4, 4], text_encoder_dim=16,
    )  # fmt: skip
    parts = {"vae": tiny_wan_vae(), "text_encoder": transformers.SmolLM3ForCausalLM(language), "tokenizer": letters()}
    pipeline = assemble(kind, scheduler=dynamic_flow(), transformer=transformer, **parts)
    # The released VAE shrinks images by sixteen, the tiny one by eight.
    pipeline.vae_scale_factor = 8
    return pipeline


def worded_flux(kind: str) -> Any:
    """Build a Flux pipeline that takes prompts as words, by a tiny CLIP and a tiny T5.

    Neither gets a mask, so padding counts as text and all prompts have equal length.
    """
    pipe = flux.pipeline(kind)
    clip = {"vocab_size": 128, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    t5 = {"vocab_size": 128, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    pipe.register_modules(
        text_encoder=transformers.CLIPTextModel(transformers.CLIPTextConfig(**clip, eos_token_id=1)),
        text_encoder_2=transformers.T5EncoderModel(transformers.T5Config(**t5)),
        tokenizer=letters(),
        tokenizer_2=letters(),
    )
    pipe.tokenizer_max_length = 24
    return pipe


# A prompt in words, of another length for another seed.
TEXT_TO_IMAGE = asking(SIDE, prompt=lambda seed: PROMPTS[seed % 3])
# The positions of tokens are one table for a call, so only prompts of one length share it.
OF_ONE_LENGTH = asking(64, prompt=lambda seed: f"{PROMPTS[seed % 3]:24}")
# The words for CLIP, which take 24 letters, and for T5.
SHORT = more(TEXT_TO_IMAGE, max_sequence_length=32)
# Prompts are not rewritten, which would make the language model generate.
# The empty negative prompt would be a token that the tiny model has not.
GUIDED = asking(64, prompt=lambda seed: f"{PROMPTS[seed % 3]:24}", negative_prompt="blurry")
AS_WRITTEN = more(TEXT_TO_IMAGE, enable_prompt_rewrite=False, negative_prompt="blurry")

FAMILIES = [
    entry("OmniGenPipeline", "OmniGen", omnigen, OF_ONE_LENGTH),
    entry("FluxPipeline (words)", "Flux", worded_flux, SHORT),
    entry("BriaFiboPipeline", "Bria Fibo", fibo, GUIDED),
    entry("LongCatImagePipeline", "LongCat-Image", longcat, AS_WRITTEN),
]
