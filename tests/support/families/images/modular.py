# SPDX-License-Identifier: Apache-2.0
"""Tiny modular pipelines: families that exist only as modular ones (Anima, Flux 3), and modular ones of families that exist as both.

Text encoders and decoders are removed from the blocks, so that embeddings become inputs and latents the result. Everything in between is
diffusers' own. Guidance is a component here: each request's view has a guider of its own.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import torch

from diffusion_worker.runner.pipelines.body import inputs_of
from diffusion_worker.runner.pipelines.view import guide, silence
from support.families.rig.family import Arguments, flow
from support.families.rig.tables import asking, entry, more, noise, part, small, texts
from support.families.videos import wan

SIDE = 64
MASK = torch.ones(1, 8, dtype=torch.long)


def only_denoising(kind: str, **parts: Callable[[], Any]) -> Any:
    """Build a modular pipeline of diffusers' class `kind` with its denoising block alone: embeddings go in and latents come out.

    `parts` are makers of its components.
    """
    pipeline_class = getattr(diffusers, kind)
    blocks = getattr(diffusers, pipeline_class.default_blocks_name)()
    for name in [name for name in blocks.sub_blocks if name != "denoise"]:
        blocks.sub_blocks.pop(name)
    pipeline = pipeline_class(blocks=blocks)
    pipeline.update_components(scheduler=flow(), **{name: make() for name, make in parts.items()})
    silence(pipeline)
    return pipeline


def call_modular(view: Any, arguments: Arguments) -> Any:
    """Run a copy of a modular pipeline and return its latents; the argument `guidance` goes to the copy's guiders.

    An `output_type` that the pipeline does not take is dropped.
    """
    view, given = copy.copy(view), dict(arguments)
    if "guidance" in given:
        assert guide(view, given.pop("guidance"))
    takes = inputs_of(view)
    return view(**{name: value for name, value in given.items() if name in takes or name != "output_type"}, output="latents")


def _on(model: str, **config: Any) -> partial[Any]:
    return partial(only_denoising, transformer=small(model, **config))


def wan22() -> Any:
    """Build a modular Wan 2.2.

    Two transformers of one size share the steps: `transformer_2` has those below 0.7 of the time, and guidance is separate for both.
    """
    # Without a VAE the pipeline makes latents of 16 channels.
    expert = small("WanTransformer3DModel", **wan.TRANSFORMER | {"in_channels": 16, "out_channels": 16})
    pipeline = only_denoising("Wan22ModularPipeline", transformer=expert, transformer_2=expert)
    pipeline.update_components(scheduler=wan.flow_unipc(), boundary_ratio=0.7)
    return pipeline


SD3 = _on(
    "SD3Transformer2DModel", sample_size=16, patch_size=1, num_layers=2, attention_head_dim=8, joint_attention_dim=32,
    caption_projection_dim=16, pooled_projection_dim=32,
)  # fmt: skip
# Tokens of two tokenizers, from which the conditioner makes the embeddings.
ON_ANIMA = _on(
    "CosmosTransformer3DModel", attention_head_dim=12, num_layers=2, mlp_ratio=2, adaln_lora_dim=4, max_size=(4, 32, 32),
    patch_size=(1, 2, 2), rope_scale=(1.0, 4.0, 4.0), extra_pos_embed_type=None, concat_padding_mask=True,
)  # fmt: skip
CONDITIONER = part(
    "AnimaTextConditioner", source_dim=16, target_dim=16, model_dim=16, num_layers=1, num_attention_heads=2, target_vocab_size=50,
    min_sequence_length=16,
)  # fmt: skip
ANIMA = partial(ON_ANIMA, text_conditioner=CONDITIONER)
FLUX3 = partial(
    _on, "Flux3Transformer2DModel", in_channels=16, cond_in_channels=16, num_layers=1, joint_attention_dim=24, timestep_channels=16,
    axes_dims_rope=(4, 4, 4, 4),
)  # fmt: skip
KREA2 = _on(
    "Krea2Transformer2DModel", in_channels=16, num_layers=2, num_key_value_heads=1, intermediate_size=32, timestep_embed_dim=16,
    text_hidden_dim=16, num_text_layers=2, text_num_attention_heads=2, text_num_key_value_heads=2, text_intermediate_size=32,
    num_layerwise_text_blocks=1, num_refiner_text_blocks=1, axes_dims_rope=(4, 6, 6),
)  # fmt: skip
ERNIE = _on(
    "ErnieImageTransformer2DModel", hidden_size=32, num_layers=2, ffn_hidden_size=32, in_channels=16, out_channels=16, text_in_dim=16,
    rope_axes_dim=(4, 6, 6),
)  # fmt: skip
QWEN = _on("QwenImageTransformer2DModel", patch_size=2, in_channels=16, num_layers=2, axes_dims_rope=(8, 4, 4))
# A transformer with the prompt, and another without.
IDEOGRAM4_MODEL = small(
    "Ideogram4Transformer2DModel", in_channels=16, num_layers=1, intermediate_size=32, adaln_dim=16, llm_features_dim=16,
    mrope_section=(4, 2, 2),
)  # fmt: skip
IDEOGRAM4 = partial(only_denoising, transformer=IDEOGRAM4_MODEL, unconditional_transformer=IDEOGRAM4_MODEL)


def _tokens(seed: int) -> torch.Tensor:
    return torch.randint(1, 50, (1, 8), generator=torch.Generator().manual_seed(seed))


def _masks(mask: torch.Tensor, *names: str) -> Arguments:
    return {f"{sign}{name}": mask for name in names for sign in ("", "negative_")}


def _scheduled(seed: int, steps: int, guidance: float) -> Arguments:
    return IDEOGRAM4_TEXTS(seed, steps, guidance) | {"guidance_schedule": tuple([guidance] * steps)}


SD3_TEXTS = asking(SIDE, scale="guidance", **texts(prompt_embeds=(1, 8, 32), pooled_prompt_embeds=(1, 32)))
ANIMA_TEXTS = asking(
    SIDE,
    scale="guidance",
    **texts(qwen_prompt_embeds=(1, 8, 16)),
    **_masks(MASK, "qwen_attention_mask", "t5_attention_mask"),
    t5_input_ids=_tokens,
    negative_t5_input_ids=lambda seed: _tokens(seed).flip(-1),
)
FLUX3_TEXTS = asking(SIDE, scale="guidance", **texts(prompt_embeds=(1, 8, 24)))
FLUX3_IMAGE = more(FLUX3_TEXTS, image_cond_latents=[noise(1, 16, 4, 4, at=200)])
FLUX3_DISTILLED_TEXTS = more(FLUX3_TEXTS, without=("guidance", "negative_prompt_embeds"))
KREA2_TEXTS = asking(SIDE, scale="guidance", **texts(prompt_embeds=(1, 8, 2, 16)), **_masks(MASK.bool(), "prompt_embeds_mask"))
ERNIE_TEXTS = asking(SIDE, scale="guidance", prompt_embeds=[noise(8, 16)], negative_prompt_embeds=[noise(8, 16, at=100)])
QWEN_TEXTS = asking(SIDE, scale="guidance", **texts(prompt_embeds=(1, 8, 16)), **_masks(MASK, "prompt_embeds_mask"))
IDEOGRAM4_TEXTS = asking(SIDE, scale=None, text_features=noise(1, 8, 16), text_lengths=[8])

_family = partial(entry, call=call_modular, output_type="latent")

FAMILIES = [
    _family("StableDiffusion3ModularPipeline", "SD 3", SD3, SD3_TEXTS),
    _family("AnimaModularPipeline", "Anima", ANIMA, ANIMA_TEXTS),
    _family("Flux3ModularPipeline", "Flux 3", FLUX3(flow_map=False), FLUX3_TEXTS),
    _family("Flux3ModularPipeline (reference image)", "Flux 3", FLUX3(flow_map=False), FLUX3_IMAGE),
    _family("Flux3DistilledModularPipeline", "Flux 3", FLUX3(flow_map=True), FLUX3_DISTILLED_TEXTS),
    _family("Krea2ModularPipeline", "Krea 2", KREA2, KREA2_TEXTS),
    _family("ErnieImageModularPipeline", "Ernie Image", ERNIE, ERNIE_TEXTS),
    _family("QwenImageModularPipeline", "Qwen-Image", QWEN, QWEN_TEXTS),
    _family("Ideogram4ModularPipeline", "Ideogram 4", IDEOGRAM4, _scheduled),
]
