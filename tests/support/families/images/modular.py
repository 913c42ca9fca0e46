# SPDX-License-Identifier: Apache-2.0
"""Tiny modular pipelines: families that exist only so (Anima, Flux 3), and modular ones of families that exist as both.

Text encoders and decoders are taken out of the blocks, so that the embeddings become inputs and the latents the result;
everything in between is diffusers' own. Guidance is a component here: each request's view has a guider of its own.
"""

import copy
from typing import Any

import diffusers
import torch

from diffusion_worker.runner.pipelines.body import inputs_of
from diffusion_worker.runner.pipelines.view import guide, silence
from support.families.rig.family import Arguments, Family, build_seeded, seeded
from support.families.videos.wan import TRANSFORMER as WAN_TRANSFORMER
from support.families.videos.wan import flow_unipc

MASK = torch.ones(1, 8, dtype=torch.long)


def only_denoising(pipeline_class: Any, **components: Any) -> Any:
    """A pipeline of this class that starts at the embeddings and ends at the latents."""
    blocks = getattr(diffusers, pipeline_class.default_blocks_name)()
    for name in [name for name in blocks.sub_blocks if name != "denoise"]:
        blocks.sub_blocks.pop(name)
    pipeline = pipeline_class(blocks=blocks)
    pipeline.update_components(scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), **components)
    silence(pipeline)
    return pipeline


def call_modular(view: Any, arguments: Arguments) -> Any:
    """Run a modular pipeline up to its latents; `guidance` goes to its guiders."""
    view, given = copy.copy(view), dict(arguments)
    if "guidance" in given:
        assert guide(view, given.pop("guidance"))
    takes = inputs_of(view)
    return view(**{name: value for name, value in given.items() if name in takes or name != "output_type"}, output="latents")


def family(name: str, kind: str, build: Any, request: Any) -> Family:
    return Family(name, kind, build_seeded(build), request, call=call_modular, doubled={"num_images_per_prompt": 2})


def steps_and_size(seed: int, steps: int) -> Arguments:
    return {"num_inference_steps": steps, "height": 64, "width": 64}


def stable_diffusion_3() -> Any:
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=16,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=16,
        pooled_projection_dim=32,
    )
    return only_denoising(diffusers.StableDiffusion3ModularPipeline, transformer=transformer)


def stable_diffusion_3_request(seed: int, steps: int, guidance: float) -> Arguments:
    return steps_and_size(seed, steps) | {
        "guidance": guidance,
        "prompt_embeds": seeded(seed, 1, 8, 32),
        "negative_prompt_embeds": seeded(seed + 100, 1, 8, 32),
        "pooled_prompt_embeds": seeded(seed + 200, 1, 32),
        "negative_pooled_prompt_embeds": seeded(seed + 300, 1, 32),
    }


def anima() -> Any:
    transformer = diffusers.CosmosTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=2,
        mlp_ratio=2,
        text_embed_dim=16,
        adaln_lora_dim=4,
        max_size=(4, 32, 32),
        patch_size=(1, 2, 2),
        rope_scale=(1.0, 4.0, 4.0),
        extra_pos_embed_type=None,
        concat_padding_mask=True,
    )
    conditioner = diffusers.AnimaTextConditioner(
        source_dim=16,
        target_dim=16,
        model_dim=16,
        num_layers=1,
        num_attention_heads=2,
        target_vocab_size=50,
        min_sequence_length=16,
    )
    return only_denoising(diffusers.AnimaModularPipeline, transformer=transformer, text_conditioner=conditioner)


def anima_request(seed: int, steps: int, guidance: float) -> Arguments:
    tokens = torch.randint(1, 50, (1, 8), generator=torch.Generator().manual_seed(seed))
    return steps_and_size(seed, steps) | {
        "guidance": guidance,
        "qwen_prompt_embeds": seeded(seed, 1, 8, 16),
        "qwen_attention_mask": MASK,
        "t5_input_ids": tokens,
        "t5_attention_mask": MASK,
        "negative_qwen_prompt_embeds": seeded(seed + 100, 1, 8, 16),
        "negative_qwen_attention_mask": MASK,
        "negative_t5_input_ids": tokens.flip(-1),
        "negative_t5_attention_mask": MASK,
    }


def flux3(*, distilled: bool) -> Any:
    transformer = diffusers.Flux3Transformer2DModel(
        in_channels=16,
        cond_in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        timestep_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
        flow_map=distilled,
    )
    kind = diffusers.Flux3DistilledModularPipeline if distilled else diffusers.Flux3ModularPipeline
    return only_denoising(kind, transformer=transformer)


def flux3_request(seed: int, steps: int, guidance: float) -> Arguments:
    return flux3_distilled_request(seed, steps, guidance) | {"guidance": guidance, "negative_prompt_embeds": seeded(seed + 100, 1, 8, 24)}


def flux3_distilled_request(seed: int, steps: int, guidance: float) -> Arguments:
    return steps_and_size(seed, steps) | {"prompt_embeds": seeded(seed, 1, 8, 24)}


def flux3_image_request(seed: int, steps: int, guidance: float) -> Arguments:
    return flux3_request(seed, steps, guidance) | {"image_cond_latents": [seeded(seed + 200, 1, 16, 4, 4)]}


def krea2() -> Any:
    transformer = diffusers.Krea2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        timestep_embed_dim=16,
        text_hidden_dim=16,
        num_text_layers=2,
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=32,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 6, 6),
    )
    return only_denoising(diffusers.Krea2ModularPipeline, transformer=transformer)


def krea2_request(seed: int, steps: int, guidance: float) -> Arguments:
    return steps_and_size(seed, steps) | {
        "guidance": guidance,
        "prompt_embeds": seeded(seed, 1, 8, 2, 16),
        "prompt_embeds_mask": MASK.bool(),
        "negative_prompt_embeds": seeded(seed + 100, 1, 8, 2, 16),
        "negative_prompt_embeds_mask": MASK.bool(),
    }


def ernie_image() -> Any:
    transformer = diffusers.ErnieImageTransformer2DModel(
        hidden_size=32,
        num_attention_heads=2,
        num_layers=2,
        ffn_hidden_size=32,
        in_channels=16,
        out_channels=16,
        text_in_dim=16,
        rope_axes_dim=(4, 6, 6),
    )
    return only_denoising(diffusers.ErnieImageModularPipeline, transformer=transformer)


def ernie_image_request(seed: int, steps: int, guidance: float) -> Arguments:
    return steps_and_size(seed, steps) | {
        "guidance": guidance,
        "prompt_embeds": [seeded(seed, 8, 16)],
        "negative_prompt_embeds": [seeded(seed + 100, 8, 16)],
    }


def ideogram4() -> Any:
    transformers = [
        diffusers.Ideogram4Transformer2DModel(
            in_channels=16,
            num_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            intermediate_size=32,
            adaln_dim=16,
            llm_features_dim=16,
            mrope_section=(4, 2, 2),
        )
        for _ in range(2)
    ]
    return only_denoising(diffusers.Ideogram4ModularPipeline, transformer=transformers[0], unconditional_transformer=transformers[1])


def ideogram4_request(seed: int, steps: int, guidance: float) -> Arguments:
    return steps_and_size(seed, steps) | {
        "text_features": seeded(seed, 1, 8, 16),
        "text_lengths": [8],
        "guidance_schedule": tuple([guidance] * steps),
    }


def wan22() -> Any:
    """Two experts, each with a guider of its own."""
    # Without a VAE the pipeline makes latents of 16 channels.
    shape = WAN_TRANSFORMER | {"in_channels": 16, "out_channels": 16}
    experts = [diffusers.WanTransformer3DModel(**shape) for _ in range(2)]
    pipeline = only_denoising(diffusers.Wan22ModularPipeline, transformer=experts[0], transformer_2=experts[1])
    pipeline.update_components(scheduler=flow_unipc(), boundary_ratio=0.7)
    return pipeline


def qwen_image() -> Any:
    transformer = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    return only_denoising(diffusers.QwenImageModularPipeline, transformer=transformer)


def qwen_image_request(seed: int, steps: int, guidance: float) -> Arguments:
    return steps_and_size(seed, steps) | {
        "guidance": guidance,
        "prompt_embeds": seeded(seed, 1, 8, 16),
        "prompt_embeds_mask": MASK,
        "negative_prompt_embeds": seeded(seed + 100, 1, 8, 16),
        "negative_prompt_embeds_mask": MASK,
    }


FAMILIES = [
    family("StableDiffusion3ModularPipeline", "SD 3", stable_diffusion_3, stable_diffusion_3_request),
    family("AnimaModularPipeline", "Anima", anima, anima_request),
    family("Flux3ModularPipeline", "Flux 3", lambda: flux3(distilled=False), flux3_request),
    family("Flux3ModularPipeline (reference image)", "Flux 3", lambda: flux3(distilled=False), flux3_image_request),
    family("Flux3DistilledModularPipeline", "Flux 3", lambda: flux3(distilled=True), flux3_distilled_request),
    family("Krea2ModularPipeline", "Krea 2", krea2, krea2_request),
    family("ErnieImageModularPipeline", "Ernie Image", ernie_image, ernie_image_request),
    family("QwenImageModularPipeline", "Qwen-Image", qwen_image, qwen_image_request),
    family("Ideogram4ModularPipeline", "Ideogram 4", ideogram4, ideogram4_request),
]
