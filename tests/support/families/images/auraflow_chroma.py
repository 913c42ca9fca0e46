# SPDX-License-Identifier: Apache-2.0
"""AuraFlow and Chroma: transformers over image and text tokens; Chroma masks text and calls twice for guidance."""

from typing import Any

from diffusers import AuraFlowTransformer2DModel, ChromaTransformer2DModel, FlowMatchEulerDiscreteScheduler

from support.families.rig.family import tiny_vae, token_mask
from support.families.rig.tables import asking, assemble, entry, masks, more, pixels, shifted_vae, texts

TOKENS = 8


def _auraflow(kind: str = "AuraFlowPipeline") -> Any:
    transformer = AuraFlowTransformer2DModel(
        sample_size=32, patch_size=2, in_channels=4, out_channels=4, num_mmdit_layers=1, num_single_dit_layers=1,
        attention_head_dim=8, num_attention_heads=2, joint_attention_dim=32, caption_projection_dim=16, pos_embed_max_size=256,
    )  # fmt: skip
    return assemble(kind, transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(), vae=tiny_vae())


def _chroma(kind: str) -> Any:
    transformer = ChromaTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, axes_dims_rope=(4, 4, 8), approximator_num_channels=8, approximator_hidden_dim=32,
        approximator_layers=1,
    )  # fmt: skip
    return assemble(kind, transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(), vae=shifted_vae())


PROMPTS = asking(32, **texts(prompt_embeds=(1, TOKENS, 32)), **masks(prompt_attention_mask=TOKENS))
CHROMA_PROMPTS = more(
    PROMPTS,
    prompt_attention_mask=lambda seed: token_mask(seed, TOKENS).bool(),
    negative_prompt_attention_mask=lambda seed: token_mask(seed + 1, TOKENS).bool(),
)
# Half the strength is half the steps.
IMAGE_TO_IMAGE = more(CHROMA_PROMPTS, times=2, image=pixels(), strength=0.5)

FAMILIES = [
    entry("AuraFlowPipeline", "AuraFlow", _auraflow, PROMPTS),
    entry("ChromaPipeline", "Chroma", _chroma, CHROMA_PROMPTS, repeats=False),
    entry("ChromaImg2ImgPipeline", "Chroma", _chroma, IMAGE_TO_IMAGE, repeats=False),
]
