# SPDX-License-Identifier: Apache-2.0
"""Tiny Flux 2 pipelines: with and without reference images, Klein distilled and with guidance, inpaint, and with a KV cache."""

from collections.abc import Callable
from typing import Any

import diffusers

from support.families.rig.family import Arguments, Family, build_seeded, image, mask, seeded

# Pixels, the least that a reference may have. The VAE shrinks them by eight and packs 2 x 2: 16 tokens.
SIDE = 64
TEXT_TOKENS = 6


def vae() -> Any:
    """The VAE of Flux 2: 4 channels, packed to 16, with statistics of a batch norm."""
    return diffusers.AutoencoderKLFlux2(
        block_out_channels=(4,) * 4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        norm_num_groups=2,
        layers_per_block=1,
        sample_size=SIDE,
    )


def pipeline(kind: str, **config: Any) -> Any:
    """A pipeline of the class `kind` on a transformer of two blocks."""
    transformer = diffusers.Flux2Transformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=kind == "Flux2Pipeline",
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return getattr(diffusers, kind)(scheduler, vae(), None, None, transformer, **config)


def text_to_image(seed: int, steps: int, guidance: float) -> Arguments:
    """A prompt and a size."""
    return {
        "prompt_embeds": seeded(seed, 1, TEXT_TOKENS, 16),
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "height": SIDE,
        "width": SIDE,
    }


def edit(seed: int, steps: int, guidance: float) -> Arguments:
    """Two reference images of other sizes."""
    return text_to_image(seed, steps, guidance) | {"image": [image(seed, SIDE, SIDE), image(seed + 1, 2 * SIDE, SIDE)]}


def guided(seed: int, steps: int, guidance: float) -> Arguments:
    """Klein that is not distilled: a second model call a step."""
    return text_to_image(seed, steps, guidance) | {"negative_prompt_embeds": seeded(seed + 200, 1, TEXT_TOKENS, 16)}


def inpaint(seed: int, steps: int, guidance: float) -> Arguments:
    """A part again, over the whole schedule."""
    images = {"image": image(seed, SIDE, SIDE), "mask_image": mask(seed, SIDE, SIDE)}
    return guided(seed, steps, guidance) | images | {"strength": 1.0}


def without_scale(request: Callable[[int, int, float], Arguments]) -> Callable[[int, int, float], Arguments]:
    """The same request of a class that has no guidance scale."""

    def ask(seed: int, steps: int, guidance: float) -> Arguments:
        return {name: value for name, value in request(seed, steps, guidance).items() if name != "guidance_scale"}

    return ask


def _family(kind: str, request: Callable[[int, int, float], Arguments], variant: str = "", *, reason: str = "", **config: Any) -> Family:
    return Family(
        f"{kind} ({variant})" if variant else kind,
        "Flux 2 Klein" if "Klein" in kind else "Flux 2",
        build_seeded(lambda: pipeline(kind, **config)),
        request,
        output_type="pt",
        shares=not reason,
        reason=reason,
        doubled={"num_images_per_prompt": 2},
    )


FAMILIES = [
    _family("Flux2Pipeline", text_to_image),
    _family("Flux2Pipeline", edit, "two references"),
    _family("Flux2KleinPipeline", text_to_image, "distilled", is_distilled=True),
    _family("Flux2KleinPipeline", guided, "guided", is_distilled=False),
    _family("Flux2KleinInpaintPipeline", inpaint, is_distilled=False),
    _family("Flux2KleinKVPipeline", without_scale(text_to_image)),
    _family(
        "Flux2KleinKVPipeline", without_scale(edit), "two references", reason="keys and values of the references are cached per request"
    ),
]
