# SPDX-License-Identifier: Apache-2.0
"""Tiny Wan pipelines, 2.1 and 2.2, and those built on Wan: ChronoEdit, Lucy Edit, AnyFlow and SkyReels V2.

Sana Video, Motif and Cosmos 2 use Wan's VAE with transformers of their own. Cosmos 1, beside them, has another VAE. Not real: as
`videos/shared.py` says, and the safety checker of Cosmos, which is `FakeSafetyChecker`.
"""

from functools import partial
from typing import Any

import transformers

from support.families.rig.family import Arguments, dynamic_flow, flow
from support.families.rig.tables import film, halfway, masks, more, on, part, pixels, small
from support.families.videos.shared import FRAMES, TEXT_TOKENS, call_with_guider, family, in_float32, prompted, short_prompts

# The transformer takes the tokens before the last 512 for the image's, so with an image the text has to be that long.
TEXT_TOKENS_WITH_IMAGE = 512
# Both VAEs divide sides by 8; Wan's keeps every fourth frame, and that of Cosmos 1 every eighth.
COSMOS_FRAMES = 9

WAN, SKYREELS = "WanTransformer3DModel", "SkyReelsV2Transformer3DModel"
# Latents are of 2 frames, 4 x 4, in 8 tokens.
TRANSFORMER = {
    "patch_size": (1, 2, 2), "attention_head_dim": 12, "num_layers": 2, "rope_max_seq_len": 32, "text_dim": 16, "freq_dim": 16,
    "ffn_dim": 16,
}  # fmt: skip
# Latents and a condition of as many channels with a mask of four.
WITH_CONDITION = {"in_channels": 4 + 4 + 4}

tiny_wan_vae = part(
    "AutoencoderKLWan", base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
    latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.0, 1.5, 0.8, 1.2],
)  # fmt: skip
# The scheduler of the released models.
flow_unipc = part("UniPCMultistepScheduler", prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
on_wan = partial(on, vae=tiny_wan_vae, scheduler=flow_unipc, **TRANSFORMER)


def two_experts(**shape: Any) -> partial[Any]:
    """Return a builder of Wan 2.2's design: a transformer for the noisy steps, and `transformer_2` for times below 0.7 of the whole."""
    return partial(on_wan(WAN, **shape), transformer_2=small(WAN, **TRANSFORMER | shape), boundary_ratio=0.7)


def with_image_tokens(model: str) -> partial[Any]:
    """Return a builder of pipelines that get an image as latents and as 5 tokens. The model finds these by counting 512 text tokens from
    the end."""

    def encoder() -> Any:
        sizes = {"hidden_size": 8, "intermediate_size": 16, "projection_dim": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
        return transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**sizes, image_size=32, patch_size=16))

    builder = on_wan(model, **WITH_CONDITION, image_dim=8, added_kv_proj_dim=24)
    return partial(builder, image_encoder=encoder, image_processor=lambda: transformers.CLIPImageProcessor(crop_size=32, size=32))


class FakeSafetyChecker:
    """Stand-in for the guard that Cosmos pipelines demand, whose package and weights are not here.

    All prompts pass, and videos are returned unchanged.
    """

    def to(self, device: Any) -> "FakeSafetyChecker":
        return self

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, frames: Any) -> Any:
        return frames


def cosmos(vae: Any, scheduler: Any, **shape: Any) -> partial[Any]:
    """Return a builder of Cosmos pipelines, to call with a class.

    Makers of VAE and scheduler decide between the versions; `shape` completes the transformer's configuration.
    """
    builder = on(
        "CosmosTransformer3DModel", vae=vae, scheduler=scheduler, num_layers=2, mlp_ratio=2.0, adaln_lora_dim=4, max_size=(4, 8, 8),
        patch_size=(1, 2, 2), concat_padding_mask=True, extra_pos_embed_type=None, **shape,
    )  # fmt: skip
    return partial(builder, safety_checker=FakeSafetyChecker)


cosmos_vae = part(
    "AutoencoderKLCosmos", latent_channels=4, encoder_block_out_channels=(8, 8, 8, 8), decode_block_out_channels=(8, 8, 8, 8),
    attention_resolutions=(8,), resolution=64, num_layers=2, patch_size=4,
)  # fmt: skip
edm = part("EDMEulerScheduler", sigma_min=0.002, sigma_max=80.0, sigma_data=0.5, final_sigmas_type="sigma_min")
cosmos_1 = partial(cosmos, cosmos_vae, edm)
cosmos_2 = partial(cosmos, tiny_wan_vae, partial(flow, use_karras_sigmas=True))

pipeline = on_wan(WAN)
lucy_edit = on_wan(WAN, in_channels=8)
a_time_for_each_token = partial(pipeline, expand_timesteps=True)
# Blocks for a control video beside two of its own.
vace = on_wan("WanVACETransformer3DModel", vace_layers=[0, 1], vace_in_channels=2 * 4 + 64)
# Distilled: the transformer also gets the time it goes to.
any_flow = on_wan("AnyFlowTransformer3DModel", scheduler=part("FlowMapEulerDiscreteScheduler"))
# Diffusion forcing: every latent frame has a time of its own, and the transformer gets the frame rate.
frame_by_frame = on_wan(SKYREELS, inject_sample_info=True)
sana = on(
    "SanaVideoTransformer3DModel", vae=tiny_wan_vae, attention_head_dim=12, num_layers=1, num_cross_attention_heads=2,
    cross_attention_head_dim=12, cross_attention_dim=24, sample_size=4, patch_size=(1, 2, 2), rope_max_seq_len=32,
)  # fmt: skip
flow_dpm = part("DPMSolverMultistepScheduler", prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=7.0)
on_motif = on(
    "MotifVideoTransformer3DModel", vae=tiny_wan_vae, scheduler=dynamic_flow, in_channels=4 + 4 + 1, attention_head_dim=12, num_layers=1,
    num_single_layers=2, num_decoder_layers=1, rope_axes_dim=(4, 4, 4),
)  # fmt: skip
motif = partial(on_motif, guider=part("ClassifierFreeGuidance"))

text_to_video = prompted()
video_to_video = halfway(text_to_video, video=film(FRAMES), without=("num_frames",))
image_to_video = more(text_to_video, image=pixels())
edited_video = more(text_to_video, video=film(FRAMES))
image_tokens_to_video = more(prompted(tokens=TEXT_TOKENS_WITH_IMAGE), image=pixels())
controlled_video = more(edited_video, conditioning_scale=0.7)
forced = prompted(prompt=None, fps=24)
sana_video = more(prompted(**short_prompts(), frames=FRAMES, negative_prompt=None, use_resolution_binning=False), without=("num_frames",))
masked = prompted(**masks(prompt_attention_mask=TEXT_TOKENS))
text_to_world = prompted(num_frames=COSMOS_FRAMES, fps=24)
image_to_world = more(text_to_world, image=pixels())


def distilled(seed: int, steps: int, guidance: float) -> Arguments:
    """Return the arguments of an AnyFlow request.

    Without guidance its negative embeddings are None, since the pipeline would make useless rows of them.
    """
    return text_to_video(seed, steps, guidance) | ({} if guidance > 1 else {"negative_prompt_embeds": None})


wan_family = partial(family, output_type="pt")
LUCY_SINGLE = in_float32("the pipeline hands the transformer float32 whatever its weights are")
SANA = {"tolerance": 1e-6, "reason": "its linear attention computes in float32 whatever it is given"}
MOTIF = {"call": call_with_guider} | in_float32("the transformer computes its times in float32 and cannot take them in float64")

# No `doubled`: VACE cannot prepare two videos, AnyFlow's prompts depend on guidance, and frame rates allow one video at a time.
FAMILIES = [
    wan_family("WanPipeline", "Wan 2.1", pipeline, text_to_video),
    wan_family("WanImageToVideoPipeline", "Wan 2.1", with_image_tokens(WAN), image_tokens_to_video),
    wan_family("WanVideoToVideoPipeline", "Wan 2.1", pipeline, video_to_video),
    wan_family("WanVACEPipeline", "Wan 2.1", vace, controlled_video, doubled=None),
    wan_family("WanPipeline (two experts)", "Wan 2.2", two_experts(), text_to_video),
    wan_family("WanImageToVideoPipeline (two experts)", "Wan 2.2", two_experts(**WITH_CONDITION), image_to_video),
    wan_family("WanPipeline (a time for each token)", "Wan 2.2", a_time_for_each_token, text_to_video),
    wan_family("WanImageToVideoPipeline (a time for each token)", "Wan 2.2", a_time_for_each_token, image_to_video),
    wan_family("ChronoEditPipeline", "ChronoEdit", with_image_tokens("ChronoEditTransformer3DModel"), image_tokens_to_video),
    wan_family("LucyEditPipeline", "Lucy Edit", lucy_edit, edited_video, images=True, **LUCY_SINGLE),
    wan_family("AnyFlowPipeline", "AnyFlow", any_flow, distilled, doubled=None),
    wan_family("SkyReelsV2Pipeline", "SkyReels V2", on_wan(SKYREELS), text_to_video),
    wan_family("SkyReelsV2ImageToVideoPipeline", "SkyReels V2", with_image_tokens(SKYREELS), image_tokens_to_video),
    wan_family("SkyReelsV2DiffusionForcingPipeline", "SkyReels V2", frame_by_frame, forced, doubled=None),
    wan_family("SkyReelsV2DiffusionForcingImageToVideoPipeline", "SkyReels V2", frame_by_frame, more(forced, image=pixels()), doubled=None),
    wan_family("SanaVideoPipeline", "Sana Video", partial(sana, scheduler=flow_dpm), sana_video, **SANA),
    wan_family("SanaImageToVideoPipeline", "Sana Video", sana, more(sana_video, image=pixels()), **SANA),
    wan_family("MotifVideoPipeline", "Motif video", motif, masked, **MOTIF),
    family("CosmosTextToWorldPipeline", "Cosmos", cosmos_1(), text_to_world),
    family("CosmosVideoToWorldPipeline", "Cosmos", cosmos_1(in_channels=5), image_to_world, images=True),
    family("Cosmos2TextToImagePipeline", "Cosmos 2", cosmos_2(), more(text_to_video, without=("num_frames",))),
    family("Cosmos2VideoToWorldPipeline", "Cosmos 2", cosmos_2(in_channels=5), image_to_world, images=True),
]
