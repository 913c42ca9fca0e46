# SPDX-License-Identifier: Apache-2.0
"""Kandinsky 2.2, whose U-Net knows the prompt as an image's embedding, and Kandinsky 3, whose U-Net masks the prompt."""

from typing import Any

from diffusers import (
    DDPMScheduler,
    Kandinsky3Pipeline,
    Kandinsky3UNet,
    KandinskyV22Img2ImgPipeline,
    KandinskyV22InpaintPipeline,
    KandinskyV22Pipeline,
    UNet2DConditionModel,
    VQModel,
)

from support.families.rig.family import Arguments, Family, build_seeded, image, mask, seeded, token_mask

TWO_IMAGES = {"num_images_per_prompt": 2}
TOKENS = 8
SIDE = 32


def _tiny_movq() -> VQModel:
    # Its norms have 32 groups, whatever it is asked for.
    return VQModel(
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        layers_per_block=1,
        num_vq_embeddings=8,
        norm_type="spatial",
        vq_embed_dim=4,
    )


def _kandinsky_22(kind: Any, channels: int = 4) -> Any:
    unet = UNet2DConditionModel(
        in_channels=channels,
        out_channels=8,  # noise and its variance
        addition_embed_type="image",
        encoder_hid_dim=16,
        encoder_hid_dim_type="image_proj",
        cross_attention_dim=16,
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        block_out_channels=(8, 16),
        layers_per_block=1,
        attention_head_dim=4,
        norm_num_groups=4,
        resnet_time_scale_shift="scale_shift",
    )
    return kind(unet=unet, scheduler=DDPMScheduler(clip_sample=False, variance_type="learned_range"), movq=_tiny_movq())


def _kandinsky_3() -> Any:
    unet = Kandinsky3UNet(
        time_embedding_dim=16,
        groups=4,
        attention_head_dim=4,
        layers_per_block=2,
        block_out_channels=(16, 16),
        cross_attention_dim=16,
        encoder_hid_dim=32,
    )
    return Kandinsky3Pipeline(tokenizer=None, text_encoder=None, unet=unet, scheduler=DDPMScheduler(clip_sample=False), movq=_tiny_movq())


def _embedded(seed: int, steps: int, guidance: float) -> Arguments:
    # Without guidance the pipeline would take half of its noise for the variance: this class is only ever used with it.
    return {
        "num_inference_steps": steps,
        "guidance_scale": max(guidance, 2.0),
        "image_embeds": seeded(seed, 1, 16),
        "negative_image_embeds": seeded(seed + 100, 1, 16),
        "height": SIDE,
        "width": SIDE,
    }


def _image_to_image(seed: int, steps: int, guidance: float) -> Arguments:
    # Half the strength is half the steps.
    return _embedded(seed, 2 * steps, guidance) | {"image": image(seed, SIDE, SIDE), "strength": 0.5}


def _inpaint(seed: int, steps: int, guidance: float) -> Arguments:
    return _embedded(seed, steps, guidance) | {"image": image(seed, SIDE, SIDE), "mask_image": mask(seed, SIDE, SIDE)}


def _prompts(seed: int, steps: int, guidance: float) -> Arguments:
    return {
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "prompt_embeds": seeded(seed, 1, TOKENS, 32),
        "negative_prompt_embeds": seeded(seed + 100, 1, TOKENS, 32),
        "attention_mask": token_mask(seed, TOKENS),
        "negative_attention_mask": token_mask(seed + 1, TOKENS),
        "height": 64,  # a latent for each 8 x 8 pixels here
        "width": 64,
    }


def _family(kind: Any, request: Any, channels: int = 4) -> Family:
    return Family(
        name=kind.__name__,
        family="Kandinsky 2.2",
        build=build_seeded(lambda: _kandinsky_22(kind, channels)),
        request=request,
        output_type="pt",
        doubled=TWO_IMAGES,
    )


FAMILIES = [
    _family(KandinskyV22Pipeline, _embedded),
    _family(KandinskyV22Img2ImgPipeline, _image_to_image),
    # Latents, the image that is kept, the mask.
    _family(KandinskyV22InpaintPipeline, _inpaint, channels=9),
    Family(
        name="Kandinsky3Pipeline",
        family="Kandinsky 3",
        build=build_seeded(_kandinsky_3),
        request=_prompts,
        doubled=TWO_IMAGES,
    ),
]
