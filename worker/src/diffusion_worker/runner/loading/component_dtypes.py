# SPDX-License-Identifier: Apache-2.0
"""The dtype of each component's weights: by the options, by the record of the pipeline's class, or the model's."""

from collections.abc import Collection
from typing import Any

import torch

from diffusion_worker.config import Dtype, WorkerConfig
from diffusion_worker.errors import ConfigError
from diffusion_worker.runner.families import pipeline_record

_TORCH = {Dtype.FLOAT32: torch.float32, Dtype.FLOAT16: torch.float16, Dtype.BFLOAT16: torch.bfloat16}


def dtype_of(dtype: Dtype, device: torch.device) -> torch.dtype:
    """Convert the option to a dtype; `auto` is float32 on a CPU and bfloat16 on any accelerator."""
    if dtype is Dtype.AUTO:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return _TORCH[dtype]


class ComponentDtypes:
    """The dtypes of the components of one pipeline class, of which most have the model's."""

    def __init__(self, usual: torch.dtype, config: WorkerConfig, pipeline_class: Any) -> None:
        self._usual = usual
        self._pipeline = pipeline_class.__name__
        self._asked = {name: _TORCH[dtype] for name, dtype in config.component_dtypes.items()}
        self._own = dict.fromkeys(pipeline_record(pipeline_class).in_float32, torch.float32) | self._asked

    def of(self, component: str) -> torch.dtype:
        """Return the dtype of a component's weights."""
        return self._own.get(component, self._usual)

    def for_diffusers(self) -> dict[str, torch.dtype]:
        """Return the argument `dtype` of a pipeline's `from_pretrained`: the model's dtype as `default`, exceptions by component."""
        return {"default": self._usual, **self._own}

    def outcome(self, components: Collection[str]) -> dict[str, str]:
        """Return the components whose dtype differs from the model's, such as `{"dtype": "vae=float32"}`; an empty dict if none does.

        `components` are those of the loaded pipeline that have weights.

        Raises:
            ConfigError: the options name a component that is not among `components`.
        """
        if unknown := sorted(self._asked.keys() - set(components)):
            component, known = unknown[0], ", ".join(sorted(components))
            raise ConfigError(f"--dtype {component}=…: expected a component of {self._pipeline} that has weights, one of {known}")
        other = {name: dtype for name, dtype in sorted(self._own.items()) if name in components and dtype is not self._usual}
        return {"dtype": ", ".join(f"{name}={str(dtype).removeprefix('torch.')}" for name, dtype in other.items())} if other else {}
