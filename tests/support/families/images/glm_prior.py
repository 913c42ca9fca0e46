# SPDX-License-Identifier: Apache-2.0
"""A tiny GLM-Image whose language model draws the tokens of the image, as it does by default.

Real: the pipeline, its language model and the sampling. Not real: the weights, and the processor, which knows one text and one size.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers

from support.families.images.latent_images import FAMILIES as LATENT_IMAGES
from support.families.images.latent_images import SIDE, glm_image
from support.families.rig.family import Arguments, Family, build_seeded, call_pipeline

CODES = 32
# The grid of the image, and that of a smaller one which is drawn before; two tokens of the text.
GRIDS = [[1, 2, 2], [1, 1, 1]]
TEXT = [5, 6]


class OneText:
    """A processor that makes the same tokens of every text."""

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        ids = torch.tensor([TEXT])
        return transformers.BatchFeature(
            {"input_ids": ids, "attention_mask": torch.ones_like(ids), "image_grid_thw": torch.tensor(GRIDS)},
        )


def language_model() -> Any:
    """Build a language model of one layer, whose tokens are those of an image only."""
    text = {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vision_vocab_size": CODES, "pad_token_id": 0, "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0},
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 8, "num_heads": 1, "image_size": 32, "patch_size": 16, "intermediate_size": 8}
    codes = {"embed_dim": 8, "num_embeddings": CODES, "latent_channels": 8}
    tokens = {"image_token_id": 60, "image_start_token_id": 61, "image_end_token_id": 62}
    config = transformers.GlmImageConfig(text_config=text, vision_config=vision, vq_config=codes, **tokens)
    return transformers.GlmImageForConditionalGeneration(config)


def _with_drawn_tokens(view: Any, arguments: Arguments) -> Any:
    prior, *_ = view.generate_prior_tokens("words", SIDE, SIDE, generator=arguments["generator"])
    return call_pipeline(view, arguments | {"prior_token_ids": prior})


def drawing_family() -> Family:
    """Return a GLM-Image family in whose requests the language model draws the image's tokens; in the plain family they are given."""
    given = next(family for family in LATENT_IMAGES if family.name == "GlmImagePipeline")
    build = build_seeded(partial(glm_image, "GlmImagePipeline", vision_language_encoder=language_model, processor=OneText))
    return replace(given, name="GlmImagePipeline (drawn tokens)", build=build, call=_with_drawn_tokens)
