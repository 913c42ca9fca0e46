# SPDX-License-Identifier: Apache-2.0
"""HiDream: a mixture of experts whose prompts come from four encoders, one of them with its layers before its rows."""

from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, HiDreamImageTransformer2DModel

from support.families.rig.tables import asking, assemble, entry, shifted_vae, texts


def _pipeline(kind: str) -> Any:
    transformer = HiDreamImageTransformer2DModel(
        patch_size=2, in_channels=4, out_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2,
        caption_channels=[32, 16], text_emb_dim=24, num_routed_experts=4, num_activated_experts=2, axes_dims_rope=(4, 2, 2),
        max_resolution=(16, 16), llama_layers=[0, 1], force_inference_output=True,
    )  # fmt: skip
    pipeline = assemble(kind, transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(), vae=shifted_vae())
    pipeline.default_sample_size = 16  # every size is brought to the area of this many latents squared
    return pipeline


EMBEDDINGS = {"prompt_embeds_t5": (1, 8, 32), "prompt_embeds_llama3": (2, 1, 8, 16), "pooled_prompt_embeds": (1, 24)}

FAMILIES = [entry("HiDreamImagePipeline", "HiDream", _pipeline, asking(32, **texts(apart=300, step=100, **EMBEDDINGS)))]
