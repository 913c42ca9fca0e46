# SPDX-License-Identifier: Apache-2.0
"""Tiny Wan pipelines, 2.1 and 2.2, and those built on Wan: ChronoEdit, Lucy Edit and AnyFlow, of diffusers' real classes.

Weights are random, and prompts are embeddings.
"""

from functools import partial
from typing import Any

import diffusers
import transformers

from support.families.rig.family import Arguments
from support.families.rig.tables import assemble, film, more, pixels
from support.families.videos.shared import FRAMES, family, from_video, in_float32, prompted

# The transformer takes the first tokens before the last 512 for the image's, so with one the text has to be that long.
TEXT_TOKENS_WITH_IMAGE = 512

# Latents are of 2 frames, 4 x 4, in 8 tokens.
TRANSFORMER = {
    "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 16,
    "freq_dim": 16, "ffn_dim": 16, "num_layers": 2, "rope_max_seq_len": 32,
}  # fmt: skip
# Latents and a condition of as many channels with a mask of four.
WITH_CONDITION = TRANSFORMER | {"in_channels": 4 + 4 + 4}
WITH_IMAGE_TOKENS = WITH_CONDITION | {"image_dim": 8, "added_kv_proj_dim": 24}


def tiny_wan_vae() -> Any:
    """Wan's causal video VAE with 4 latent channels."""
    return diffusers.AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
        latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.0, 1.5, 0.8, 1.2],
    )  # fmt: skip


def flow_unipc() -> Any:
    """The scheduler of the released models."""
    return diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def pipeline(kind: str, *, shape: dict[str, Any] = TRANSFORMER, second: bool = False, **parts: Any) -> Any:
    """A pipeline of the class `kind`; `second` adds an expert for the late steps."""
    if second:
        parts |= {"transformer_2": diffusers.WanTransformer3DModel(**shape), "boundary_ratio": 0.7}
    defaults = {"transformer": diffusers.WanTransformer3DModel(**shape), "vae": tiny_wan_vae(), "scheduler": flow_unipc()}
    return assemble(kind, **defaults | parts)


def tiny_image_encoder() -> dict[str, Any]:
    """An image encoder that makes 5 tokens of an image, and what prepares images for it."""
    config = transformers.CLIPVisionConfig(
        hidden_size=8, intermediate_size=16, projection_dim=8, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=16
    )
    return {
        "image_encoder": transformers.CLIPVisionModel(config),
        "image_processor": transformers.CLIPImageProcessor(crop_size=32, size=32),
    }


def image_tokens(kind: str) -> Any:
    """Wan 2.1's image to video: the image as latents and as tokens."""
    return pipeline(kind, shape=WITH_IMAGE_TOKENS, **tiny_image_encoder())


def vace(kind: str) -> Any:
    """A pipeline whose transformer has blocks for a control video beside two of its own."""
    return pipeline(kind, transformer=diffusers.WanVACETransformer3DModel(**TRANSFORMER, vace_layers=[0, 1], vace_in_channels=2 * 4 + 64))


def chrono_edit(kind: str) -> Any:
    """A pipeline that edits an image as the last frame of a video."""
    return pipeline(kind, transformer=diffusers.ChronoEditTransformer3DModel(**WITH_IMAGE_TOKENS), **tiny_image_encoder())


def any_flow(kind: str) -> Any:
    """A distilled pipeline whose transformer also gets the time it goes to."""
    transformer = diffusers.AnyFlowTransformer3DModel(**TRANSFORMER)
    return pipeline(kind, transformer=transformer, scheduler=diffusers.FlowMapEulerDiscreteScheduler())


def distilled(seed: int, steps: int, guidance: float) -> Arguments:
    """A negative prompt only with guidance: AnyFlow makes rows of it in any case."""
    return text_to_video(seed, steps, guidance) | ({} if guidance > 1 else {"negative_prompt_embeds": None})


text_to_video = prompted()
image_to_video = more(text_to_video, image=pixels())
edited_video = more(text_to_video, video=film(FRAMES))
image_tokens_to_video = more(prompted(tokens=TEXT_TOKENS_WITH_IMAGE), image=pixels())
controlled_video = more(edited_video, conditioning_scale=0.7)
lucy_edit = partial(pipeline, shape=TRANSFORMER | {"in_channels": 8})
first_frame_of_two_experts = partial(pipeline, shape=WITH_CONDITION, second=True)
a_time_for_each_token = partial(pipeline, expand_timesteps=True)
wan_family = partial(family, output_type="pt")
LUCY_SINGLE = in_float32("the pipeline hands the transformer float32 whatever its weights are")

# No `doubled`: VACE cannot prepare two videos, and AnyFlow's prompts depend on guidance.
FAMILIES = [
    wan_family("WanPipeline", "Wan 2.1", pipeline, text_to_video),
    wan_family("WanImageToVideoPipeline", "Wan 2.1", image_tokens, image_tokens_to_video),
    wan_family("WanVideoToVideoPipeline", "Wan 2.1", pipeline, from_video(text_to_video, film(FRAMES))),
    wan_family("WanVACEPipeline", "Wan 2.1", vace, controlled_video, doubled=None),
    wan_family("WanPipeline (two experts)", "Wan 2.2", partial(pipeline, second=True), text_to_video),
    wan_family("WanImageToVideoPipeline (two experts)", "Wan 2.2", first_frame_of_two_experts, image_to_video),
    wan_family("WanPipeline (a time for each token)", "Wan 2.2", a_time_for_each_token, text_to_video),
    wan_family("WanImageToVideoPipeline (a time for each token)", "Wan 2.2", a_time_for_each_token, image_to_video),
    wan_family("ChronoEditPipeline", "ChronoEdit", chrono_edit, image_tokens_to_video),
    wan_family("LucyEditPipeline", "Lucy Edit", lucy_edit, edited_video, images=True, **LUCY_SINGLE),
    wan_family("AnyFlowPipeline", "AnyFlow", any_flow, distilled, doubled=None),
]
