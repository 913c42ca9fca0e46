# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion 3: a transformer over image and text tokens together, guidance as twice the rows."""

from functools import partial
from typing import Any

from support.families.rig.family import flow, shifted_vae
from support.families.rig.tables import asking, assemble, entry, halfway, more, painted, part, pixels, texts

WIDE = 16  # channels: inpainting tells its two kinds of model apart by 16 and 33
SIZES = {
    "sample_size": 16, "patch_size": 2, "in_channels": 4, "out_channels": 4, "attention_head_dim": 8, "num_attention_heads": 2,
    "joint_attention_dim": 32, "caption_projection_dim": 16, "pooled_projection_dim": 32, "pos_embed_max_size": 16,
}  # fmt: skip


def _pipeline(kind: Any, channels: int = 4, **parts: Any) -> Any:
    transformer = part("SD3Transformer2DModel", **SIZES | {"in_channels": channels, "out_channels": channels}, num_layers=2)
    return assemble(kind, transformer=transformer, scheduler=flow, vae=partial(shifted_vae, channels), **parts)


_tiny_controlnet = part("SD3ControlNetModel", **SIZES, num_layers=1)
_controlnet = partial(_pipeline, controlnet=_tiny_controlnet)
_two_controlnets = partial(_pipeline, controlnet=lambda: [_tiny_controlnet(), _tiny_controlnet()])

PROMPTS = asking(32, **texts(prompt_embeds=(1, 8, 32), pooled_prompt_embeds=(1, 32)))
IMAGE_TO_IMAGE = halfway(PROMPTS, image=pixels())
INPAINT = more(PROMPTS, image=pixels(), mask_image=painted(), strength=1.0)
CONTROLLED = more(PROMPTS, control_image=pixels())
LED_BY_TWO = more(PROMPTS, control_image=[pixels(), pixels(at=50)], controlnet_conditioning_scale=[0.5, 1.0])

FAMILIES = [
    entry("StableDiffusion3Pipeline", "SD 3", _pipeline, PROMPTS, repeats=False),
    entry("StableDiffusion3Img2ImgPipeline", "SD 3", _pipeline, IMAGE_TO_IMAGE, repeats=False),
    entry("StableDiffusion3InpaintPipeline", "SD 3", partial(_pipeline, channels=WIDE), INPAINT, repeats=False),
    entry("StableDiffusion3ControlNetPipeline", "SD 3", _controlnet, CONTROLLED, repeats=False),
    entry("StableDiffusion3ControlNetPipeline (two ControlNets)", "SD 3", _two_controlnets, LED_BY_TWO, repeats=False),
]
