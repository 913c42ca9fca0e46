# SPDX-License-Identifier: Apache-2.0
"""Tiny transformers whose latents are images: CogView 3 and 4, DiT, Hunyuan-DiT, HiDream, GLM-Image, ErnieImage, PRX and Bria Fibo 2."""

from functools import partial
from typing import Any

import diffusers
import torch

from support.families.images.flux2 import vae as flux2_vae
from support.families.rig.family import dynamic_flow, flow, plain_ddim, shifted_vae, tiny_vae
from support.families.rig.tables import asking, assemble, entry, masks, more, noise, on, ones, padded, pixels, texts

# Pixels. The VAE halves them and a patch has 2 x 2: 16 tokens.
SIDE = 16
TEXT_TOKENS = 6
STATISTICS = {"latents_mean": [0.1] * 4, "latents_std": [1.3] * 4}
SHAPE = {
    "patch_size": 2, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2, "text_embed_dim": 16,
    "time_embed_dim": 8, "condition_dim": 4,
}  # fmt: skip


def cogview3(kind: str) -> Any:
    """The sizes of the image are rows."""
    vae = tiny_vae()
    transformer = diffusers.CogView3PlusTransformer2DModel(
        patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2, text_embed_dim=32,
        time_embed_dim=16, condition_dim=8, pos_embed_max_size=16, sample_size=16,
    )  # fmt: skip
    # With no signal left in the first step the noise cannot be what is predicted.
    config = {"clip_sample": False, "rescale_betas_zero_snr": True, "prediction_type": "v_prediction"}
    return assemble(kind, vae=vae, transformer=transformer, scheduler=diffusers.CogVideoXDDIMScheduler(**config))


def hunyuan_dit(kind: str) -> Any:
    """Two masked prompts, a style and the sizes of the image as rows, a table of angles for all."""
    transformer = diffusers.HunyuanDiT2DModel(
        sample_size=16, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=3, in_channels=4,
        cross_attention_dim=32, cross_attention_dim_t5=24, pooled_projection_dim=16, hidden_size=24, text_len=6, text_len_t5=8,
        activation_fn="gelu-approximate",
    )  # fmt: skip
    scheduler, vae = diffusers.DDPMScheduler(clip_sample=False), tiny_vae(levels=4)
    return assemble(kind, transformer=transformer, scheduler=scheduler, vae=vae, requires_safety_checker=False)


def hidream(kind: str) -> Any:
    """A mixture of experts whose prompts come from four encoders, one of them with its layers before its rows."""
    transformer = diffusers.HiDreamImageTransformer2DModel(
        patch_size=2, in_channels=4, out_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2,
        caption_channels=[32, 16], text_emb_dim=24, num_routed_experts=4, num_activated_experts=2, axes_dims_rope=(4, 2, 2),
        max_resolution=(16, 16), llama_layers=[0, 1], force_inference_output=True,
    )  # fmt: skip
    pipeline = assemble(kind, transformer=transformer, scheduler=flow(), vae=shifted_vae())
    pipeline.default_sample_size = 16  # every size is brought to the area of this many latents squared
    return pipeline


def cogview4(kind: str) -> Any:
    """Sizes and crops as rows of numbers; two calls a step."""
    in_channels = 8 if "Control" in kind else 4
    transformer = diffusers.CogView4Transformer2DModel(
        in_channels=in_channels, pos_embed_max_size=16, sample_size=16, rope_axes_dim=(8, 8), **SHAPE
    )
    return assemble(kind, vae=shifted_vae(), transformer=transformer, scheduler=dynamic_flow())


# The number of a class is a row; there is no prompt.
dit = on(
    "DiTTransformer2DModel", vae=tiny_vae, scheduler=plain_ddim,
    sample_size=16, num_layers=2, patch_size=4, attention_head_dim=8, num_attention_heads=2, in_channels=4, out_channels=8,
)  # fmt: skip
# An image's tokens, made by a language model, are given; a cache for reference images is always passed.
glm_image = on(
    "GlmImageTransformer2DModel", vae=partial(tiny_vae, **STATISTICS), scheduler=dynamic_flow,
    in_channels=4, prior_vq_quantizer_codebook_size=32, **SHAPE,
)  # fmt: skip
# Texts of any length, padded by the pipeline; both prompts in one call.
ernie = on(
    "ErnieImageTransformer2DModel", vae=flux2_vae, hidden_size=32, num_attention_heads=2, num_layers=2, ffn_hidden_size=32,
    in_channels=16, out_channels=16, text_in_dim=16, rope_axes_dim=(8, 4, 4),
)  # fmt: skip
# A time for the whole call, both prompts in one call.
prx = on(
    "PRXTransformer2DModel", in_channels=4, patch_size=2, context_in_dim=16, hidden_size=32, mlp_ratio=2.0, num_heads=2, depth=2,
    axes_dim=[8, 8],
)  # fmt: skip
# Text squeezed into as many tokens as its length says.
fibo2 = on(
    "BriaFibo2Transformer2DModel", vae=flux2_vae, scheduler=dynamic_flow, in_channels=4, patch_size=2, dim=32, n_layers=2,
    n_refiner_layers=1, n_heads=2, cap_feat_dim=16, injection_layer_ids=(1,), perceiver_num_layers=1, min_num_gist_tokens=2,
    max_num_gist_tokens=8, gist_step=2, gist_min_text_len=2, gist_max_text_len=8, axes_dims=(8, 4, 4), axes_lens=(64, 32, 32),
)  # fmt: skip


def _prior(seed: int) -> torch.Tensor:
    return torch.randint(0, 32, (1, 16), generator=torch.Generator().manual_seed(seed))


OTHER_SIZES = {"original_size": lambda seed: (32 + seed, 32)}
SIZED = asking(32, **texts(prompt_embeds=(1, 16, 32)), **OTHER_SIZES)
A_CLASS = asking(class_labels=lambda seed: [seed])
TWO_TEXTS = asking(
    32,
    **texts(prompt_embeds=(1, 6, 32), prompt_embeds_2=(1, 8, 24)),
    **masks(prompt_attention_mask=6, prompt_attention_mask_2=8),
    **OTHER_SIZES,
    use_resolution_binning=False,
)
FLOAT32 = "its layer norms compute in float32 whatever they are given"
OF_FOUR_ENCODERS = asking(
    32, **texts(apart=300, step=100, prompt_embeds_t5=(1, 8, 32), prompt_embeds_llama3=(2, 1, 8, 16), pooled_prompt_embeds=(1, 24))
)
TEXT_TO_IMAGE = asking(SIDE, **texts(apart=200, prompt_embeds=(1, TEXT_TOKENS, 16)))
CONTROL = more(TEXT_TO_IMAGE, control_image=pixels(SIDE))
# The tokens of the image beside the prompt.
WITH_PRIOR = more(TEXT_TO_IMAGE, prior_token_ids=_prior)
# Prompts as a list of texts, the negative one shorter.
LISTED = asking(64, prompt_embeds=[noise(TEXT_TOKENS, 16)], negative_prompt_embeds=[noise(TEXT_TOKENS - 2, 16, at=200)])
MASKS = {
    "prompt_attention_mask": padded(TEXT_TOKENS),
    "negative_prompt_attention_mask": ones(1, TEXT_TOKENS, dtype=torch.bool),
}
MASKED = more(TEXT_TO_IMAGE, **MASKS, use_resolution_binning=False)
# Text of two layers of the encoder.
BUNDLED = asking(64, **texts(apart=200, prompt_embeds=(1, 2, TEXT_TOKENS, 16)), prompt_embeds_mask=padded(TEXT_TOKENS))
EDIT = more(BUNDLED, image=[pixels(64)])

FAMILIES = [
    entry("CogView3PlusPipeline", "CogView 3", cogview3, SIZED, repeats=False),
    entry("DiTPipeline", "DiT", dit, A_CLASS, doubled={"class_labels": [1, 7]}),
    entry("HiDreamImagePipeline", "HiDream", hidream, OF_FOUR_ENCODERS),
    entry("HunyuanDiTPipeline", "Hunyuan-DiT", hunyuan_dit, TWO_TEXTS, repeats=False, tolerance=1e-6, reason=FLOAT32),
    entry("CogView4Pipeline", "CogView4", cogview4, TEXT_TO_IMAGE),
    entry("CogView4ControlPipeline", "CogView4", cogview4, CONTROL),
    entry("GlmImagePipeline", "GLM-Image", glm_image, WITH_PRIOR),
    entry("ErnieImagePipeline", "Ernie Image", ernie, LISTED),
    # PRX has a time for one image only, and fails at two.
    entry("PRXPipeline", "PRX", prx, MASKED, doubled=None),
    entry("BriaFibo2Pipeline", "Bria Fibo 2", fibo2, BUNDLED),
    entry("BriaFibo2Pipeline (edit)", "Bria Fibo 2", fibo2, EDIT),
]
