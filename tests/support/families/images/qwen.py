# SPDX-License-Identifier: Apache-2.0
"""Tiny Qwen-Image pipelines: text to image, image to image, inpaint, ControlNet, edit, layers, and version 2.1."""

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from diffusers.models.autoencoders.vae import DecoderOutput

from support.families.images.worded_images import PROMPTS, letters, vision_language_model
from support.families.rig.family import Arguments, Family, build_seeded, image, mask, seeded

# Pixels. The VAE halves them and the pipeline packs 2 x 2: 16 tokens.
SIDE = 16
# The edit pipelines bring every image to a megapixel, so theirs shrinks by 64: 64 tokens of reference, 4 of result.
EDIT_SIDE = 256
TEXT_TOKENS = 6
SHAPE = {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 16, "axes_dims_rope": (8, 4, 4)}


class PatchVae(diffusers.AutoencoderKLQwenImage):  # type: ignore[misc]
    """A Qwen VAE that takes and gives patches of 64 x 64 in one layer: a megapixel costs it milliseconds, not seconds."""

    def __init__(self) -> None:
        super().__init__(**_vae_config(halvings=6))
        self.to_latents = torch.nn.Conv3d(3, 8, (1, 64, 64), stride=(1, 64, 64))
        self.to_pixels = torch.nn.ConvTranspose3d(4, 3, (1, 64, 64), stride=(1, 64, 64))

    def _encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.to_latents(x)

    def _decode(self, z: torch.Tensor, return_dict: bool = True) -> Any:
        pixels = self.to_pixels(z).clamp(-1, 1)
        return DecoderOutput(sample=pixels) if return_dict else (pixels,)


class FakeProcessor:
    """What version 2.1 asks of its processor when it is made: the length of a system message and one token. Prompts are embeddings."""

    tokenizer: Any = property(lambda self: self)

    def apply_chat_template(self, *_: Any, **__: Any) -> list[list[int]]:
        return [[1, 2, 3]]

    def encode(self, _: str) -> list[int]:
        return [4]


def small_vae() -> Any:
    """A Qwen VAE of real layers that halves images."""
    return diffusers.AutoencoderKLQwenImage(**_vae_config(halvings=1))


def _vae_config(halvings: int) -> dict[str, Any]:
    return {
        "base_dim": 2,
        "z_dim": 4,
        "dim_mult": [1] * (halvings + 1),
        "num_res_blocks": 1,
        "temperal_downsample": [False] * halvings,
        "latents_mean": [0.1] * 4,
        "latents_std": [1.3] * 4,
    }


def pipeline(kind: str, *, edits: bool = False, with_controlnet: bool = False, mask_channels: int = 0, **config: Any) -> Any:
    """A pipeline of the class `kind` on a transformer of two blocks and packed latents of 4 channels."""
    parts: dict[str, Any] = {"text_encoder": None, "tokenizer": None}
    if edits:
        parts["processor"] = None
    if with_controlnet:
        parts["controlnet"] = diffusers.QwenImageControlNetModel(
            in_channels=16, out_channels=4, extra_condition_channels=mask_channels, **SHAPE
        )
    return getattr(diffusers, kind)(
        transformer=diffusers.QwenImageTransformer2DModel(in_channels=16, out_channels=4, **SHAPE, **config),
        vae=PatchVae() if edits else small_vae(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        **parts,
    )


def pipeline_21() -> Any:
    """Version 2.1, with conditions whose keys and values may be cached."""
    transformer = diffusers.QwenImage21Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        context_in_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    vae = diffusers.AutoencoderKLQwenImage21(
        base_dim=4,
        decoder_base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[0.1] * 4,
        latents_std=[1.3] * 4,
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return diffusers.QwenImage21Pipeline(scheduler, vae, None, FakeProcessor(), transformer)


def layered_pipeline() -> Any:
    """Takes an image apart; it asks its text encoder for a dtype even where the prompt is given as embeddings."""
    pipe = pipeline("QwenImageLayeredPipeline", edits=True, use_additional_t_cond=True, use_layer3d_rope=True)
    pipe.register_modules(text_encoder=vision_language_model())
    return pipe


def worded_pipeline() -> Any:
    """Qwen-Image with its text encoder: prompts keep their own lengths."""
    pipe = pipeline("QwenImagePipeline")
    pipe.register_modules(text_encoder=vision_language_model(), tokenizer=letters())
    return pipe


def text(seed: int, steps: int, guidance: float) -> Arguments:
    """A prompt and a negative prompt: two model calls a step."""
    return {
        "prompt_embeds": seeded(seed, 1, TEXT_TOKENS, 16),
        "prompt_embeds_mask": torch.ones(1, TEXT_TOKENS, dtype=torch.int64),
        "negative_prompt_embeds": seeded(seed + 200, 1, TEXT_TOKENS, 16),
        "negative_prompt_embeds_mask": torch.ones(1, TEXT_TOKENS, dtype=torch.int64),
        "num_inference_steps": steps,
        "true_cfg_scale": guidance,
    }


def text_to_image(seed: int, steps: int, guidance: float) -> Arguments:
    """A prompt and a size."""
    return text(seed, steps, guidance) | {"height": SIDE, "width": SIDE}


def words(seed: int, steps: int, guidance: float) -> Arguments:
    """Prompts of one length, and one for all to avoid."""
    size = {"height": SIDE, "width": SIDE, "num_inference_steps": steps, "true_cfg_scale": guidance}
    return size | {"prompt": f"{PROMPTS[seed % 3]:24}", "negative_prompt": "blurry"}


def image_to_image(seed: int, steps: int, guidance: float) -> Arguments:
    """Half the schedule is run, so twice the steps are asked for."""
    return text_to_image(seed, 2 * steps, guidance) | {"image": image(seed, SIDE, SIDE), "strength": 0.5}


def inpaint(seed: int, steps: int, guidance: float) -> Arguments:
    """A part again, over the whole schedule."""
    images = {"image": image(seed, SIDE, SIDE), "mask_image": mask(seed, SIDE, SIDE)}
    return text_to_image(seed, steps, guidance) | images | {"strength": 1.0}


def control(seed: int, steps: int, guidance: float) -> Arguments:
    """An image to follow."""
    return text_to_image(seed, steps, guidance) | {"control_image": image(seed, SIDE, SIDE)}


def control_inpaint(seed: int, steps: int, guidance: float) -> Arguments:
    """A part again."""
    return control(seed, steps, guidance) | {"control_mask": mask(seed, SIDE, SIDE)}


def edit(seed: int, steps: int, guidance: float) -> Arguments:
    """An image to change."""
    return text(seed, steps, guidance) | {"image": image(seed, 32, 32), "height": EDIT_SIDE, "width": EDIT_SIDE}


def edit_two(seed: int, steps: int, guidance: float) -> Arguments:
    """Two images of other proportions."""
    return edit(seed, steps, guidance) | {"image": [image(seed, 32, 32), image(seed + 1, 32, 16)]}


def edit_inpaint(seed: int, steps: int, guidance: float) -> Arguments:
    """A part of an image again."""
    return edit(seed, steps, guidance) | {"mask_image": mask(seed, 32, 32), "strength": 1.0}


def layers(seed: int, steps: int, guidance: float) -> Arguments:
    """An image to take apart into two; without words the pipeline would describe it first."""
    return text(seed, steps, guidance) | {"prompt": "a fox", "image": image(seed, 32, 32), "layers": 2}


def text_to_image_21(seed: int, steps: int, guidance: float) -> Arguments:
    """A prompt and a size; 16 pixels a token."""
    return text(seed, steps, guidance) | {"height": 64, "width": 64}


def without_cache(seed: int, steps: int, guidance: float) -> Arguments:
    """Conditions are computed again in each step."""
    return text_to_image_21(seed, steps, guidance) | {"use_kv_cache": False}


# Two layered images of one prompt have one entry of what tells colours from transparency.
TWO_PROMPTS = {"prompt": ["a fox", "a hare"]} | {
    f"{kind}prompt_embeds{part}": value
    for kind in ("", "negative_")
    for part, value in {"": seeded(7, 2, TEXT_TOKENS, 16), "_mask": torch.ones(2, TEXT_TOKENS, dtype=torch.int64)}.items()
}


def _family(
    kind: str,
    request: Callable[[int, int, float], Arguments],
    variant: str = "",
    *,
    make: Callable[[], Any] | None = None,
    reason: str = "",
    **parts: Any,
) -> Family:
    return Family(
        f"{kind} ({variant})" if variant else kind,
        "Qwen-Image-Edit" if "Edit" in kind else "Qwen-Image",
        build_seeded(make or (lambda: pipeline(kind, **parts))),
        request,
        output_type="pt",
        shares=not reason,
        reason=reason,
        doubled=TWO_PROMPTS if kind == "QwenImageLayeredPipeline" else {"num_images_per_prompt": 2},
    )


FAMILIES = [
    _family("QwenImagePipeline", text_to_image),
    _family("QwenImagePipeline", words, "words", make=worded_pipeline),
    _family("QwenImageImg2ImgPipeline", image_to_image),
    _family("QwenImageInpaintPipeline", inpaint),
    _family("QwenImageControlNetPipeline", control, with_controlnet=True),
    _family("QwenImageControlNetInpaintPipeline", control_inpaint, with_controlnet=True, mask_channels=4),
    _family("QwenImageEditPipeline", edit, edits=True),
    _family("QwenImageEditPlusPipeline", edit_two, edits=True, zero_cond_t=True),
    _family("QwenImageEditInpaintPipeline", edit_inpaint, edits=True),
    _family("QwenImageLayeredPipeline", layers, make=layered_pipeline),
    _family("QwenImage21Pipeline", text_to_image_21, make=pipeline_21, reason="keys and values of the prompt are cached per request"),
    _family("QwenImage21Pipeline", without_cache, "without cache", make=pipeline_21),
]
