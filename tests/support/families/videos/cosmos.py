# SPDX-License-Identifier: Apache-2.0
"""Tiny Cosmos pipelines, 1 and 2, of diffusers' real classes.

Not real: weights, which are random, prompts, which are embeddings, and the safety checker, which is `FakeSafetyChecker`.
"""

from functools import partial
from typing import Any

import diffusers

from support.families.rig.tables import assemble, more, pixels
from support.families.videos import wan
from support.families.videos.shared import family, prompted

# Both VAEs divide sides by 8; Cosmos' keeps every eighth frame, Wan's every fourth.
FRAMES = 9
TRANSFORMER = {
    "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "mlp_ratio": 2.0,
    "text_embed_dim": 16, "adaln_lora_dim": 4, "max_size": (4, 8, 8), "patch_size": (1, 2, 2), "concat_padding_mask": True,
    "extra_pos_embed_type": None,
}  # fmt: skip


class FakeSafetyChecker:
    """Finds everything safe. The real one needs a package and its weights; diffusers refuses to run without one."""

    def to(self, device: Any) -> "FakeSafetyChecker":
        return self

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, frames: Any) -> Any:
        return frames


def pipeline(kind: str, make_vae: Any, scheduler: Any, **shape: Any) -> Any:
    """A pipeline on a transformer of two blocks."""
    transformer = diffusers.CosmosTransformer3DModel(**TRANSFORMER | shape)
    return assemble(kind, transformer=transformer, vae=make_vae(), scheduler=scheduler, safety_checker=FakeSafetyChecker())


def first(kind: str, **shape: Any) -> Any:
    """Cosmos 1."""
    vae = partial(
        diffusers.AutoencoderKLCosmos, latent_channels=4, encoder_block_out_channels=(8, 8, 8, 8),
        decode_block_out_channels=(8, 8, 8, 8), attention_resolutions=(8,), resolution=64, num_layers=2, patch_size=4,
    )  # fmt: skip
    scheduler = diffusers.EDMEulerScheduler(sigma_min=0.002, sigma_max=80.0, sigma_data=0.5, final_sigmas_type="sigma_min")
    return pipeline(kind, vae, scheduler, **shape)


def second(kind: str, **shape: Any) -> Any:
    """Cosmos 2, on Wan's VAE."""
    return pipeline(kind, wan.tiny_wan_vae, diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True), **shape)


text_to_image = more(prompted(), without=("num_frames",))
text_to_world = prompted(num_frames=FRAMES, fps=24)
image_to_world = more(text_to_world, image=pixels())

FAMILIES = [
    family("CosmosTextToWorldPipeline", "Cosmos", first, text_to_world),
    family("CosmosVideoToWorldPipeline", "Cosmos", partial(first, in_channels=5), image_to_world, images=True),
    family("Cosmos2TextToImagePipeline", "Cosmos 2", second, text_to_image),
    family("Cosmos2VideoToWorldPipeline", "Cosmos 2", partial(second, in_channels=5), image_to_world, images=True),
]
