# SPDX-License-Identifier: Apache-2.0
"""Tiny Flux 2 pipelines: with and without reference images, Klein distilled and with guidance, inpaint, and with a KV cache."""

from functools import partial
from typing import Any

from support.families.rig.family import Family, dynamic_flow
from support.families.rig.tables import Request, asking, entry, more, noise, on, painted, part, pixels

# Pixels, the least that a reference may have. The VAE shrinks them by eight and packs 2 x 2: 16 tokens.
SIDE = 64
TEXT_TOKENS = 6

# The VAE of Flux 2: 4 channels, packed to 16, with statistics of a batch norm.
vae = part(
    "AutoencoderKLFlux2", block_out_channels=(4,) * 4, down_block_types=("DownEncoderBlock2D",) * 4,
    up_block_types=("UpDecoderBlock2D",) * 4, latent_channels=4, norm_num_groups=2, layers_per_block=1, sample_size=SIDE,
)  # fmt: skip


def pipeline(kind: str, **config: Any) -> Any:
    """Build a tiny Flux 2 pipeline of diffusers' class `kind`; only `Flux2Pipeline` itself embeds the guidance.

    `config` goes to the constructor of the class.
    """
    builder = on(
        "Flux2Transformer2DModel", vae=vae, scheduler=dynamic_flow, patch_size=1, in_channels=16, out_channels=None, num_layers=1,
        timestep_guidance_channels=16, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=kind == "Flux2Pipeline",
    )  # fmt: skip
    return builder(kind, **config)


TEXT_TO_IMAGE = asking(SIDE, prompt_embeds=noise(1, TEXT_TOKENS, 16))
# Two reference images of other sizes.
EDIT = more(TEXT_TO_IMAGE, image=[pixels(SIDE), pixels(2 * SIDE, SIDE, at=1)])
# Klein that is not distilled: a second model call a step.
GUIDED = more(TEXT_TO_IMAGE, negative_prompt_embeds=noise(1, TEXT_TOKENS, 16, at=200))
# Inpainting over the whole schedule.
INPAINT = more(GUIDED, image=pixels(SIDE), mask_image=painted(SIDE), strength=1.0)
# The class with a KV cache has no guidance scale.
KV = more(TEXT_TO_IMAGE, without=("guidance_scale",))
KV_EDIT = more(EDIT, without=("guidance_scale",))
CACHED = "keys and values of the references are cached per request"


def _family(name: str, request: Request, *, reason: str = "", **config: Any) -> Family:
    family = "Flux 2 Klein" if "Klein" in name else "Flux 2"
    return entry(name, family, partial(pipeline, **config), request, reason=reason)


FAMILIES = [
    _family("Flux2Pipeline", TEXT_TO_IMAGE),
    _family("Flux2Pipeline (two references)", EDIT),
    _family("Flux2KleinPipeline (distilled)", TEXT_TO_IMAGE, is_distilled=True),
    _family("Flux2KleinPipeline (guided)", GUIDED, is_distilled=False),
    _family("Flux2KleinInpaintPipeline", INPAINT, is_distilled=False),
    _family("Flux2KleinKVPipeline", KV),
    _family("Flux2KleinKVPipeline (two references)", KV_EDIT, reason=CACHED),
]
