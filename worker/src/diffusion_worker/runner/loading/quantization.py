# SPDX-License-Identifier: Apache-2.0
"""Denoisers with weights of fewer bits, by diffusers' own quantizers: torchao for eight bits, bitsandbytes for four.

The linear layers are stored in fewer bits and computed in the model's dtype; everything else, and every other component, keeps it.
Quantised weights are in no file, so a sleeping model keeps them in host memory.
"""

from collections.abc import Collection
from typing import Any

import torch

from diffusion_worker.config import Device, Quantization, WorkerConfig
from diffusion_worker.errors import ConfigError
from diffusion_worker.runner.model_call.components import DENOISERS


def quantization_options(config: WorkerConfig, component: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the quantization arguments of a component's `from_pretrained`; an empty dict without --quantization, or if it is no denoiser.

    Raises:
        ConfigError: nf4 is asked for without a GPU.
    """
    kind = config.quantization
    if kind is Quantization.NONE or component not in DENOISERS:
        return {}
    # Imported late, because the packages take seconds to import and few workers need them.
    import diffusers

    if kind is Quantization.NF4:
        if config.device is Device.CPU or nf4_is_refused():
            raise ConfigError("--quantization nf4: needs a GPU, diffusers' quantizer for it refuses a CPU; int8 and fp8 run on both")
        four_bits = diffusers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
        return {"quantization_config": four_bits}
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

    eight_bits = Int8WeightOnlyConfig(version=2) if kind is Quantization.INT8 else Float8WeightOnlyConfig(version=2)
    return {"quantization_config": diffusers.TorchAoConfig(eight_bits)}


def require_quantizable(config: WorkerConfig, components: Collection[str]) -> None:
    """Raise ConfigError if --quantization is set, but none of these components is among the denoisers, the only ones that are quantised."""
    if config.quantization is not Quantization.NONE and not set(DENOISERS).intersection(components):
        raise ConfigError(
            f"--quantization {config.quantization}: expected a model with one of the components {', '.join(DENOISERS)}, "
            f"found only {', '.join(components)}"
        )


def nf4_is_refused() -> bool:
    """Return True where torch finds no GPU, because bitsandbytes' quantizer in diffusers then raises an error."""
    return not torch.cuda.is_available()
