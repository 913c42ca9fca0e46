# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion 1.5, plain and guided by images (instructions, ControlNets, adapters, upscaling), SDXL and Kolors; aMUSEd's tokens.

These are U-Nets whose time step arrives without a batch dimension, with guidance as twice the rows. With instructions a request has three
times the rows.
"""

from functools import partial
from typing import Any

from diffusers import ControlNetModel, UNet2DConditionModel
from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0
from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection

from support.families.rig.family import Arguments, plain_ddim, seeded, tiny_vae
from support.families.rig.tables import asking, assemble, entry, halfway, more, painted, part, pixels, texts

BLOCKS = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D")}
UP_BLOCKS = {"up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}
SHAPE = {"block_out_channels": (16, 32), "layers_per_block": 1, "cross_attention_dim": 32, "norm_num_groups": 8}
SHAPE_15 = SHAPE | BLOCKS | {"attention_head_dim": 4}
# The pooled prompt and image sizes are beside the prompt's tokens: six numbers of eight channels each.
SHAPE_XL = SHAPE | BLOCKS | {
    "attention_head_dim": (2, 4), "use_linear_projection": True, "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
    "transformer_layers_per_block": (1, 1), "projection_class_embeddings_input_dim": 32 + 48,
}  # fmt: skip


def tiny_unet(channels: int = 4, **config: Any) -> UNet2DConditionModel:
    """Build a U-Net like that of Stable Diffusion 1.5, with 16 and 32 channels.

    Only the lower resolution attends to the prompt; `channels` are the input's.
    """
    return UNet2DConditionModel(**SHAPE_15 | UP_BLOCKS | {"sample_size": 16, "out_channels": 4} | config, in_channels=channels)


def unet_with_ip_adapter() -> UNet2DConditionModel:
    """Build a tiny U-Net with an IP-Adapter.

    A projection makes two tokens of an embedding of width 16, which all cross-attention adds at a scale of 0.7.
    """
    unet = tiny_unet()
    processors = dict(unet.attn_processors)
    for name in processors:
        if "attn2" in name:  # all of them are in blocks of 32 channels
            processors[name] = IPAdapterAttnProcessor2_0(hidden_size=32, cross_attention_dim=32, num_tokens=(2,), scale=0.7)
    unet.set_attn_processor(processors)
    unet.encoder_hid_proj = MultiIPAdapterImageProjection([ImageProjection(16, 32, num_image_text_embeds=2)])
    unet.register_to_config(encoder_hid_dim_type="ip_image_proj")
    return unet


tiny_controlnet = partial(ControlNetModel, in_channels=4, conditioning_embedding_out_channels=(2, 2), **SHAPE_15)
# For a class that takes the components of Stable Diffusion 1.5 and more.
pipeline = partial(assemble, unet=tiny_unet, scheduler=plain_ddim, vae=tiny_vae, requires_safety_checker=False)
nine_channels = partial(pipeline, unet=partial(tiny_unet, 9))
instructions = partial(pipeline, unet=partial(tiny_unet, 8))
# Guidance is an embedding of its own.
lcm = partial(pipeline, unet=partial(tiny_unet, time_cond_proj_dim=32), scheduler=part("LCMScheduler", clip_sample=False))
controlnet = partial(pipeline, controlnet=tiny_controlnet)
two_controlnets = partial(pipeline, controlnet=lambda: [tiny_controlnet(), tiny_controlnet()])
ip_adapter = partial(pipeline, unet=unet_with_ip_adapter)
# Each resolution of the U-Net has a feature map; a block with attention takes the first one.
adapted = partial(
    pipeline,
    unet=partial(tiny_unet, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D")),
    adapter=part("T2IAdapter", in_channels=3, channels=[16, 32], num_res_blocks=1, downscale_factor=2),
)
# Latents and the small image; the level of noise is a class.
upscaler = partial(
    assemble,
    vae=partial(tiny_vae, levels=3),
    unet=partial(tiny_unet, 7, num_class_embeds=1000),
    low_res_scheduler=part("DDPMScheduler"),
    scheduler=plain_ddim,
)
xl_unet = partial(tiny_unet, **SHAPE_XL)
xl = partial(assemble, vae=tiny_vae, unet=xl_unet, scheduler=part("EulerDiscreteScheduler"))
xl_pipeline = partial(xl, add_watermarker=False)
xl_controlnet = partial(
    xl_pipeline, controlnet=part("ControlNetModel", in_channels=4, conditioning_embedding_out_channels=(2, 2), **SHAPE_XL)
)
kolors = partial(xl, unet=partial(xl_unet, encoder_hid_dim=24, encoder_hid_dim_type="text_proj"))
amused = partial(
    assemble,
    vqvae=part(
        "VQModel", block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=8, layers_per_block=1, norm_num_groups=4, num_vq_embeddings=31, lookup_from_codebook=True,
    ),
    transformer=part(
        "UVit2DModel", hidden_size=16, cond_embed_dim=16, micro_cond_encode_dim=2, micro_cond_embed_dim=10, encoder_hidden_size=32,
        vocab_size=32, codebook_size=31, in_channels=16, block_out_channels=16, num_res_blocks=1, block_num_heads=2, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=16, sample_size=8,
    ),
    scheduler=part("AmusedScheduler", mask_token_id=31),
)  # fmt: skip

EMBEDDINGS = texts(prompt_embeds=(1, 8, 32))
# Without a size, which the image determines.
PROMPTS = asking(**EMBEDDINGS)
# An image of 16 x 16 latents.
TEXT_TO_IMAGE = asking(32, **EMBEDDINGS)
IMAGE_TO_IMAGE = halfway(PROMPTS, image=pixels())
INPAINT = more(TEXT_TO_IMAGE, image=pixels(), mask_image=painted())
FEW_STEPS = more(TEXT_TO_IMAGE, without=("negative_prompt_embeds",))
CONTROLLED = more(PROMPTS, image=pixels())
LED_BY_TWO = more(TEXT_TO_IMAGE, image=[pixels(), pixels(at=50)])
CONTROLLED_IMAGE = halfway(TEXT_TO_IMAGE, image=pixels(), control_image=pixels(at=50))
CONTROLLED_INPAINT = more(INPAINT, control_image=pixels(at=50), strength=1.0)
ADAPTER_IMAGE = more(TEXT_TO_IMAGE, image=pixels())
SMALL_IMAGE = more(PROMPTS, image=pixels(16), noise_level=lambda seed: 10 + seed)
TOKENS = asking(16, **texts(apart=200, step=100, prompt_embeds=(1, 16), encoder_hidden_states=(1, 8, 32)))
# Other sizes for each request: they are rows.
SIZES = {"original_size": lambda seed: (32 + seed, 32), "target_size": (32, 32)}
XL_PROMPTS = asking(**texts(prompt_embeds=(1, 8, 32), pooled_prompt_embeds=(1, 32)), **SIZES)
XL_TEXT_TO_IMAGE = more(XL_PROMPTS, height=32, width=32)
XL_INPAINT = more(XL_TEXT_TO_IMAGE, image=pixels(), mask_image=painted(), strength=1.0)
KOLORS_PROMPTS = more(XL_TEXT_TO_IMAGE, **texts(prompt_embeds=(1, 8, 24)))
FLOAT32 = "its RMS norms compute their variance in float32 whatever they are given"


def _instructed(seed: int, steps: int, guidance: float) -> Arguments:
    return CONTROLLED(seed, steps, guidance) | {"image_guidance_scale": 1.0 + guidance / 4}


def _embedded_image(seed: int, steps: int, guidance: float) -> Arguments:
    # With guidance, the rows without an image come first.
    rows = 2 if guidance > 1 else 1
    return TEXT_TO_IMAGE(seed, steps, guidance) | {"ip_adapter_image_embeds": [seeded(seed + 400, rows, 1, 16)]}


FAMILIES = [
    entry("StableDiffusionPipeline", "SD 1.5", pipeline, TEXT_TO_IMAGE),
    entry("StableDiffusionImg2ImgPipeline", "SD 1.5", pipeline, IMAGE_TO_IMAGE),
    entry("StableDiffusionInpaintPipeline", "SD 1.5", pipeline, INPAINT),
    entry("StableDiffusionInpaintPipeline (nine channels)", "SD 1.5", nine_channels, INPAINT, output_type="latent"),
    entry("StableDiffusionControlNetPipeline", "SD 1.5", controlnet, CONTROLLED),
    entry("LatentConsistencyModelPipeline", "Latent consistency", lcm, FEW_STEPS),
    entry("StableDiffusionInstructPix2PixPipeline", "SD 1.5", instructions, _instructed),
    entry("StableDiffusionControlNetPipeline (two ControlNets)", "SD 1.5", two_controlnets, LED_BY_TWO),
    entry("StableDiffusionControlNetImg2ImgPipeline", "SD 1.5", controlnet, CONTROLLED_IMAGE),
    entry("StableDiffusionControlNetInpaintPipeline", "SD 1.5", controlnet, CONTROLLED_INPAINT),
    entry("StableDiffusionAdapterPipeline", "SD 1.5", adapted, ADAPTER_IMAGE),
    entry("StableDiffusionPipeline (IP-Adapter)", "SD 1.5", ip_adapter, _embedded_image),
    entry("StableDiffusionUpscalePipeline", "SD 1.5", upscaler, SMALL_IMAGE),
    entry("StableDiffusionXLPipeline", "SDXL", xl_pipeline, XL_TEXT_TO_IMAGE),
    entry("StableDiffusionXLImg2ImgPipeline", "SDXL", xl_pipeline, halfway(XL_PROMPTS, image=pixels())),
    entry("StableDiffusionXLInpaintPipeline", "SDXL", xl_pipeline, XL_INPAINT),
    entry("StableDiffusionXLControlNetPipeline", "SDXL", xl_controlnet, more(XL_PROMPTS, image=pixels())),
    entry("KolorsPipeline", "Kolors", kolors, KOLORS_PROMPTS, repeats=False),
    entry("AmusedPipeline", "aMUSEd", amused, TOKENS, tolerance=1e-6, reason=FLOAT32),
]
