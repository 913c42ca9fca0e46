# SPDX-License-Identifier: Apache-2.0
"""Workarounds for faults of diffusers' classes, applied to a request's view without touching the class or the model."""

from collections.abc import Callable
from typing import Any

from diffusers.configuration_utils import FrozenDict

from diffusion_worker.runner.families import Workaround, pipeline_record

# Stable Diffusion 3's inpainting takes this number of channels for a model whose input is latents without a mask.
SD3_LATENT_CHANNELS = 16


def mend(view: Any) -> None:
    """Apply to a view every workaround that the record of its class lists; only the view's own parts change, never the shared modules."""
    for workaround in pipeline_record(type(view)).workarounds:
        WORKAROUNDS[workaround](view)


def _let_hook_norm(view: Any) -> None:
    """Give the stand-in of the text encoder's final norm the real `register_forward_hook`, which Qwen-Image 2.1 calls.

    Through the stand-in this would count as a change, and the request would run alone. The hook is harmless: equal for all requests,
    without state, and removed by the end of the call.
    """
    if view.text_encoder is None:
        return
    model = view.text_encoder.model
    norm = getattr(model, "language_model", model).norm
    vars(norm)["register_forward_hook"] = vars(norm)["_real"].register_forward_hook


def _mend_sd3_inpainting(view: Any) -> None:
    """Make Stable Diffusion 3's inpainting decode with the VAE's shift, and accept models without a mask.

    The class encodes with the shift and decodes without it. It recognises models without a mask by 16 channels only.
    """
    vae, transformer = view.vae, view.transformer
    if transformer.config.in_channels == vae.config.latent_channels:
        transformer.__dict__["config"] = FrozenDict({**transformer.config, "in_channels": SD3_LATENT_CHANNELS})
    shift = vae.config.shift_factor
    if shift:
        vae.__dict__["decode"] = _decode_shifted(vae.decode, shift)


def _decode_shifted(decode: Callable[..., Any], shift: float) -> Callable[..., Any]:
    return lambda latents, *args, **kwargs: decode(latents + shift, *args, **kwargs)


WORKAROUNDS: dict[Workaround, Callable[[Any], None]] = {
    Workaround.HOOK_BEHIND_STAND_IN: _let_hook_norm,
    Workaround.SD3_INPAINTING: _mend_sd3_inpainting,
}
