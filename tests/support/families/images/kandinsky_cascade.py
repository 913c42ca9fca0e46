# SPDX-License-Identifier: Apache-2.0
"""Kandinsky 2.2, whose U-Net takes the prompt as an image's embedding, Kandinsky 3, whose U-Net masks it, and Stable Cascade.

The denoiser of Stable Cascade's second stage is called `decoder`, and its time is a ratio. The first stage makes no image, so it is not
served.
"""

from functools import partial
from typing import Any

from diffusers.pipelines.deprecated.wuerstchen import PaellaVQModel

from support.families.rig.family import Arguments
from support.families.rig.tables import asking, assemble, entry, halfway, masks, more, noise, painted, part, pixels, texts

TOKENS = 8
BLOCKS = ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock")

# The norms have a fixed 32 groups.
movq = part(
    "VQModel", block_out_channels=(32, 32), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    latent_channels=4, layers_per_block=1, num_vq_embeddings=8, norm_type="spatial", vq_embed_dim=4,
)  # fmt: skip
# The U-Net predicts noise and its variance. To inpaint, it gets latents, the image that is kept and the mask.
unet_22 = part(
    "UNet2DConditionModel", out_channels=8, addition_embed_type="image", encoder_hid_dim=16, encoder_hid_dim_type="image_proj",
    cross_attention_dim=16, down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
    up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"), mid_block_type="UNetMidBlock2DSimpleCrossAttn",
    block_out_channels=(8, 16), layers_per_block=1, attention_head_dim=4, norm_num_groups=4, resnet_time_scale_shift="scale_shift",
)  # fmt: skip
unet_3 = part(
    "Kandinsky3UNet", time_embedding_dim=16, groups=4, attention_head_dim=4, layers_per_block=2, block_out_channels=(16, 16),
    cross_attention_dim=16, encoder_hid_dim=32,
)  # fmt: skip
ddpm = part("DDPMScheduler", clip_sample=False)
kandinsky_22 = partial(assemble, unet=partial(unet_22, in_channels=4), scheduler=partial(ddpm, variance_type="learned_range"), movq=movq)
inpaint_22 = partial(kandinsky_22, unet=partial(unet_22, in_channels=4 + 4 + 1))
kandinsky_3 = partial(assemble, unet=unet_3, scheduler=ddpm, movq=movq)
decoder = part(
    "StableCascadeUNet", conditioning_dim=16, block_out_channels=(8, 16), num_attention_heads=(1, 2), down_num_layers_per_block=(1, 1),
    up_num_layers_per_block=(1, 1), down_blocks_repeat_mappers=(1, 1), up_blocks_repeat_mappers=(1, 1),
    block_types_per_layer=(BLOCKS, BLOCKS), clip_text_pooled_in_channels=32, clip_seq=1, dropout=(0.0, 0.0),
    timestep_ratio_embedding_dim=8, in_channels=4, out_channels=4, effnet_in_channels=4, patch_size=2,
    timestep_conditioning_type=("sca",),
)  # fmt: skip
vqgan = partial(PaellaVQModel, bottleneck_blocks=1, levels=2, num_vq_embeddings=8, embed_dim=8)
cascade = partial(assemble, decoder=decoder, scheduler=part("DDPMWuerstchenScheduler"), vqgan=vqgan, latent_dim_scale=4.0)

EMBEDDED = asking(32, **texts(image_embeds=(1, 16)))


def _guided(seed: int, steps: int, guidance: float) -> Arguments:
    # Without guidance the pipeline would take half of its noise for the variance, so this class always has guidance.
    return EMBEDDED(seed, steps, max(guidance, 2.0))


IMAGE_TO_IMAGE = halfway(_guided, image=pixels())
INPAINT = more(_guided, image=pixels(), mask_image=painted())
# A latent for each 8 x 8 pixels.
PROMPTS = asking(64, **texts(prompt_embeds=(1, TOKENS, 32)), **masks(attention_mask=TOKENS))
CASCADE_TEXTS = texts(prompt_embeds=(1, 8, 32), prompt_embeds_pooled=(1, 1, 32))
SECOND_STAGE = asking(**CASCADE_TEXTS, image_embeddings=noise(1, 4, 4, 4, at=400))


def _call_cascade(view: Any, arguments: Arguments) -> Any:
    # Without return_dict it gives the images themselves, not a tuple of them.
    return view(**arguments).images


FAMILIES = [
    entry("KandinskyV22Pipeline", "Kandinsky 2.2", kandinsky_22, _guided),
    entry("KandinskyV22Img2ImgPipeline", "Kandinsky 2.2", kandinsky_22, IMAGE_TO_IMAGE),
    entry("KandinskyV22InpaintPipeline", "Kandinsky 2.2", inpaint_22, INPAINT),
    entry("Kandinsky3Pipeline", "Kandinsky 3", kandinsky_3, PROMPTS, output_type="latent"),
    entry("StableCascadeDecoderPipeline", "Stable Cascade", cascade, SECOND_STAGE, repeats=False, call=_call_cascade),
]
