# SPDX-License-Identifier: Apache-2.0
"""Tiny SkyReels V2 pipelines of diffusers' real classes: Wan's design with a transformer of their own.

Weights are random, and prompts are embeddings.
"""

from functools import partial
from typing import Any

import diffusers

from support.families.rig.tables import more, pixels
from support.families.videos import wan
from support.families.videos.shared import family, prompted


def pipeline(kind: str, *, shape: dict[str, Any] = wan.TRANSFORMER, **parts: Any) -> Any:
    """A pipeline of the class `kind` on a transformer of two blocks."""
    return wan.pipeline(kind, transformer=diffusers.SkyReelsV2Transformer3DModel(**shape), **parts)


def with_image_tokens(kind: str) -> Any:
    """The image as latents and as tokens, which are found by counting 512 text tokens from the end."""
    return pipeline(kind, shape=wan.WITH_IMAGE_TOKENS, **wan.tiny_image_encoder())


# Diffusion forcing: every latent frame has a time of its own, and the transformer gets the frame rate.
# With frame rates diffusers can make one video at a time only.
frame_by_frame = partial(pipeline, shape=wan.TRANSFORMER | {"inject_sample_info": True})
forced = prompted(prompt=None, fps=24)
FIELDS = {"output_type": "pt"}
FORCED = FIELDS | {"doubled": None}

FAMILIES = [
    family("SkyReelsV2Pipeline", "SkyReels V2", pipeline, wan.text_to_video, **FIELDS),
    family("SkyReelsV2ImageToVideoPipeline", "SkyReels V2", with_image_tokens, wan.image_tokens_to_video, **FIELDS),
    family("SkyReelsV2DiffusionForcingPipeline", "SkyReels V2", frame_by_frame, forced, **FORCED),
    family("SkyReelsV2DiffusionForcingImageToVideoPipeline", "SkyReels V2", frame_by_frame, more(forced, image=pixels()), **FORCED),
]
