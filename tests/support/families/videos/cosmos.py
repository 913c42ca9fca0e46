# SPDX-License-Identifier: Apache-2.0
"""Tiny Cosmos pipelines, 1 and 2. Prompts are embeddings."""

from collections.abc import Callable
from typing import Any

import diffusers

from support.families.rig.family import Arguments, Family, build_seeded, image, seeded
from support.families.rig.two_rows import of_two_prompts
from support.families.videos import wan

# Pixels and frames. Both VAEs divide sides by 8; Cosmos' keeps every eighth frame, Wan's every fourth.
SIDE = 32
FRAMES = 9
TEXT_TOKENS = 6

TRANSFORMER = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "mlp_ratio": 2.0,
    "text_embed_dim": 16,
    "adaln_lora_dim": 4,
    "max_size": (4, 8, 8),
    "patch_size": (1, 2, 2),
    "concat_padding_mask": True,
    "extra_pos_embed_type": None,
}


class FakeSafetyChecker:
    """Finds everything safe. The real one needs a package and its weights; diffusers refuses to run without one."""

    def to(self, device: Any) -> "FakeSafetyChecker":
        return self

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, frames: Any) -> Any:
        return frames


def first(kind: str, **shape: Any) -> Any:
    """Cosmos 1."""
    return getattr(diffusers, kind)(
        transformer=diffusers.CosmosTransformer3DModel(**TRANSFORMER | shape),
        vae=diffusers.AutoencoderKLCosmos(
            latent_channels=4,
            encoder_block_out_channels=(8, 8, 8, 8),
            decode_block_out_channels=(8, 8, 8, 8),
            attention_resolutions=(8,),
            resolution=64,
            num_layers=2,
            patch_size=4,
        ),
        scheduler=diffusers.EDMEulerScheduler(sigma_min=0.002, sigma_max=80.0, sigma_data=0.5, final_sigmas_type="sigma_min"),
        text_encoder=None,
        tokenizer=None,
        safety_checker=FakeSafetyChecker(),
    )


def second(kind: str, **shape: Any) -> Any:
    """Cosmos 2, on Wan's VAE."""
    return getattr(diffusers, kind)(
        transformer=diffusers.CosmosTransformer3DModel(**TRANSFORMER | shape),
        vae=wan.tiny_wan_vae(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True),
        text_encoder=None,
        tokenizer=None,
        safety_checker=FakeSafetyChecker(),
    )


def text_to_image(seed: int, steps: int, guidance: float) -> Arguments:
    """A prompt and a size."""
    return {
        "prompt_embeds": seeded(seed, 1, TEXT_TOKENS, 16),
        "negative_prompt_embeds": seeded(seed + 100, 1, TEXT_TOKENS, 16),
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "height": SIDE,
        "width": SIDE,
    }


def text_to_world(seed: int, steps: int, guidance: float) -> Arguments:
    """A number of frames and their rate as well."""
    return text_to_image(seed, steps, guidance) | {"num_frames": FRAMES, "fps": 24}


def image_to_world(seed: int, steps: int, guidance: float) -> Arguments:
    """The first frame as well."""
    return text_to_world(seed, steps, guidance) | {"image": image(seed, SIDE, SIDE)}


def _family(name: str, family: str, make: Callable[[], Any], request: Callable[[int, int, float], Arguments]) -> Family:
    return Family(name, family, build_seeded(make), request, doubled=of_two_prompts(request, images="Video" in name))


FAMILIES = [
    _family("CosmosTextToWorldPipeline", "Cosmos", lambda: first("CosmosTextToWorldPipeline"), text_to_world),
    _family("CosmosVideoToWorldPipeline", "Cosmos", lambda: first("CosmosVideoToWorldPipeline", in_channels=5), image_to_world),
    _family("Cosmos2TextToImagePipeline", "Cosmos 2", lambda: second("Cosmos2TextToImagePipeline"), text_to_image),
    _family("Cosmos2VideoToWorldPipeline", "Cosmos 2", lambda: second("Cosmos2VideoToWorldPipeline", in_channels=5), image_to_world),
]
