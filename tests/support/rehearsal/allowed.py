# SPDX-License-Identifier: Apache-2.0
"""Waits of steady steps that are allowed, by the function that asks for them, each with its reason.

An entry that no longer occurs is a fault, and so is a wait without an entry. Copies that wait for nothing are counted only. `needed_by`
names the variant that needs an entry.
"""

from collections.abc import Iterable, Mapping

from diffusion_worker.config import StepCache
from support.rehearsal.family_trial import METER, Trial

_REASONS: dict[str, tuple[str, ...]] = {
    "the times of a tick are read at its end": ("StageSpan.seconds",),
    "it asks for the number of its time, to compute with it in the pipeline's own loop": (
        "AnyFlowPipeline.__call__",
        "AuraFlowPipeline.__call__",
        "CosmosVideoToWorldPipeline.__call__",
        "EasyAnimatePipeline.__call__",
        "ErnieImagePipeline.__call__",
        "HunyuanDiTPipeline.__call__",
        "LuminaPipeline.__call__",
        "ZImageControlNetInpaintPipeline.__call__",
        "ZImageControlNetPipeline.__call__",
        "ZImageImg2ImgPipeline.__call__",
        "ZImageInpaintPipeline.__call__",
        "ZImageOmniPipeline.__call__",
    ),
    "it compares its time with the boundary between the two models": (
        "WanImageToVideoPipeline.__call__",
        "WanPipeline.__call__",
    ),
    "it makes a list of the next time, for the noise of what is not painted": (
        "Flux2KleinInpaintPipeline.__call__",
        "FluxControlInpaintPipeline.__call__",
        "FluxControlNetInpaintPipeline.__call__",
        "FluxInpaintPipeline.__call__",
        "FluxKontextInpaintPipeline.__call__",
        "KandinskyV22InpaintPipeline.__call__",
        "QwenImageEditInpaintPipeline.__call__",
        "QwenImageInpaintPipeline.__call__",
        "StableDiffusion3InpaintPipeline.__call__",
        "StableDiffusionControlNetInpaintPipeline.__call__",
        "StableDiffusionInpaintPipeline.__call__",
        "StableDiffusionXLInpaintPipeline.__call__",
    ),
    "it cuts a prompt by its mask, or its tokens by their kind": (
        "HunyuanVideo15Transformer3DModel.forward",
        "HunyuanImageTransformer2DModel.forward",
        "HunyuanVideoFramepackTransformer3DModel.forward",
        "GlmImageTransformer2DModel.forward",
        "MochiAttnProcessor2_0.__call__",
        "ZImageControlNetModel.forward",
        "BriaFibo2Transformer2DModel.forward",
        "QwenImage21Transformer2DModel.forward",
        "QwenImage21Transformer2DModel.build_token_metadata",
        "_qwenimage21_prefix_segments",
        "compute_text_seq_len_from_mask",
        "_compute_text_seq_len_from_mask",
        "QwenImageTransformer2DModel.forward",
    ),
    "it makes its tables of positions on the host, at each call": (
        "apply_rotary_emb",
        "QwenImage21Rope.forward",
        "Lumina2RotaryPosEmbed._get_freqs_cis",
        "Lumina2RotaryPosEmbed.forward",
        "NucleusMoEEmbedRope.forward",
        "OmniGenSuScaledRotaryEmbedding.forward",
        "HunyuanVideoFramepackRotaryPosEmbed.forward",
        "ChronoEditRotaryPosEmbed.forward",
        "Kandinsky5TimeEmbeddings.forward",
        "ChromaCombinedTimestepTextProjEmbeddings.forward",
        "SkyReelsV2Transformer3DModel.forward",
    ),
    "it lays rows of its own sizes side by side": (
        "ZImageTransformer2DModel._prepare_sequence",
        "ZImageTransformer2DModel._build_unified_sequence",
        "HiDreamImageTransformer2DModel.unpatchify",
        "HiDreamImageTransformer2DModel.patchify",
        "LuminaPatchEmbed.forward",
    ),
    "it counts the tokens of each expert": (
        "MOEFeedForwardSwiGLU.moe_infer",
        "SwiGLUExperts._run_experts_for_loop",
    ),
    "its step takes a time that is no element of its schedule, or at another place": (
        "DDIMScheduler.step",
        "DDIMScheduler._get_variance",
        "CogVideoXDPMScheduler.step",
        "DDPMWuerstchenScheduler.previous_timestep",
    ),
    "it draws on the host, and looks for its time among all": ("AmusedScheduler.step",),
    "its argument is another tensor in each step, whose content decides what shares a call": ("content",),
}
# The rule of a step cache, with the reason why it waits; it does so once a step for each request that may skip.
CACHE_RULES: dict[StepCache, dict[str, str]] = {
    StepCache.FIRST_BLOCK: {
        "FBCHeadBlockHook._should_compute_remaining_blocks": "it decides on the blocks that follow, by the change that the first one made"
    },
}
ALLOWED: dict[str, str] = {function: reason for reason, functions in _REASONS.items() for function in functions}
# Variants that need entries of others than their own pipeline.
_NEEDED_BY: dict[str, tuple[str, ...]] = {
    "AllegroPipeline": ("DDIMScheduler.step", "DDIMScheduler._get_variance"),
    "AmusedPipeline": ("AmusedScheduler.step",),
    "BriaFibo2Pipeline": ("BriaFibo2Transformer2DModel.forward",),
    "ChromaPipeline": ("ChromaCombinedTimestepTextProjEmbeddings.forward",),
    "ChronoEditPipeline": ("ChronoEditRotaryPosEmbed.forward",),
    "CogVideoXPipeline (DPM)": ("CogVideoXDPMScheduler.step",),
    "Flux2Pipeline (two references)": ("content",),
    "GlmImagePipeline": ("GlmImageTransformer2DModel.forward", "apply_rotary_emb"),
    "HiDreamImagePipeline": (
        "HiDreamImageTransformer2DModel.patchify",
        "HiDreamImageTransformer2DModel.unpatchify",
        "MOEFeedForwardSwiGLU.moe_infer",
    ),
    "HunyuanImagePipeline": ("HunyuanImageTransformer2DModel.forward",),
    "HunyuanVideo15Pipeline": ("HunyuanVideo15Transformer3DModel.forward",),
    "HunyuanVideoFramepackPipeline": ("HunyuanVideoFramepackRotaryPosEmbed.forward", "HunyuanVideoFramepackTransformer3DModel.forward"),
    "Kandinsky5T2VPipeline": ("Kandinsky5TimeEmbeddings.forward",),
    "Lumina2Pipeline": ("Lumina2RotaryPosEmbed._get_freqs_cis", "Lumina2RotaryPosEmbed.forward"),
    "LuminaPipeline": ("LuminaPatchEmbed.forward",),
    "MochiPipeline": ("MochiAttnProcessor2_0.__call__",),
    "NucleusMoEImagePipeline": (
        "NucleusMoEEmbedRope.forward",
        "SwiGLUExperts._run_experts_for_loop",
        "_compute_text_seq_len_from_mask",
    ),
    "OmniGenPipeline": ("OmniGenSuScaledRotaryEmbedding.forward",),
    "QwenImage21Pipeline (without cache)": (
        "QwenImage21Rope.forward",
        "QwenImage21Transformer2DModel.build_token_metadata",
        "QwenImage21Transformer2DModel.forward",
        "_qwenimage21_prefix_segments",
    ),
    "QwenImageEditPlusPipeline": ("QwenImageTransformer2DModel.forward",),
    "QwenImageModularPipeline": ("compute_text_seq_len_from_mask",),
    "SkyReelsV2DiffusionForcingPipeline": ("SkyReelsV2Transformer3DModel.forward",),
    "StableCascadeDecoderPipeline": ("DDPMWuerstchenScheduler.previous_timestep",),
    "WanImageToVideoPipeline (two experts)": ("WanImageToVideoPipeline.__call__",),
    "WanPipeline (two experts)": ("WanPipeline.__call__",),
    "ZImageControlNetPipeline": ("ZImageControlNetModel.forward",),
    "ZImageOmniPipeline": (
        "ZImageTransformer2DModel._build_unified_sequence",
        "ZImageTransformer2DModel._prepare_sequence",
    ),
}
_VARIANTS = {function: variant for variant, functions in _NEEDED_BY.items() for function in functions}


def needed_by(variant: str) -> set[str]:
    """Return the allowed functions that this variant of a family shows to be needed: its own pipeline's, or those that it is listed
    with. Each entry but that of the meter belongs to a single variant."""
    others = ALLOWED.keys() - {METER}
    return {function for function in others if _VARIANTS.get(function, function.split(".")[0]) == variant}


def unexpected(trial: Trial, allowed: Mapping[str, str] = ALLOWED) -> list[str]:
    """Return a line for each cause of a wait for the device in the trial's steady steps, unless its function is a key of `allowed`."""
    return [str(cause) for cause in trial.waits if cause.function not in allowed]


def stale(trials: Iterable[Trial], allowed: Mapping[str, str] = ALLOWED) -> list[str]:
    """Return the sorted functions in `allowed` by which no trial had a wait. `trials` must be those of all families, else too many are
    listed."""
    found = {cause.function for trial in trials for cause in trial.waits}
    return sorted(allowed.keys() - found)


def faults_of(trial: Trial, allowed: Mapping[str, str] = ALLOWED) -> list[str]:
    """Return a line for each fault of a trial: another result than the CPU's, each race, and each wait that is not allowed. Empty
    without faults."""
    apart = [] if trial.is_equal else [f"{trial.apart:.1e} standard deviations from the CPU's result"]
    faults = [*apart, *trial.races, *(f"not allowed: {cause}" for cause in unexpected(trial, allowed))]
    return [f"{trial.family}: {fault}" for fault in faults]
