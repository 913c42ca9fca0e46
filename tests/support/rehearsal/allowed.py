# SPDX-License-Identifier: Apache-2.0
"""Waits of steady steps that are allowed, by the function that asks for them, each with its reason.

An entry that no longer occurs is a fault, and so is a wait without an entry. Copies that wait for nothing are counted only.
"""

from collections.abc import Iterable, Mapping

from diffusion_worker.config import StepCache
from support.rehearsal.family_trial import Trial

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
