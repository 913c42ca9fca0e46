# SPDX-License-Identifier: Apache-2.0
"""CogView 3 Plus: the sizes of the image are rows."""

from typing import Any

from diffusers import CogVideoXDDIMScheduler, CogView3PlusTransformer2DModel

from support.families.rig.family import tiny_vae
from support.families.rig.tables import asking, assemble, entry, texts

SIZES = {
    "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2,
    "text_embed_dim": 32, "time_embed_dim": 16, "condition_dim": 8, "pos_embed_max_size": 16, "sample_size": 16,
}  # fmt: skip


def _cogview3(kind: str) -> Any:
    # With no signal left in the first step the noise cannot be what is predicted.
    scheduler = CogVideoXDDIMScheduler(clip_sample=False, rescale_betas_zero_snr=True, prediction_type="v_prediction")
    return assemble(kind, vae=tiny_vae(), transformer=CogView3PlusTransformer2DModel(**SIZES), scheduler=scheduler)


PROMPTS = asking(32, **texts(prompt_embeds=(1, 16, 32)), original_size=lambda seed: (32 + seed, 32))

FAMILIES = [entry("CogView3PlusPipeline", "CogView 3", _cogview3, PROMPTS, repeats=False)]
