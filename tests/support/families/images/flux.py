# SPDX-License-Identifier: Apache-2.0
"""Tiny Flux pipelines: text to image, image to image, inpaint, fill, control, ControlNet and Kontext. Prompts are embeddings."""

from collections.abc import Callable
from typing import Any

import diffusers

from support.families.rig.family import Arguments, Family, build_seeded, image, mask, seeded, tiny_vae

# Pixels. The VAE halves them and the pipeline packs 2 x 2: 16 tokens.
SIDE = 16
TEXT_TOKENS = 6

SHAPE = {
    "patch_size": 1,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 16,
    "pooled_projection_dim": 16,
    "axes_dims_rope": (4, 4, 8),
    "guidance_embeds": True,
}


def pipeline(kind: str, *, in_channels: int = 16, with_controlnet: bool = False) -> Any:
    """A pipeline of the class `kind` on a guidance-distilled transformer of two blocks and packed latents of 4 channels."""
    parts: dict[str, Any] = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    if with_controlnet:
        parts["controlnet"] = diffusers.FluxControlNetModel(in_channels=16, **SHAPE)
    return getattr(diffusers, kind)(
        transformer=diffusers.FluxTransformer2DModel(in_channels=in_channels, out_channels=16, **SHAPE),
        vae=tiny_vae(scaling_factor=1.5, shift_factor=0.1),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        **parts,
    )


def text_to_image(seed: int, steps: int, guidance: float) -> Arguments:
    """A prompt and a size."""
    return {
        "prompt_embeds": seeded(seed, 1, TEXT_TOKENS, 16),
        "pooled_prompt_embeds": seeded(seed + 100, 1, 16),
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "height": SIDE,
        "width": SIDE,
    }


def with_negative(seed: int, steps: int, guidance: float) -> Arguments:
    """True guidance beside the distilled one: a second model call a step."""
    return text_to_image(seed, steps, 3.5) | {
        "negative_prompt_embeds": seeded(seed + 200, 1, TEXT_TOKENS, 16),
        "negative_pooled_prompt_embeds": seeded(seed + 300, 1, 16),
        "true_cfg_scale": guidance,
    }


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


def control_image_to_image(seed: int, steps: int, guidance: float) -> Arguments:
    """An image to start from beside the one to follow."""
    return image_to_image(seed, steps, guidance) | {"control_image": image(seed + 1, SIDE, SIDE)}


def control_inpaint(seed: int, steps: int, guidance: float) -> Arguments:
    """A part again, following another image."""
    return inpaint(seed, steps, guidance) | {"control_image": image(seed + 1, SIDE, SIDE)}


def kontext(seed: int, steps: int, guidance: float) -> Arguments:
    """A reference image; sizes are kept as they are given."""
    return text_to_image(seed, steps, guidance) | {"image": image(seed, SIDE, SIDE), "max_area": SIDE * SIDE, "_auto_resize": False}


def kontext_inpaint(seed: int, steps: int, guidance: float) -> Arguments:
    """A reference image and a mask."""
    return kontext(seed, steps, guidance) | {"mask_image": mask(seed, SIDE, SIDE), "strength": 1.0}


# The number of images repeats no embeddings that are given.
TWO_PROMPTS = {"prompt_embeds": seeded(7, 2, TEXT_TOKENS, 16), "pooled_prompt_embeds": seeded(8, 2, 16)}
TWO_NEGATIVES = {"negative_prompt_embeds": seeded(9, 2, TEXT_TOKENS, 16), "negative_pooled_prompt_embeds": seeded(10, 2, 16)}


def _family(kind: str, request: Callable[[int, int, float], Arguments], variant: str = "", **parts: Any) -> Family:
    return Family(
        f"{kind} ({variant})" if variant else kind,
        "Flux Kontext" if "Kontext" in kind else "Flux",
        build_seeded(lambda: pipeline(kind, **parts)),
        request,
        output_type="pt",
        doubled=TWO_PROMPTS | (TWO_NEGATIVES if request is with_negative else {}),
    )


FAMILIES = [
    _family("FluxPipeline", text_to_image),
    _family("FluxPipeline", with_negative, "true guidance"),
    _family("FluxImg2ImgPipeline", image_to_image),
    _family("FluxInpaintPipeline", inpaint),
    _family("FluxFillPipeline", inpaint, in_channels=16 + 16 + 16),
    _family("FluxControlPipeline", control, in_channels=32),
    _family("FluxControlNetPipeline", control, with_controlnet=True),
    _family("FluxControlImg2ImgPipeline", control_image_to_image, in_channels=32),
    _family("FluxControlInpaintPipeline", control_inpaint, in_channels=32),
    _family("FluxControlNetImg2ImgPipeline", control_image_to_image, with_controlnet=True),
    _family("FluxControlNetInpaintPipeline", control_inpaint, with_controlnet=True),
    _family("FluxKontextPipeline", kontext),
    _family("FluxKontextInpaintPipeline", kontext_inpaint),
]
