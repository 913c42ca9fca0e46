# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion 1.5 led by images: instructions (three rows a request), ControlNets, adapters, upscaling; and aMUSEd's tokens."""

from typing import Any

from diffusers import (
    AmusedPipeline,
    AmusedScheduler,
    DDIMScheduler,
    DDPMScheduler,
    StableDiffusionAdapterPipeline,
    StableDiffusionControlNetImg2ImgPipeline,
    StableDiffusionControlNetInpaintPipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionInstructPix2PixPipeline,
    StableDiffusionPipeline,
    StableDiffusionUpscalePipeline,
    T2IAdapter,
    UVit2DModel,
    VQModel,
)
from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0
from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection

from support.families.images.stable_diffusion import pipeline, prompts, text_to_image, tiny_controlnet, tiny_unet
from support.families.rig.family import Arguments, Family, build_seeded, image, mask, seeded, tiny_vae

TWO_IMAGES = {"num_images_per_prompt": 2}


def _two_controlnets() -> Any:
    return pipeline(StableDiffusionControlNetPipeline, controlnet=[tiny_controlnet(), tiny_controlnet()])


def _adapted() -> Any:
    # One feature map for each resolution of the U-Net, which takes the first one in a block with attention.
    unet = tiny_unet(down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"))
    adapter = T2IAdapter(in_channels=3, channels=[16, 32], num_res_blocks=1, downscale_factor=2)
    return pipeline(StableDiffusionAdapterPipeline, unet=unet, adapter=adapter)


def _with_ip_adapter() -> Any:
    """Cross-attention that attends to two tokens of an image's embedding, too."""
    unet = tiny_unet()
    processors = dict(unet.attn_processors)
    for name in processors:
        if "attn2" in name:  # all of them are in blocks of 32 channels
            processors[name] = IPAdapterAttnProcessor2_0(hidden_size=32, cross_attention_dim=32, num_tokens=(2,), scale=0.7)
    unet.set_attn_processor(processors)
    unet.encoder_hid_proj = MultiIPAdapterImageProjection([ImageProjection(16, 32, num_image_text_embeds=2)])
    unet.register_to_config(encoder_hid_dim_type="ip_image_proj")
    return pipeline(StableDiffusionPipeline, unet=unet)


def _upscaler() -> Any:
    return StableDiffusionUpscalePipeline(
        vae=tiny_vae(levels=3),
        text_encoder=None,
        tokenizer=None,
        # Latents and the small image; the level of noise is a class.
        unet=tiny_unet(7, num_class_embeds=1000),
        low_res_scheduler=DDPMScheduler(),
        scheduler=DDIMScheduler(clip_sample=False),
    )


def _amused() -> Any:
    transformer = UVit2DModel(
        hidden_size=16,
        cond_embed_dim=16,
        micro_cond_encode_dim=2,
        micro_cond_embed_dim=10,
        encoder_hidden_size=32,
        vocab_size=32,
        codebook_size=31,
        in_channels=16,
        block_out_channels=16,
        num_res_blocks=1,
        block_num_heads=2,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        sample_size=8,
    )
    vqvae = VQModel(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=8,
        layers_per_block=1,
        norm_num_groups=4,
        num_vq_embeddings=31,
        lookup_from_codebook=True,
    )
    return AmusedPipeline(
        vqvae=vqvae, tokenizer=None, text_encoder=None, transformer=transformer, scheduler=AmusedScheduler(mask_token_id=31)
    )


def _instructed(seed: int, steps: int, guidance: float) -> Arguments:
    return prompts(seed, steps, guidance) | {"image": image(seed), "image_guidance_scale": 1.0 + guidance / 4}


def _led_by_two(seed: int, steps: int, guidance: float) -> Arguments:
    return text_to_image(seed, steps, guidance) | {"image": [image(seed), image(seed + 50)]}


def _image_to_image(seed: int, steps: int, guidance: float) -> Arguments:
    # Half the strength is half the steps.
    return text_to_image(seed, 2 * steps, guidance) | {"image": image(seed), "control_image": image(seed + 50), "strength": 0.5}


def _inpaint(seed: int, steps: int, guidance: float) -> Arguments:
    images = {"image": image(seed), "control_image": image(seed + 50), "mask_image": mask(seed)}
    return text_to_image(seed, steps, guidance) | images | {"strength": 1.0}


def _adapter_image(seed: int, steps: int, guidance: float) -> Arguments:
    return text_to_image(seed, steps, guidance) | {"image": image(seed)}


def _embedded_image(seed: int, steps: int, guidance: float) -> Arguments:
    # Where there is guidance, that of no image comes first.
    rows = 2 if guidance > 1 else 1
    return text_to_image(seed, steps, guidance) | {"ip_adapter_image_embeds": [seeded(seed + 400, rows, 1, 16)]}


def _small_image(seed: int, steps: int, guidance: float) -> Arguments:
    return prompts(seed, steps, guidance) | {"image": image(seed, 16, 16), "noise_level": 10 + seed}


def _tokens(seed: int, steps: int, guidance: float) -> Arguments:
    return {
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "prompt_embeds": seeded(seed, 1, 16),
        "encoder_hidden_states": seeded(seed + 100, 1, 8, 32),
        "negative_prompt_embeds": seeded(seed + 200, 1, 16),
        "negative_encoder_hidden_states": seeded(seed + 300, 1, 8, 32),
        "height": 16,
        "width": 16,
    }


def _family(name: str, build: Any, request: Any) -> Family:
    return Family(name, "SD 1.5", build_seeded(build), request, output_type="pt", doubled=TWO_IMAGES)


FAMILIES = [
    _family(
        "StableDiffusionInstructPix2PixPipeline", lambda: pipeline(StableDiffusionInstructPix2PixPipeline, unet=tiny_unet(8)), _instructed
    ),
    _family("StableDiffusionControlNetPipeline (two ControlNets)", _two_controlnets, _led_by_two),
    _family(
        "StableDiffusionControlNetImg2ImgPipeline",
        lambda: pipeline(StableDiffusionControlNetImg2ImgPipeline, controlnet=tiny_controlnet()),
        _image_to_image,
    ),
    _family(
        "StableDiffusionControlNetInpaintPipeline",
        lambda: pipeline(StableDiffusionControlNetInpaintPipeline, controlnet=tiny_controlnet()),
        _inpaint,
    ),
    _family("StableDiffusionAdapterPipeline", _adapted, _adapter_image),
    _family("StableDiffusionPipeline (IP-Adapter)", _with_ip_adapter, _embedded_image),
    _family("StableDiffusionUpscalePipeline", _upscaler, _small_image),
    Family(
        name="AmusedPipeline",
        family="aMUSEd",
        build=build_seeded(_amused),
        request=_tokens,
        output_type="pt",
        tolerance=1e-6,
        reason="its RMS norms compute their variance in float32 whatever they are given",
        doubled=TWO_IMAGES,
    ),
]
