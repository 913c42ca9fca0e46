# SPDX-License-Identifier: Apache-2.0
"""Tiny Z-Image pipelines: text to image, image to image, inpaint, ControlNet and Omni. Rows come as lists, one item each."""

from typing import Any

import diffusers

from support.families.rig.family import dynamic_flow, shifted_vae
from support.families.rig.tables import asking, assemble, entry, halfway, more, noise, painted, pixels

# Pixels. The VAE halves them and a patch has 2 x 2: 16 tokens.
SIDE = 16
TEXT_TOKENS = 6
SHAPE = {"dim": 32, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2}


def pipeline(kind: str) -> Any:
    """Build a tiny Z-Image pipeline of diffusers' class `kind`.

    If the class needs a ControlNet, it gets one with 4 input channels, or 9 to inpaint.
    """
    transformer = diffusers.ZImageTransformer2DModel(
        n_layers=2, in_channels=4, cap_feat_dim=16, axes_dims=[8, 4, 4], axes_lens=[256, 32, 32], **SHAPE
    )
    parts = {}
    if "ControlNet" in kind:
        # To inpaint, the ControlNet gets the control, the mask and the masked image.
        channels = 4 + 1 + 4 if "Inpaint" in kind else 4
        parts["controlnet"] = diffusers.ZImageControlNetModel(
            control_layers_places=[0], control_refiner_layers_places=[0], control_in_dim=channels, **SHAPE
        )
    return assemble(kind, transformer=transformer, vae=shifted_vae(), scheduler=dynamic_flow(), **parts)


PROMPTS = {"prompt_embeds": [noise(TEXT_TOKENS, 16)], "negative_prompt_embeds": [noise(TEXT_TOKENS, 16, at=200)]}
TEXT_TO_IMAGE = asking(SIDE, **PROMPTS)
IMAGE_TO_IMAGE = halfway(TEXT_TO_IMAGE, image=pixels(SIDE))
# Inpainting over the whole schedule.
INPAINT = more(TEXT_TO_IMAGE, image=pixels(SIDE), mask_image=painted(SIDE), strength=1.0)
CONTROL = more(TEXT_TO_IMAGE, control_image=pixels(SIDE))
CONTROL_INPAINT = more(TEXT_TO_IMAGE, image=pixels(SIDE), mask_image=painted(SIDE), control_image=pixels(SIDE, at=1))
# Rows are lists again: the prompt in as many parts as there are reference images and one, here none.
OMNI = asking(SIDE, **{name: [value] for name, value in PROMPTS.items()})

FAMILIES = [
    entry("ZImagePipeline", "Z-Image", pipeline, TEXT_TO_IMAGE),
    entry("ZImageImg2ImgPipeline", "Z-Image", pipeline, IMAGE_TO_IMAGE),
    entry("ZImageInpaintPipeline", "Z-Image", pipeline, INPAINT),
    entry("ZImageControlNetPipeline", "Z-Image", pipeline, CONTROL),
    # The images to inpaint are not repeated, so the pipeline fails with two.
    entry("ZImageControlNetInpaintPipeline", "Z-Image", pipeline, CONTROL_INPAINT, doubled=None),
    entry("ZImageOmniPipeline", "Z-Image", pipeline, OMNI),
]
