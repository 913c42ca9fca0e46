# SPDX-License-Identifier: Apache-2.0
"""Tiny HunyuanVideo 1.5 pipelines, with guidance in a guider component. Prompts are embeddings with masks."""

from collections.abc import Callable
from typing import Any

import diffusers
import torch
import transformers

from support.families.rig.family import Arguments, Family, build_seeded, call_pipeline, image, seeded
from support.families.rig.two_rows import of_two_prompts

# Pixels and frames. The VAE divides sides by 8 and keeps every fourth frame: latents of 2 frames, 4 x 4.
SIDE = 32
FRAMES = 5
TEXT_TOKENS = 6


def pipeline(kind: str, **parts: Any) -> Any:
    """A pipeline of the class `kind` on a transformer of one block."""
    absent: dict[str, Any] = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    built = getattr(diffusers, kind)(
        transformer=diffusers.HunyuanVideo15Transformer3DModel(
            in_channels=4 + 4 + 1,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=1,
            num_refiner_layers=1,
            text_embed_dim=16,
            text_embed_2_dim=8,
            image_embed_dim=8,
            rope_axes_dim=(2, 2, 4),
            target_size=SIDE,
        ),
        vae=diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=4,
            block_out_channels=(8, 8, 8, 8),
            layers_per_block=1,
            spatial_compression_ratio=8,
            temporal_compression_ratio=4,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        guider=diffusers.ClassifierFreeGuidance(),
        **absent | parts,
    )
    built.vision_num_semantic_tokens = 4
    return built


def image_to_video_pipeline() -> Any:
    """Image to video: the first frame as latents and as 4 tokens."""
    config = transformers.SiglipVisionConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=16
    )
    return pipeline(
        "HunyuanVideo15ImageToVideoPipeline",
        image_encoder=transformers.SiglipVisionModel(config),
        feature_extractor=transformers.SiglipImageProcessor(size={"height": 32, "width": 32}),
    )


def text_to_video(seed: int, steps: int, guidance: float) -> Arguments:
    """Two prompts of other lengths for each seed, a size and a number of frames."""
    arguments = {"num_inference_steps": steps, "guidance_scale": guidance, "height": SIDE, "width": SIDE, "num_frames": FRAMES}
    for number, (name, tokens) in enumerate({"prompt": 2 + seed % 4, "negative_prompt": 2}.items()):
        arguments |= {
            f"{name}_embeds": seeded(seed + 100 * number, 1, TEXT_TOKENS, 16),
            f"{name}_embeds_mask": _mask(tokens),
            f"{name}_embeds_2": seeded(seed + 100 * number + 50, 1, TEXT_TOKENS, 8),
            f"{name}_embeds_mask_2": _mask(tokens - 1),
        }
    return arguments


def image_to_video(seed: int, steps: int, guidance: float) -> Arguments:
    """The first frame, which also gives the size."""
    arguments = text_to_video(seed, steps, guidance) | {"image": image(seed, SIDE, SIDE)}
    del arguments["height"], arguments["width"]
    return arguments


def call_with_guider(view: Any, arguments: Arguments) -> Any:
    """The strength of guidance is the guider's, not an argument of the call."""
    view.guider = view.guider.new(guidance_scale=arguments["guidance_scale"])
    return call_pipeline(view, {name: value for name, value in arguments.items() if name != "guidance_scale"})


def _mask(tokens: int) -> torch.Tensor:
    return (torch.arange(TEXT_TOKENS) < tokens).long()[None]


def _family(kind: str, make: Callable[[], Any], request: Callable[[int, int, float], Arguments]) -> Family:
    return Family(kind, "HunyuanVideo 1.5", build_seeded(make), request, call=call_with_guider, doubled=of_two_prompts(request))


FAMILIES = [
    _family("HunyuanVideo15Pipeline", lambda: pipeline("HunyuanVideo15Pipeline"), text_to_video),
    _family("HunyuanVideo15ImageToVideoPipeline", image_to_video_pipeline, image_to_video),
]
