# SPDX-License-Identifier: Apache-2.0
"""Tiny Qwen-Image pipelines: text to image, image to image, inpaint, ControlNet, edit, layers, and version 2.1."""

from functools import partial
from typing import Any

import diffusers
import torch
from diffusers.models.autoencoders.vae import DecoderOutput

from support.families.images.worded_images import PROMPTS, vision_language_model
from support.families.rig.family import Family, dynamic_flow, seeded
from support.families.rig.tables import Request, asking, entry, halfway, more, on, painted, part, pixels, small, texts, valid
from support.families.rig.texts import letters

# Pixels. The VAE halves them and the pipeline packs 2 x 2: 16 tokens.
SIDE = 16
# The edit pipelines scale every image to a megapixel, so their VAE shrinks by 64: 64 tokens of reference, 4 of result.
EDIT_SIDE = 256
TEXT_TOKENS = 6
STATISTICS = {"latents_mean": [0.1] * 4, "latents_std": [1.3] * 4}
SHAPE = {"num_layers": 2, "axes_dims_rope": (8, 4, 4)}


def _vae_config(halvings: int) -> dict[str, Any]:
    sizes = {"base_dim": 2, "z_dim": 4, "dim_mult": [1] * (halvings + 1), "num_res_blocks": 1}
    return sizes | STATISTICS | {"temperal_downsample": [False] * halvings}


# A Qwen VAE of real layers that halves images.
small_vae = part("AutoencoderKLQwenImage", **_vae_config(halvings=1))


class PatchVae(diffusers.AutoencoderKLQwenImage):  # type: ignore[misc]
    """A Qwen VAE that maps patches of 64 x 64 pixels in one layer, so a megapixel takes milliseconds instead of seconds.

    Real: the interface and the configuration. Not real: the layers between pixels and latents, which are one convolution.
    """

    def __init__(self) -> None:
        super().__init__(**_vae_config(halvings=6))
        self.to_latents = torch.nn.Conv3d(3, 8, (1, 64, 64), stride=(1, 64, 64))
        self.to_pixels = torch.nn.ConvTranspose3d(4, 3, (1, 64, 64), stride=(1, 64, 64))

    def _encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.to_latents(x)

    def _decode(self, z: torch.Tensor, return_dict: bool = True) -> Any:
        pixels = self.to_pixels(z).clamp(-1, 1)
        return DecoderOutput(sample=pixels) if return_dict else (pixels,)


class FakeProcessor:
    """A processor that answers version 2.1's calls at construction: the length of a system message and one token.

    Not real: both answers are constants. It gets no prompt, since prompts are embeddings.
    """

    tokenizer: Any = property(lambda self: self)

    def apply_chat_template(self, *_: Any, **__: Any) -> list[list[int]]:
        return [[1, 2, 3]]

    def encode(self, _: str) -> list[int]:
        return [4]


def pipeline(kind: str, *, mask_channels: int = 0, **config: Any) -> Any:
    """Build a tiny Qwen-Image pipeline of diffusers' class `kind`.

    Classes that edit or make layers get `PatchVae`, as they use a megapixel. Those with a ControlNet get one, with `mask_channels` more
    inputs.
    """
    builder = on(
        "QwenImageTransformer2DModel", vae=PatchVae if "Edit" in kind or "Layered" in kind else small_vae, scheduler=dynamic_flow,
        in_channels=16, **SHAPE, **config,
    )  # fmt: skip
    controlnet = small("QwenImageControlNetModel", in_channels=16, extra_condition_channels=mask_channels, **SHAPE)
    return builder(kind, **{"controlnet": controlnet} if "ControlNet" in kind else {})


def layered_pipeline(kind: str) -> Any:
    """Build a pipeline that decomposes an image into layers; it asks its text encoder for a dtype even for prompts given as embeddings."""
    pipe = pipeline(kind, use_additional_t_cond=True, use_layer3d_rope=True)
    pipe.register_modules(text_encoder=vision_language_model())
    return pipe


def worded_pipeline(kind: str) -> Any:
    """Build a Qwen-Image pipeline that takes prompts as words.

    A tiny Qwen 2.5 VL encodes their letters, and no prompt is padded to a fixed length.
    """
    pipe = pipeline(kind)
    pipe.register_modules(text_encoder=vision_language_model(), tokenizer=letters())
    return pipe


# Version 2.1, with conditions whose keys and values may be cached.
vae_21 = part("AutoencoderKLQwenImage21", base_dim=4, decoder_base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1, 1], num_res_blocks=1, **STATISTICS)
on_21 = on("QwenImage21Transformer2DModel", vae=vae_21, scheduler=dynamic_flow, num_layers=2, context_in_dim=16, axes_dims_rope=(8, 4, 4))
pipeline_21 = partial(on_21, processor=FakeProcessor)

VALID = {"prompt_embeds_mask": valid(TEXT_TOKENS), "negative_prompt_embeds_mask": valid(TEXT_TOKENS)}
TEXTS = texts(apart=200, prompt_embeds=(1, TEXT_TOKENS, 16)) | VALID
# A prompt and a negative prompt: two model calls a step.
TEXT = asking(scale="true_cfg_scale", **TEXTS)
TEXT_TO_IMAGE = asking(SIDE, scale="true_cfg_scale", **TEXTS)
# Prompts of one length, and a negative prompt for all of them.
WORDS = asking(SIDE, scale="true_cfg_scale", prompt=lambda seed: f"{PROMPTS[seed % 3]:24}", negative_prompt="blurry")
IMAGE_TO_IMAGE = halfway(TEXT_TO_IMAGE, image=pixels(SIDE))
# Inpainting over the whole schedule.
INPAINT = more(TEXT_TO_IMAGE, image=pixels(SIDE), mask_image=painted(SIDE), strength=1.0)
CONTROL = more(TEXT_TO_IMAGE, control_image=pixels(SIDE))
CONTROL_INPAINT = more(CONTROL, control_mask=painted(SIDE))
EDIT = more(TEXT, image=pixels(), height=EDIT_SIDE, width=EDIT_SIDE)
# Two images of other proportions.
EDIT_TWO = more(EDIT, image=[pixels(), pixels(32, 16, at=1)])
EDIT_INPAINT = more(EDIT, mask_image=painted(), strength=1.0)
# An image to decompose into two layers; without words the pipeline would describe it first.
LAYERS = more(TEXT, prompt="a fox", image=pixels(), layers=2)
# 16 pixels a token.
TEXT_TO_IMAGE_21 = more(TEXT, height=64, width=64)
# Conditions are computed in every step.
WITHOUT_CACHE = more(TEXT_TO_IMAGE_21, use_kv_cache=False)
CACHED = "keys and values of the prompt are cached per request"

# Two layered images of one prompt share one entry that distinguishes colours from transparency.
TWO_PROMPTS = {"prompt": ["a fox", "a hare"]} | {
    f"{sign}prompt_embeds{suffix}": value
    for sign in ("", "negative_")
    for suffix, value in {"": seeded(7, 2, TEXT_TOKENS, 16), "_mask": torch.ones(2, TEXT_TOKENS, dtype=torch.int64)}.items()
}


def _family(name: str, request: Request, **config: Any) -> Family:
    family = "Qwen-Image-Edit" if "Edit" in name else "Qwen-Image"
    return entry(name, family, partial(pipeline, **config), request)


FAMILIES = [
    _family("QwenImagePipeline", TEXT_TO_IMAGE),
    entry("QwenImagePipeline (words)", "Qwen-Image", worded_pipeline, WORDS),
    _family("QwenImageImg2ImgPipeline", IMAGE_TO_IMAGE),
    _family("QwenImageInpaintPipeline", INPAINT),
    _family("QwenImageControlNetPipeline", CONTROL),
    _family("QwenImageControlNetInpaintPipeline", CONTROL_INPAINT, mask_channels=4),
    _family("QwenImageEditPipeline", EDIT),
    _family("QwenImageEditPlusPipeline", EDIT_TWO, zero_cond_t=True),
    _family("QwenImageEditInpaintPipeline", EDIT_INPAINT),
    entry("QwenImageLayeredPipeline", "Qwen-Image", layered_pipeline, LAYERS, doubled=TWO_PROMPTS),
    entry("QwenImage21Pipeline", "Qwen-Image", pipeline_21, TEXT_TO_IMAGE_21, reason=CACHED),
    entry("QwenImage21Pipeline (without cache)", "Qwen-Image", pipeline_21, WITHOUT_CACHE),
]
