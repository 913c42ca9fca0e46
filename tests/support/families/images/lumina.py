# SPDX-License-Identifier: Apache-2.0
"""Lumina: the first with one call for guidance, the second with two calls, whose time runs from noise at 0 to the image at 1."""

from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, Lumina2Transformer2DModel, LuminaNextDiT2DModel

from support.families.rig.tables import asking, assemble, entry, masks, more, shifted_vae, texts

SHAPE = {
    "sample_size": 16, "patch_size": 2, "in_channels": 4, "hidden_size": 24, "num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 16,
}  # fmt: skip


def _lumina(kind: str) -> Any:
    transformer = LuminaNextDiT2DModel(num_layers=2, learn_sigma=True, cross_attention_dim=32, **SHAPE)
    return assemble(kind, transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(), vae=shifted_vae())


def _lumina2(kind: str = "Lumina2Pipeline") -> Any:
    transformer = Lumina2Transformer2DModel(
        num_layers=1, num_refiner_layers=1, axes_dim_rope=(4, 2, 2), axes_lens=(32, 32, 32), cap_feat_dim=32, **SHAPE
    )
    return assemble(kind, transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(), vae=shifted_vae())


PROMPTS = asking(32, **texts(prompt_embeds=(1, 8, 32)), **masks(prompt_attention_mask=8))

FAMILIES = [
    entry("LuminaPipeline", "Lumina", _lumina, more(PROMPTS, negative_prompt=None), repeats=False),
    entry("Lumina2Pipeline", "Lumina 2", _lumina2, PROMPTS, repeats=False),
]
