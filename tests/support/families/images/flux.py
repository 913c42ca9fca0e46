# SPDX-License-Identifier: Apache-2.0
"""Tiny Flux pipelines: text to image, image to image, inpaint, fill, control, ControlNet and Kontext. Prompts are embeddings."""

from functools import partial
from typing import Any

import diffusers

from support.families.rig.family import Family, dynamic_flow, shifted_vae
from support.families.rig.tables import Request, asking, assemble, entry, halfway, more, noise, painted, pixels, texts

# Pixels. The VAE halves them and the pipeline packs 2 x 2: 16 tokens.
SIDE = 16
TEXT_TOKENS = 6

SHAPE = {
    "patch_size": 1, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2,
    "joint_attention_dim": 16, "pooled_projection_dim": 16, "axes_dims_rope": (4, 4, 8), "guidance_embeds": True,
}  # fmt: skip


def pipeline(kind: str, *, in_channels: int = 16, controlnets: int = 1) -> Any:
    """Build a tiny Flux pipeline of diffusers' class `kind`, guidance-distilled, with one double and one single block.

    Packing turns the VAE's 4 channels into 16; classes of a ControlNet get `controlnets`.
    """
    made = [diffusers.FluxControlNetModel(in_channels=16, **SHAPE) for _ in range(controlnets)]
    parts = {"controlnet": made[0] if controlnets == 1 else made} if "ControlNet" in kind else {}
    transformer = diffusers.FluxTransformer2DModel(in_channels=in_channels, out_channels=16, **SHAPE)
    return assemble(kind, transformer=transformer, vae=shifted_vae(), scheduler=dynamic_flow(), **parts)


TEXT_TO_IMAGE = asking(SIDE, prompt_embeds=noise(1, TEXT_TOKENS, 16), pooled_prompt_embeds=noise(1, 16, at=100))
# True guidance beside the distilled one: a second model call a step.
EMBEDDINGS = texts(apart=200, step=100, prompt_embeds=(1, TEXT_TOKENS, 16), pooled_prompt_embeds=(1, 16))
WITH_NEGATIVE = asking(SIDE, scale="true_cfg_scale", guidance_scale=3.5, **EMBEDDINGS)
IMAGE_TO_IMAGE = halfway(TEXT_TO_IMAGE, image=pixels(SIDE))
# Inpainting over the whole schedule.
INPAINT = more(TEXT_TO_IMAGE, image=pixels(SIDE), mask_image=painted(SIDE), strength=1.0)
CONTROL = more(TEXT_TO_IMAGE, control_image=pixels(SIDE))
TWO_IMAGES = [pixels(SIDE), pixels(SIDE, at=50)]
# The modes are of ControlNets in one file; these have none.
CONTROL_BY_TWO = more(TEXT_TO_IMAGE, control_image=TWO_IMAGES, control_mode=[None, None], controlnet_conditioning_scale=[0.5, 1.0])
CONTROL_IMAGE_TO_IMAGE = more(IMAGE_TO_IMAGE, control_image=pixels(SIDE, at=1))
CONTROL_INPAINT = more(INPAINT, control_image=pixels(SIDE, at=1))
# A reference image; sizes are kept as they are given.
KONTEXT = more(TEXT_TO_IMAGE, image=pixels(SIDE), max_area=SIDE * SIDE, _auto_resize=False)
KONTEXT_INPAINT = more(KONTEXT, mask_image=painted(SIDE), strength=1.0)


def _family(name: str, request: Request, in_channels: int = 16) -> Family:
    family = "Flux Kontext" if "Kontext" in name else "Flux"
    return entry(name, family, partial(pipeline, in_channels=in_channels), request, repeats=False)


FAMILIES = [
    _family("FluxPipeline", TEXT_TO_IMAGE),
    _family("FluxPipeline (true guidance)", WITH_NEGATIVE),
    _family("FluxImg2ImgPipeline", IMAGE_TO_IMAGE),
    _family("FluxInpaintPipeline", INPAINT),
    _family("FluxFillPipeline", INPAINT, in_channels=16 + 16 + 16),
    _family("FluxControlPipeline", CONTROL, in_channels=32),
    _family("FluxControlNetPipeline", CONTROL),
    entry("FluxControlNetPipeline (two ControlNets)", "Flux", partial(pipeline, controlnets=2), CONTROL_BY_TWO, repeats=False),
    _family("FluxControlImg2ImgPipeline", CONTROL_IMAGE_TO_IMAGE, in_channels=32),
    _family("FluxControlInpaintPipeline", CONTROL_INPAINT, in_channels=32),
    _family("FluxControlNetImg2ImgPipeline", CONTROL_IMAGE_TO_IMAGE),
    _family("FluxControlNetInpaintPipeline", CONTROL_INPAINT),
    _family("FluxKontextPipeline", KONTEXT),
    _family("FluxKontextInpaintPipeline", KONTEXT_INPAINT),
]
