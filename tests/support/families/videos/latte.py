# SPDX-License-Identifier: Apache-2.0
"""A tiny Latte pipeline of diffusers' real classes. Weights are random, and prompts are embeddings."""

from support.families.rig.family import plain_ddim, tiny_vae
from support.families.rig.tables import more, on
from support.families.videos.shared import family, prompted

# Pixels and frames. The VAE halves sides and keeps every frame.
SIDE = 16
FRAMES = 2


# The transformer also predicts a variance that is thrown away.
pipeline = on(
    "LatteTransformer3DModel", vae=tiny_vae, scheduler=plain_ddim, sample_size=SIDE // 2, num_layers=1, patch_size=2,
    attention_head_dim=8, num_attention_heads=2, caption_channels=16, in_channels=4, cross_attention_dim=16, out_channels=8,
    attention_bias=True, activation_fn="gelu-approximate", num_embeds_ada_norm=1000, norm_type="ada_norm_single",
    norm_elementwise_affine=False, video_length=FRAMES,
)  # fmt: skip
text_to_video = more(prompted(SIDE, video_length=FRAMES, negative_prompt=None), without=("num_frames",))

FAMILIES = [family("LattePipeline", "Latte", pipeline, text_to_video)]
