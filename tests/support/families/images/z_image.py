# SPDX-License-Identifier: Apache-2.0
"""Tiny Z-Image pipelines: text to image, image to image, inpaint, ControlNet and Omni. Rows come as lists, one item each."""

from collections.abc import Callable
from typing import Any

import diffusers

from support.families.rig.family import Arguments, Family, build_seeded, image, mask, seeded, tiny_vae

# Pixels. The VAE halves them and a patch has 2 x 2: 16 tokens.
SIDE = 16
TEXT_TOKENS = 6
SHAPE = {"dim": 32, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2}


def pipeline(kind: str, *, with_controlnet: bool = False, sees: bool = False) -> Any:
    """A pipeline of the class `kind` on a transformer of two layers."""
    transformer = diffusers.ZImageTransformer2DModel(
        n_layers=2, in_channels=4, cap_feat_dim=16, axes_dims=[8, 4, 4], axes_lens=[256, 32, 32], **SHAPE
    )
    parts: dict[str, Any] = {"text_encoder": None, "tokenizer": None} | (dict.fromkeys(("siglip", "siglip_processor")) if sees else {})
    if with_controlnet:
        # To inpaint, it sees the control, the mask and the masked image.
        channels = 4 + 1 + 4 if "Inpaint" in kind else 4
        parts["controlnet"] = diffusers.ZImageControlNetModel(
            control_layers_places=[0], control_refiner_layers_places=[0], control_in_dim=channels, **SHAPE
        )
    return getattr(diffusers, kind)(
        transformer=transformer,
        vae=tiny_vae(scaling_factor=1.5, shift_factor=0.1),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        **parts,
    )


def text_to_image(seed: int, steps: int, guidance: float) -> Arguments:
    """A prompt, a negative prompt and a size."""
    return {
        "prompt_embeds": [seeded(seed, TEXT_TOKENS, 16)],
        "negative_prompt_embeds": [seeded(seed + 200, TEXT_TOKENS, 16)],
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "height": SIDE,
        "width": SIDE,
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


def omni(seed: int, steps: int, guidance: float) -> Arguments:
    """Rows are lists again: the prompt in as many parts as there are reference images and one, here none."""
    texts = {name: [value] for name, value in text_to_image(seed, steps, guidance).items() if name.endswith("embeds")}
    return text_to_image(seed, steps, guidance) | texts


def control_inpaint(seed: int, steps: int, guidance: float) -> Arguments:
    """A part again, following another image."""
    images = {"image": image(seed, SIDE, SIDE), "mask_image": mask(seed, SIDE, SIDE), "control_image": image(seed + 1, SIDE, SIDE)}
    return text_to_image(seed, steps, guidance) | images


def _family(kind: str, request: Callable[[int, int, float], Arguments], **parts: Any) -> Family:
    return Family(
        kind,
        "Z-Image",
        build_seeded(lambda: pipeline(kind, **parts)),
        request,
        output_type="pt",
        # The images to inpaint are not repeated, so it fails at two.
        doubled=None if kind == "ZImageControlNetInpaintPipeline" else {"num_images_per_prompt": 2},
    )


FAMILIES = [
    _family("ZImagePipeline", text_to_image),
    _family("ZImageImg2ImgPipeline", image_to_image),
    _family("ZImageInpaintPipeline", inpaint),
    _family("ZImageControlNetPipeline", control, with_controlnet=True),
    _family("ZImageControlNetInpaintPipeline", control_inpaint, with_controlnet=True),
    _family("ZImageOmniPipeline", omni, sees=True),
]
