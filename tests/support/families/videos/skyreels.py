# SPDX-License-Identifier: Apache-2.0
"""Tiny SkyReels V2 pipelines: Wan's design with a transformer of their own. Prompts are embeddings."""

from collections.abc import Callable
from typing import Any

import diffusers

from support.families.rig.family import Arguments, Family, build_seeded, image
from support.families.rig.two_rows import of_two_prompts
from support.families.videos import wan

# Its image tokens too are found by counting 512 text tokens from the end.
WITH_IMAGE_TOKENS = wan.WITH_IMAGE_TOKENS


def pipeline(kind: str, *, shape: dict[str, Any] = wan.TRANSFORMER, **parts: Any) -> Any:
    """A pipeline of the class `kind` on a transformer of two blocks."""
    return wan.pipeline(kind, transformer=diffusers.SkyReelsV2Transformer3DModel(**shape), **parts)


def image_to_video_pipeline() -> Any:
    """The image as latents and as tokens."""
    return pipeline("SkyReelsV2ImageToVideoPipeline", shape=WITH_IMAGE_TOKENS, **wan.tiny_image_encoder())


def frame_by_frame(kind: str) -> Any:
    """Diffusion forcing: every latent frame has a time of its own, and the frame rate is told to the transformer."""
    return pipeline(kind, shape=wan.TRANSFORMER | {"inject_sample_info": True})


def forced(seed: int, steps: int, guidance: float) -> Arguments:
    """Text to video at a frame rate."""
    return wan.text_to_video(seed, steps, guidance) | {"prompt": None, "fps": 24}


def forced_from_image(seed: int, steps: int, guidance: float) -> Arguments:
    """The first frame as well."""
    return forced(seed, steps, guidance) | {"image": image(seed, wan.SIDE, wan.SIDE)}


def _family(kind: str, make: Callable[[], Any], request: Callable[[int, int, float], Arguments]) -> Family:
    # With frame rates diffusers can make one video at a time only.
    doubled = None if "Forcing" in kind else of_two_prompts(request)
    return Family(kind, "SkyReels V2", build_seeded(make), request, output_type="pt", doubled=doubled)


FAMILIES = [
    _family("SkyReelsV2Pipeline", lambda: pipeline("SkyReelsV2Pipeline"), wan.text_to_video),
    _family("SkyReelsV2ImageToVideoPipeline", image_to_video_pipeline, wan.image_tokens_to_video),
    _family("SkyReelsV2DiffusionForcingPipeline", lambda: frame_by_frame("SkyReelsV2DiffusionForcingPipeline"), forced),
    _family(
        "SkyReelsV2DiffusionForcingImageToVideoPipeline",
        lambda: frame_by_frame("SkyReelsV2DiffusionForcingImageToVideoPipeline"),
        forced_from_image,
    ),
]
