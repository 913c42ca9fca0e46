# SPDX-License-Identifier: Apache-2.0
"""The second stage of Stable Cascade: a denoiser called `decoder`, whose time is a ratio. The first one makes no image: not served."""

from typing import Any

from diffusers import DDPMWuerstchenScheduler, StableCascadeDecoderPipeline, StableCascadeUNet
from diffusers.pipelines.deprecated.wuerstchen import PaellaVQModel

from support.families.rig.family import Arguments, Family, build_seeded, seeded
from support.families.rig.two_rows import of_two_prompts

BLOCKS = ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock")
SIZES = {
    "conditioning_dim": 16,
    "block_out_channels": (8, 16),
    "num_attention_heads": (1, 2),
    "down_num_layers_per_block": (1, 1),
    "up_num_layers_per_block": (1, 1),
    "down_blocks_repeat_mappers": (1, 1),
    "up_blocks_repeat_mappers": (1, 1),
    "block_types_per_layer": (BLOCKS, BLOCKS),
    "clip_text_pooled_in_channels": 32,
    "clip_seq": 1,
    "dropout": (0.0, 0.0),
    "timestep_ratio_embedding_dim": 8,
}


def _decoder() -> Any:
    decoder = StableCascadeUNet(
        **SIZES, in_channels=4, out_channels=4, effnet_in_channels=4, patch_size=2, timestep_conditioning_type=("sca",)
    )
    vqgan = PaellaVQModel(bottleneck_blocks=1, levels=2, num_vq_embeddings=8, embed_dim=8)
    return StableCascadeDecoderPipeline(
        decoder=decoder, scheduler=DDPMWuerstchenScheduler(), vqgan=vqgan, text_encoder=None, tokenizer=None, latent_dim_scale=4.0
    )


def _prompts(seed: int, steps: int, guidance: float) -> Arguments:
    positive = {"prompt_embeds": seeded(seed, 1, 8, 32), "prompt_embeds_pooled": seeded(seed + 200, 1, 1, 32)}
    negative = {"negative_prompt_embeds": seeded(seed + 100, 1, 8, 32), "negative_prompt_embeds_pooled": seeded(seed + 300, 1, 1, 32)}
    return {"num_inference_steps": steps, "guidance_scale": guidance} | positive | negative


def _second_stage(seed: int, steps: int, guidance: float) -> Arguments:
    return _prompts(seed, steps, guidance) | {"image_embeddings": seeded(seed + 400, 1, 4, 4, 4)}


FAMILIES = [
    Family(
        name="StableCascadeDecoderPipeline",
        family="Stable Cascade",
        build=build_seeded(_decoder),
        request=_second_stage,
        output_type="pt",
        doubled=of_two_prompts(_second_stage),
        # Without return_dict it gives the images themselves, not a tuple of them.
        call=lambda view, arguments: view(**arguments).images,
    ),
]
