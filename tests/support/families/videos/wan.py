# SPDX-License-Identifier: Apache-2.0
"""Tiny Wan pipelines, 2.1 and 2.2, and those built on Wan: ChronoEdit, Lucy Edit and AnyFlow. Prompts are embeddings."""

from collections.abc import Callable
from typing import Any

import diffusers
import torch
import transformers

from support.families.rig.family import Arguments, Family, build_seeded, image, seeded
from support.families.rig.two_rows import of_two_prompts

# Pixels and frames. The VAE divides sides by 8 and keeps every fourth frame: latents of 2 frames, 4 x 4, in 8 tokens.
SIDE = 32
FRAMES = 5
# The transformer takes the first tokens before the last 512 for the image's, so with one the text has to be that long.
TEXT_TOKENS = 6
TEXT_TOKENS_WITH_IMAGE = 512

TRANSFORMER = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 16,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
# Latents and a condition of as many channels with a mask of four.
WITH_CONDITION = TRANSFORMER | {"in_channels": 4 + 4 + 4}
WITH_IMAGE_TOKENS = WITH_CONDITION | {"image_dim": 8, "added_kv_proj_dim": 24}


def tiny_wan_vae() -> Any:
    """Wan's causal video VAE with 4 latent channels."""
    return diffusers.AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.0, 1.5, 0.8, 1.2],
    )


def flow_unipc() -> Any:
    """The scheduler of the released models."""
    return diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def pipeline(kind: str, *, shape: dict[str, Any] = TRANSFORMER, second: bool = False, **parts: Any) -> Any:
    """A pipeline of the class `kind`; `second` adds an expert for the late steps."""
    if second:
        parts |= {"transformer_2": diffusers.WanTransformer3DModel(**shape), "boundary_ratio": 0.7}
    return getattr(diffusers, kind)(
        **{
            "transformer": diffusers.WanTransformer3DModel(**shape),
            "vae": tiny_wan_vae(),
            "scheduler": flow_unipc(),
            "text_encoder": None,
            "tokenizer": None,
        }
        | parts
    )


def tiny_image_encoder() -> dict[str, Any]:
    """An image encoder that makes 5 tokens of an image, and what prepares images for it."""
    config = transformers.CLIPVisionConfig(
        hidden_size=8, intermediate_size=16, projection_dim=8, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=16
    )
    return {
        "image_encoder": transformers.CLIPVisionModel(config),
        "image_processor": transformers.CLIPImageProcessor(crop_size=32, size=32),
    }


def image_tokens() -> Any:
    """Wan 2.1's image to video: the image as latents and as tokens."""
    return pipeline("WanImageToVideoPipeline", shape=WITH_IMAGE_TOKENS, **tiny_image_encoder())


def vace() -> Any:
    """A pipeline whose transformer has blocks for a control video beside two of its own."""
    transformer = diffusers.WanVACETransformer3DModel(**TRANSFORMER, vace_layers=[0, 1], vace_in_channels=2 * 4 + 64)
    return pipeline("WanVACEPipeline", transformer=transformer)


def chrono_edit() -> Any:
    """A pipeline that edits an image as the last frame of a video."""
    transformer = diffusers.ChronoEditTransformer3DModel(**WITH_IMAGE_TOKENS)
    return pipeline("ChronoEditPipeline", transformer=transformer, **tiny_image_encoder())


def any_flow() -> Any:
    """A distilled pipeline whose transformer is also told the time it goes to."""
    shape = {name: value for name, value in TRANSFORMER.items() if name != "rope_max_seq_len"}
    transformer = diffusers.AnyFlowTransformer3DModel(**shape, rope_max_seq_len=32)
    return pipeline("AnyFlowPipeline", transformer=transformer, scheduler=diffusers.FlowMapEulerDiscreteScheduler())


def text_to_video(seed: int, steps: int, guidance: float) -> Arguments:
    """A prompt, a size and a number of frames."""
    return {
        "prompt_embeds": seeded(seed, 1, TEXT_TOKENS, 16),
        "negative_prompt_embeds": seeded(seed + 100, 1, TEXT_TOKENS, 16),
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "height": SIDE,
        "width": SIDE,
        "num_frames": FRAMES,
    }


def distilled(seed: int, steps: int, guidance: float) -> Arguments:
    """A negative prompt only with guidance: AnyFlow makes rows of it in any case."""
    arguments = text_to_video(seed, steps, guidance)
    return arguments if guidance > 1 else arguments | {"negative_prompt_embeds": None}


def image_to_video(seed: int, steps: int, guidance: float) -> Arguments:
    """The first frame as well."""
    return text_to_video(seed, steps, guidance) | {"image": image(seed, SIDE, SIDE)}


def image_tokens_to_video(seed: int, steps: int, guidance: float) -> Arguments:
    """The first frame, for a transformer that also takes its tokens."""
    return image_to_video(seed, steps, guidance) | {
        "prompt_embeds": seeded(seed, 1, TEXT_TOKENS_WITH_IMAGE, 16),
        "negative_prompt_embeds": seeded(seed + 100, 1, TEXT_TOKENS_WITH_IMAGE, 16),
    }


def video_to_video(seed: int, steps: int, guidance: float) -> Arguments:
    """A video to start from. Half the schedule is run, so twice the steps are asked for."""
    arguments = text_to_video(seed, 2 * steps, guidance) | {"video": _video(seed), "strength": 0.5}
    del arguments["num_frames"]
    return arguments


def edited_video(seed: int, steps: int, guidance: float) -> Arguments:
    """A video to change."""
    return text_to_video(seed, steps, guidance) | {"video": _video(seed)}


def controlled_video(seed: int, steps: int, guidance: float) -> Arguments:
    """A video to follow."""
    return text_to_video(seed, steps, guidance) | {"video": _video(seed), "conditioning_scale": 0.7}


def _video(seed: int) -> list[Any]:
    return [image(1000 * seed + frame, SIDE, SIDE) for frame in range(FRAMES)]


def _family(
    name: str, family: str, make: Callable[[], Any], request: Callable[[int, int, float], Arguments], *, single: str = ""
) -> Family:
    """A family; `single` says why it runs in float32 only."""
    return Family(
        name,
        family,
        build_seeded(make),
        request,
        output_type="pt",
        # VACE cannot prepare two videos, and AnyFlow's prompts depend on guidance.
        doubled=None if "VACE" in name or "AnyFlow" in name else of_two_prompts(request, images="Lucy" in name),
        reason=single,
        **({"compared_in": torch.float32, "tolerance": 1e-4} if single else {}),
    )


FAMILIES = [
    _family("WanPipeline", "Wan 2.1", lambda: pipeline("WanPipeline"), text_to_video),
    _family("WanImageToVideoPipeline", "Wan 2.1", image_tokens, image_tokens_to_video),
    _family("WanVideoToVideoPipeline", "Wan 2.1", lambda: pipeline("WanVideoToVideoPipeline"), video_to_video),
    _family("WanVACEPipeline", "Wan 2.1", vace, controlled_video),
    _family("WanPipeline (two experts)", "Wan 2.2", lambda: pipeline("WanPipeline", second=True), text_to_video),
    _family(
        "WanImageToVideoPipeline (two experts)",
        "Wan 2.2",
        lambda: pipeline("WanImageToVideoPipeline", shape=WITH_CONDITION, second=True),
        image_to_video,
    ),
    _family("WanPipeline (a time for each token)", "Wan 2.2", lambda: pipeline("WanPipeline", expand_timesteps=True), text_to_video),
    _family(
        "WanImageToVideoPipeline (a time for each token)",
        "Wan 2.2",
        lambda: pipeline("WanImageToVideoPipeline", expand_timesteps=True),
        image_to_video,
    ),
    _family("ChronoEditPipeline", "ChronoEdit", chrono_edit, image_tokens_to_video),
    _family(
        "LucyEditPipeline",
        "Lucy Edit",
        lambda: pipeline("LucyEditPipeline", shape=TRANSFORMER | {"in_channels": 8}),
        edited_video,
        single="the pipeline hands the transformer float32 whatever its weights are",
    ),
    _family("AnyFlowPipeline", "AnyFlow", any_flow, distilled),
]
