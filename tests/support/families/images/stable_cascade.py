# SPDX-License-Identifier: Apache-2.0
"""The second stage of Stable Cascade: a denoiser called `decoder`, whose time is a ratio. The first one makes no image: not served."""

from typing import Any

from diffusers import DDPMWuerstchenScheduler, StableCascadeUNet
from diffusers.pipelines.deprecated.wuerstchen import PaellaVQModel

from support.families.rig.tables import asking, assemble, entry, noise, texts

BLOCKS = ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock")


def _decoder(kind: str) -> Any:
    decoder = StableCascadeUNet(
        conditioning_dim=16, block_out_channels=(8, 16), num_attention_heads=(1, 2), down_num_layers_per_block=(1, 1),
        up_num_layers_per_block=(1, 1), down_blocks_repeat_mappers=(1, 1), up_blocks_repeat_mappers=(1, 1),
        block_types_per_layer=(BLOCKS, BLOCKS), clip_text_pooled_in_channels=32, clip_seq=1, dropout=(0.0, 0.0),
        timestep_ratio_embedding_dim=8, in_channels=4, out_channels=4, effnet_in_channels=4, patch_size=2,
        timestep_conditioning_type=("sca",),
    )  # fmt: skip
    vqgan = PaellaVQModel(bottleneck_blocks=1, levels=2, num_vq_embeddings=8, embed_dim=8)
    return assemble(kind, decoder=decoder, scheduler=DDPMWuerstchenScheduler(), vqgan=vqgan, latent_dim_scale=4.0)


EMBEDDINGS = texts(prompt_embeds=(1, 8, 32), prompt_embeds_pooled=(1, 1, 32))
SECOND_STAGE = asking(**EMBEDDINGS, image_embeddings=noise(1, 4, 4, 4, at=400))

FAMILIES = [
    entry(
        "StableCascadeDecoderPipeline",
        "Stable Cascade",
        _decoder,
        SECOND_STAGE,
        repeats=False,
        # Without return_dict it gives the images themselves, not a tuple of them.
        call=lambda view, arguments: view(**arguments).images,
    )
]
