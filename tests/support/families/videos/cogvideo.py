# SPDX-License-Identifier: Apache-2.0
"""Tiny CogVideoX pipelines. Prompts are embeddings."""

from collections.abc import Callable
from typing import Any

import diffusers

from support.families.rig.family import Arguments, Family, build_seeded, image, seeded
from support.families.rig.two_rows import of_two_prompts

# Pixels and frames. The VAE divides sides by 8 and keeps every fourth frame; the transformer takes patches of 2 x 2.
SIDE = 32
FRAMES = 9
TEXT_TOKENS = 6

TRANSFORMER = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 4,
    "text_embed_dim": 16,
    "num_layers": 1,
    "sample_width": SIDE // 8,
    "sample_height": SIDE // 8,
    "sample_frames": FRAMES,
    "patch_size": 2,
    "temporal_compression_ratio": 4,
    "max_text_seq_length": TEXT_TOKENS,
    "use_rotary_positional_embeddings": True,
}


def pipeline(kind: str, scheduler: Any = diffusers.CogVideoXDDIMScheduler, **shape: Any) -> Any:
    """A pipeline of the class `kind` on a transformer of one block with rotary positions."""
    return getattr(diffusers, kind)(
        transformer=diffusers.CogVideoXTransformer3DModel(**TRANSFORMER | shape),
        vae=diffusers.AutoencoderKLCogVideoX(
            down_block_types=("CogVideoXDownBlock3D",) * 4,
            up_block_types=("CogVideoXUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=2,
        ),
        scheduler=scheduler(),
        text_encoder=None,
        tokenizer=None,
    )


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
        "max_sequence_length": TEXT_TOKENS,
    }


def image_to_video(seed: int, steps: int, guidance: float) -> Arguments:
    """The first frame as well."""
    return text_to_video(seed, steps, guidance) | {"image": image(seed, SIDE, SIDE)}


def video_to_video(seed: int, steps: int, guidance: float) -> Arguments:
    """A video to start from. Half the schedule is run, so twice the steps are asked for."""
    video = [image(1000 * seed + frame, SIDE, SIDE) for frame in range(FRAMES)]
    arguments = text_to_video(seed, 2 * steps, guidance) | {"video": video, "strength": 0.5}
    del arguments["num_frames"]
    return arguments


def follow_video(seed: int, steps: int, guidance: float) -> Arguments:
    """A video to follow; its length is the result's."""
    video = [image(1000 * seed + frame, SIDE, SIDE) for frame in range(FRAMES)]
    arguments = text_to_video(seed, steps, guidance) | {"control_video": video}
    del arguments["num_frames"]
    return arguments


def _family(kind: str, request: Callable[[int, int, float], Arguments], variant: str = "", **parts: Any) -> Family:
    return Family(
        f"{kind} ({variant})" if variant else kind,
        "CogVideoX",
        build_seeded(lambda: pipeline(kind, **parts)),
        request,
        doubled=of_two_prompts(request, images="Image" in kind or "Control" in kind),
    )


FAMILIES = [
    _family("CogVideoXPipeline", text_to_video),
    _family("CogVideoXPipeline", text_to_video, "DPM", scheduler=diffusers.CogVideoXDPMScheduler),
    _family("CogVideoXImageToVideoPipeline", image_to_video, in_channels=8),
    _family("CogVideoXVideoToVideoPipeline", video_to_video),
    _family("CogVideoXFunControlPipeline", follow_video, in_channels=8),
]
