# SPDX-License-Identifier: Apache-2.0
"""Tiny transformers of images: CogView 3 and 4, DiT, Hunyuan-DiT, HiDream, GLM-Image, ErnieImage, PRX and Bria Fibo 2.

Their latents are images. Those of Bria, Ovis-Image, Krea 2, NucleusMoE and HunyuanImage are packed to sequences.
"""

from functools import partial
from typing import Any

import torch
from diffusers.guiders import AdaptiveProjectedMixGuidance

from support.families.images.flux2 import vae as flux2_vae
from support.families.images.qwen import small_vae
from support.families.rig.family import dynamic_flow, plain_ddim, tiny_vae
from support.families.rig.tables import asking, entry, masks, more, noise, on, part, pixels, texts, valid

# Pixels. The VAE halves them and a patch, or a pack, has 2 x 2: 16 tokens.
SIDE = 16
TEXT_TOKENS = 6
STATISTICS = {"latents_mean": [0.1] * 4, "latents_std": [1.3] * 4}
SHAPE = {"patch_size": 2, "num_layers": 2, "time_embed_dim": 8, "condition_dim": 4}
ROTARY = {"axes_dims_rope": (8, 4, 4)}

# The sizes of the image are rows. The first step has no signal left, so the model cannot predict the noise.
cogview3 = on(
    "CogView3PlusTransformer2DModel", vae=tiny_vae, patch_size=2, num_layers=2, attention_head_dim=8, text_embed_dim=32,
    time_embed_dim=16, condition_dim=8, pos_embed_max_size=16, sample_size=16,
    scheduler=part("CogVideoXDDIMScheduler", clip_sample=False, rescale_betas_zero_snr=True, prediction_type="v_prediction"),
)  # fmt: skip
# Two masked prompts, a style and the sizes of the image as rows, a table of angles for all.
on_hunyuan_dit = on(
    "HunyuanDiT2DModel", vae=partial(tiny_vae, levels=4), scheduler=part("DDPMScheduler", clip_sample=False), sample_size=16,
    num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=3, cross_attention_dim=32, cross_attention_dim_t5=24,
    pooled_projection_dim=16, hidden_size=24, text_len=6, text_len_t5=8, activation_fn="gelu-approximate",
)  # fmt: skip
hunyuan_dit = partial(on_hunyuan_dit, requires_safety_checker=False)
# A mixture of experts whose prompts come from four encoders, one of them with its layers before its rows.
on_hidream = on(
    "HiDreamImageTransformer2DModel", patch_size=2, num_layers=1, attention_head_dim=8, caption_channels=[32, 16], text_emb_dim=24,
    num_routed_experts=4, num_activated_experts=2, axes_dims_rope=(4, 2, 2), max_resolution=(16, 16), llama_layers=[0, 1],
    force_inference_output=True,
)  # fmt: skip
# Sizes and crops as rows of numbers; two calls a step.
on_cogview4 = partial(
    on, "CogView4Transformer2DModel", scheduler=dynamic_flow, pos_embed_max_size=16, sample_size=16, rope_axes_dim=(8, 8), **SHAPE
)
# The number of a class is a row; there is no prompt.
dit = on(
    "DiTTransformer2DModel", vae=tiny_vae, scheduler=plain_ddim,
    sample_size=16, num_layers=2, patch_size=4, attention_head_dim=8, out_channels=8,
)  # fmt: skip
# An image's tokens, made by a language model, are given; a cache for reference images is always passed.
glm_image = on(
    "GlmImageTransformer2DModel", vae=partial(tiny_vae, **STATISTICS), scheduler=dynamic_flow, prior_vq_quantizer_codebook_size=32, **SHAPE
)
# Texts of any length, padded by the pipeline; both prompts in one call.
ernie = on(
    "ErnieImageTransformer2DModel", vae=flux2_vae, hidden_size=32, num_layers=2, ffn_hidden_size=32, in_channels=16, out_channels=16,
    text_in_dim=16, rope_axes_dim=(8, 4, 4),
)  # fmt: skip
# A time for the whole call, both prompts in one call.
prx = on("PRXTransformer2DModel", patch_size=2, context_in_dim=16, hidden_size=32, mlp_ratio=2.0, num_heads=2, depth=2, axes_dim=[8, 8])
# Text compressed into as many tokens as its length says.
fibo2 = on(
    "BriaFibo2Transformer2DModel", vae=flux2_vae, scheduler=dynamic_flow, patch_size=2, dim=32, n_layers=2,
    n_refiner_layers=1, n_heads=2, cap_feat_dim=16, injection_layer_ids=(1,), perceiver_num_layers=1, min_num_gist_tokens=2,
    max_num_gist_tokens=8, gist_step=2, gist_min_text_len=2, gist_max_text_len=8, axes_dims=(8, 4, 4), axes_lens=(64, 32, 32),
)  # fmt: skip
# Positive and negative prompt in one call: two rows.
bria = on("BriaTransformer2DModel", scheduler=dynamic_flow, in_channels=16, num_layers=1, axes_dims_rope=[0, 8, 8])
# Two calls a step; tables of positions without a batch dimension.
ovis = on("OvisImageTransformer2DModel", scheduler=dynamic_flow, in_channels=16, out_channels=16, num_layers=1, **ROTARY)
# Text of several layers of the encoder.
on_krea2 = on(
    "Krea2Transformer2DModel", vae=small_vae, scheduler=dynamic_flow, in_channels=16, num_layers=1, num_key_value_heads=1,
    intermediate_size=32, timestep_embed_dim=16, text_hidden_dim=16, num_text_layers=2, text_num_attention_heads=2,
    text_num_key_value_heads=1, text_intermediate_size=32, num_layerwise_text_blocks=1, num_refiner_text_blocks=1, **ROTARY,
)  # fmt: skip
krea2 = partial(on_krea2, text_encoder_select_layers=(0, 1))
# A mixture of experts that choose tokens, separately in each row.
on_nucleus = on(
    "NucleusMoEImageTransformer2DModel", vae=small_vae, scheduler=dynamic_flow, in_channels=16, num_layers=5, num_experts=4,
    moe_intermediate_dim=16, capacity_factors=1.0, mlp_ratio=8.0, **ROTARY,
)  # fmt: skip
hunyuan_image_vae = part(
    "AutoencoderKLHunyuanImage", in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(32, 32), layers_per_block=1,
    spatial_compression_ratio=2, sample_size=SIDE, scaling_factor=1.5,
)  # fmt: skip
# Two texts and their masks; distilled, or with a guider that keeps a momentum from step to step.
on_hunyuan_image = partial(
    on, "HunyuanImageTransformer2DModel", vae=hunyuan_image_vae, num_layers=1, text_embed_2_dim=16, rope_axes_dim=(8, 8)
)
mixed_guidance = partial(AdaptiveProjectedMixGuidance, adaptive_projected_guidance_start_step=1)
guided_hunyuan_image = partial(on_hunyuan_image(guidance_embeds=False), guider=mixed_guidance)


def hidream(kind: str) -> Any:
    """Build a HiDream pipeline with a `default_sample_size` of 16, so that every request is resized to an area of 16 x 16 latents."""
    pipeline = on_hidream(kind)
    pipeline.default_sample_size = 16
    return pipeline


def nucleus(kind: str) -> Any:
    """Build a NucleusMoE pipeline, and give its experts random weights, since diffusers leaves them uninitialised."""
    pipeline = on_nucleus(kind)
    for name, parameter in pipeline.transformer.named_parameters():
        if "experts" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return pipeline


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
EMBEDDINGS = texts(apart=200, prompt_embeds=(1, TEXT_TOKENS, 16))
TEXT_TO_IMAGE = asking(SIDE, **EMBEDDINGS)
CONTROL = more(TEXT_TO_IMAGE, control_image=pixels(SIDE))
# The tokens of the image beside the prompt.
WITH_PRIOR = more(TEXT_TO_IMAGE, prior_token_ids=_prior)
# Prompts as a list of texts, the negative one shorter.
LISTED = asking(64, prompt_embeds=[noise(TEXT_TOKENS, 16)], negative_prompt_embeds=[noise(TEXT_TOKENS - 2, 16, at=200)])
# The last tokens are padding, as many as the seed says and at least one.
PADDED = valid(TEXT_TOKENS, lambda seed: TEXT_TOKENS - 1 - seed % 3, torch.bool)
VALID = valid(TEXT_TOKENS, dtype=torch.bool)
PRX_MASKS = {"prompt_attention_mask": PADDED, "negative_prompt_attention_mask": VALID}
PRX_TEXTS = more(TEXT_TO_IMAGE, **PRX_MASKS, use_resolution_binning=False)
# Text of two layers of the encoder.
BUNDLED = asking(64, **texts(apart=200, prompt_embeds=(1, 2, TEXT_TOKENS, 16)), prompt_embeds_mask=PADDED)
EDIT = more(BUNDLED, image=[pixels(64)])
# Ovis has an empty negative prompt by default, and takes either words or embeddings.
WORDLESS = more(TEXT_TO_IMAGE, negative_prompt=None)
MASKED = more(TEXT_TO_IMAGE, prompt_embeds_mask=PADDED, negative_prompt_embeds_mask=VALID)
# Text of two layers.
LAYERED = more(MASKED, **texts(apart=200, prompt_embeds=(1, TEXT_TOKENS, 2, 16)))
# A prompt and the words to be written in the image. Guidance is the model's own, or the guider's.
WRITTEN = {"prompt_embeds_2": noise(1, TEXT_TOKENS, 16, at=100), "prompt_embeds_mask_2": VALID}
NOT_WRITTEN = {"negative_prompt_embeds_2": noise(1, TEXT_TOKENS, 16, at=300), "negative_prompt_embeds_mask_2": VALID}
GUIDED_TEXTS = more(MASKED, **WRITTEN, **NOT_WRITTEN, without=("guidance_scale",))
POSITIVE = {"prompt_embeds": EMBEDDINGS["prompt_embeds"], "prompt_embeds_mask": PADDED}
WRITTEN_TEXTS = asking(SIDE, scale="distilled_guidance_scale", **POSITIVE, **WRITTEN)

FAMILIES = [
    entry("CogView3PlusPipeline", "CogView 3", cogview3, SIZED, repeats=False),
    entry("DiTPipeline", "DiT", dit, A_CLASS, doubled={"class_labels": [1, 7]}),
    entry("HiDreamImagePipeline", "HiDream", hidream, OF_FOUR_ENCODERS),
    entry("HunyuanDiTPipeline", "Hunyuan-DiT", hunyuan_dit, TWO_TEXTS, repeats=False, tolerance=1e-6, reason=FLOAT32),
    entry("CogView4Pipeline", "CogView4", on_cogview4(), TEXT_TO_IMAGE),
    entry("CogView4ControlPipeline", "CogView4", on_cogview4(in_channels=8), CONTROL),
    entry("GlmImagePipeline", "GLM-Image", glm_image, WITH_PRIOR),
    entry("ErnieImagePipeline", "Ernie Image", ernie, LISTED),
    # PRX makes a time for one image only, so it fails with two.
    entry("PRXPipeline", "PRX", prx, PRX_TEXTS, doubled=None),
    entry("BriaFibo2Pipeline", "Bria Fibo 2", fibo2, BUNDLED),
    entry("BriaFibo2Pipeline (edit)", "Bria Fibo 2", fibo2, EDIT),
    entry("BriaPipeline", "Bria", bria, TEXT_TO_IMAGE, repeats=False),
    entry("OvisImagePipeline", "Ovis-Image", ovis, WORDLESS),
    entry("Krea2Pipeline", "Krea 2", krea2, LAYERED),
    entry("NucleusMoEImagePipeline", "NucleusMoE", nucleus, MASKED),
    entry("HunyuanImagePipeline", "HunyuanImage", on_hunyuan_image(guidance_embeds=True), WRITTEN_TEXTS),
    entry("HunyuanImagePipeline (guider)", "HunyuanImage", guided_hunyuan_image, GUIDED_TEXTS),
]
