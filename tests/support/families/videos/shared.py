# SPDX-License-Identifier: Apache-2.0
"""Requests and fields that several families of tiny video pipelines share.

Real, here and in the files beside this one: diffusers' classes. Not real: the weights, which are random, and the prompts,
which are embeddings that no encoder made.
"""

from functools import partial
from typing import Any

import torch

from support.families.rig.family import Arguments, call_pipeline
from support.families.rig.tables import OfSeed, Request, asking, entry, texts, valid

# The default pixels, frames and tokens of a family. Most VAEs divide sides by 8 and keep every fourth frame.
SIDE = 32
FRAMES = 5
TEXT_TOKENS = 6

# The number of videos repeats no given embeddings. Most families are compared by their latents.
family = partial(entry, repeats=False, output_type="latent")


def in_float32(reason: str) -> dict[str, Any]:
    """Return settings to compare a `Family` in float32, with a tolerance of 1e-4; `reason` says what its model lacks for more precision."""
    return {"compared_in": torch.float32, "tolerance": 1e-4, "reason": reason}


def prompted(side: int = SIDE, *, tokens: int = TEXT_TOKENS, width: int = 16, num_frames: int = FRAMES, **given: Any) -> Request:
    """Return a text-to-video request: a prompt and a negative one, a size, a number of frames, and other values, as in `asking`."""
    return asking(side, num_frames=num_frames, **texts(prompt_embeds=(1, tokens, width)), **given)


def short_prompts(dtype: torch.dtype = torch.int64) -> dict[str, OfSeed]:
    """Return makers of masks: of a prompt whose length depends on the seed, and of a negative prompt of one token."""
    return {
        "prompt_attention_mask": valid(TEXT_TOKENS, lambda seed: 2 + seed % 4, dtype),
        "negative_prompt_attention_mask": valid(TEXT_TOKENS, lambda _: 1, dtype),
    }


def call_with_guider(view: Any, arguments: Arguments) -> Any:
    """Run a pipeline that takes the strength of guidance from its guider, and return the first element of its output.

    A new guider gets the argument `guidance_scale`; the call gets all other arguments.
    """
    view.guider = view.guider.new(guidance_scale=arguments["guidance_scale"])
    return call_pipeline(view, {name: value for name, value in arguments.items() if name != "guidance_scale"})
