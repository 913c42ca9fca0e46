# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion 1.5 led by images: instructions (three rows a request), ControlNets, adapters, upscaling; and aMUSEd's tokens."""

from typing import Any

from diffusers import AmusedScheduler, DDIMScheduler, DDPMScheduler, T2IAdapter, UVit2DModel, VQModel
from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0
from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection

from support.families.images.stable_diffusion import CONTROLLED, PROMPTS, TEXT_TO_IMAGE, controlnet, pipeline, tiny_controlnet, tiny_unet
from support.families.rig.family import Arguments, seeded, tiny_vae
from support.families.rig.tables import asking, assemble, entry, halfway, more, painted, pixels, texts


def _instructions(kind: str) -> Any:
    return pipeline(kind, unet=tiny_unet(8))


def _two_controlnets(kind: str) -> Any:
    return pipeline(kind, controlnet=[tiny_controlnet(), tiny_controlnet()])


def _adapted(kind: str) -> Any:
    # One feature map for each resolution of the U-Net, which takes the first one in a block with attention.
    unet = tiny_unet(down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"))
    return pipeline(kind, unet=unet, adapter=T2IAdapter(in_channels=3, channels=[16, 32], num_res_blocks=1, downscale_factor=2))


def _with_ip_adapter(kind: str) -> Any:
    """Cross-attention that attends to two tokens of an image's embedding, too."""
    unet = tiny_unet()
    processors = dict(unet.attn_processors)
    for name in processors:
        if "attn2" in name:  # all of them are in blocks of 32 channels
            processors[name] = IPAdapterAttnProcessor2_0(hidden_size=32, cross_attention_dim=32, num_tokens=(2,), scale=0.7)
    unet.set_attn_processor(processors)
    unet.encoder_hid_proj = MultiIPAdapterImageProjection([ImageProjection(16, 32, num_image_text_embeds=2)])
    unet.register_to_config(encoder_hid_dim_type="ip_image_proj")
    return pipeline(kind, unet=unet)


def _upscaler(kind: str) -> Any:
    # Latents and the small image; the level of noise is a class.
    vae, unet = tiny_vae(levels=3), tiny_unet(7, num_class_embeds=1000)
    return assemble(kind, vae=vae, unet=unet, low_res_scheduler=DDPMScheduler(), scheduler=DDIMScheduler(clip_sample=False))


def _amused(kind: str) -> Any:
    transformer = UVit2DModel(
        hidden_size=16, cond_embed_dim=16, micro_cond_encode_dim=2, micro_cond_embed_dim=10, encoder_hidden_size=32, vocab_size=32,
        codebook_size=31, in_channels=16, block_out_channels=16, num_res_blocks=1, block_num_heads=2, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=16, sample_size=8,
    )  # fmt: skip
    vqvae = VQModel(
        block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=8, layers_per_block=1, norm_num_groups=4, num_vq_embeddings=31, lookup_from_codebook=True,
    )  # fmt: skip
    return assemble(kind, vqvae=vqvae, transformer=transformer, scheduler=AmusedScheduler(mask_token_id=31))


def _instructed(seed: int, steps: int, guidance: float) -> Arguments:
    return CONTROLLED(seed, steps, guidance) | {"image_guidance_scale": 1.0 + guidance / 4}


def _embedded_image(seed: int, steps: int, guidance: float) -> Arguments:
    # Where there is guidance, that of no image comes first.
    rows = 2 if guidance > 1 else 1
    return TEXT_TO_IMAGE(seed, steps, guidance) | {"ip_adapter_image_embeds": [seeded(seed + 400, rows, 1, 16)]}


LED_BY_TWO = more(TEXT_TO_IMAGE, image=[pixels(), pixels(at=50)])
IMAGE_TO_IMAGE = halfway(TEXT_TO_IMAGE, image=pixels(), control_image=pixels(at=50))
INPAINT = more(TEXT_TO_IMAGE, image=pixels(), control_image=pixels(at=50), mask_image=painted(), strength=1.0)
ADAPTER_IMAGE = more(TEXT_TO_IMAGE, image=pixels())
SMALL_IMAGE = more(PROMPTS, image=pixels(16), noise_level=lambda seed: 10 + seed)
TOKENS = asking(16, **texts(apart=200, step=100, prompt_embeds=(1, 16), encoder_hidden_states=(1, 8, 32)))
FLOAT32 = "its RMS norms compute their variance in float32 whatever they are given"

FAMILIES = [
    entry("StableDiffusionInstructPix2PixPipeline", "SD 1.5", _instructions, _instructed),
    entry("StableDiffusionControlNetPipeline (two ControlNets)", "SD 1.5", _two_controlnets, LED_BY_TWO),
    entry("StableDiffusionControlNetImg2ImgPipeline", "SD 1.5", controlnet, IMAGE_TO_IMAGE),
    entry("StableDiffusionControlNetInpaintPipeline", "SD 1.5", controlnet, INPAINT),
    entry("StableDiffusionAdapterPipeline", "SD 1.5", _adapted, ADAPTER_IMAGE),
    entry("StableDiffusionPipeline (IP-Adapter)", "SD 1.5", _with_ip_adapter, _embedded_image),
    entry("StableDiffusionUpscalePipeline", "SD 1.5", _upscaler, SMALL_IMAGE),
    entry("AmusedPipeline", "aMUSEd", _amused, TOKENS, tolerance=1e-6, reason=FLOAT32),
]
