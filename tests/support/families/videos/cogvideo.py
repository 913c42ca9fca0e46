# SPDX-License-Identifier: Apache-2.0
"""Tiny CogVideoX pipelines of diffusers' real classes. Weights are random, and prompts are embeddings."""

from functools import partial
from typing import Any

import diffusers

from support.families.rig.tables import assemble, film, more, pixels
from support.families.videos.shared import SIDE, TEXT_TOKENS, family, from_video, prompted

# The VAE divides sides by 8 and keeps every fourth frame; the transformer takes patches of 2 x 2.
FRAMES = 9
TRANSFORMER = {
    "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "time_embed_dim": 4, "text_embed_dim": 16,
    "num_layers": 1, "sample_width": SIDE // 8, "sample_height": SIDE // 8, "sample_frames": FRAMES, "patch_size": 2,
    "temporal_compression_ratio": 4, "max_text_seq_length": TEXT_TOKENS, "use_rotary_positional_embeddings": True,
}  # fmt: skip


def pipeline(kind: str, scheduler: Any = diffusers.CogVideoXDDIMScheduler, **shape: Any) -> Any:
    """A pipeline on a transformer of one block with rotary positions."""
    return assemble(
        kind,
        transformer=diffusers.CogVideoXTransformer3DModel(**TRANSFORMER | shape),
        vae=diffusers.AutoencoderKLCogVideoX(
            down_block_types=("CogVideoXDownBlock3D",) * 4, up_block_types=("CogVideoXUpBlock3D",) * 4, block_out_channels=(8, 8, 8, 8),
            latent_channels=4, layers_per_block=1, norm_num_groups=2,
        ),
        scheduler=scheduler(),
    )  # fmt: skip


with_condition = partial(pipeline, in_channels=8)
text_to_video = prompted(num_frames=FRAMES, max_sequence_length=TEXT_TOKENS)
# The length of a video to follow is the result's.
follow_video = more(text_to_video, control_video=film(FRAMES), without=("num_frames",))

FAMILIES = [
    family("CogVideoXPipeline", "CogVideoX", pipeline, text_to_video),
    family("CogVideoXPipeline (DPM)", "CogVideoX", partial(pipeline, scheduler=diffusers.CogVideoXDPMScheduler), text_to_video),
    family("CogVideoXImageToVideoPipeline", "CogVideoX", with_condition, more(text_to_video, image=pixels()), images=True),
    family("CogVideoXVideoToVideoPipeline", "CogVideoX", pipeline, from_video(text_to_video, film(FRAMES))),
    family("CogVideoXFunControlPipeline", "CogVideoX", with_condition, follow_video, images=True),
]
