# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel: each rank has some rows or columns of a model's large linear layers.

Diffusers' plan says which layers are cut, and how. This rank's part of a cut layer is a plain tensor in its slab. A layer cut by its
outputs computes some of them; one cut by its inputs sums its results over the ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from diffusers.hooks.tensor_parallel import resolve_tp_shard_specs
from torch import nn
from torch.nn import functional

from diffusion_worker.errors import ConfigError
from diffusion_worker.lora.layers import LinearPart
from diffusion_worker.lora.loads.model_table import PartCut
from diffusion_worker.runner.families import model_record, models


def check_model(component: str, model: nn.Module, size: int) -> None:
    """Refuse a denoiser that has no tensor plan known to work, or whose heads or planned layers do not divide evenly by `size`.

    Raises:
        ConfigError: the reason, with the option `--tensor` and the component's name.
    """
    model_class = type(model).__name__
    if not model_record(type(model)).tensor:
        known = ", ".join(record.name for record in models() if record.tensor)
        raise ConfigError(f"--tensor: {model_class} ({component}) is not supported, expected one of {known}")
    heads = int(model.config["num_attention_heads"])  # type: ignore[index]
    if heads % size:
        raise ConfigError(f"--tensor {size}: {model_class} ({component}) has {heads} attention heads, which is not a multiple of {size}")
    try:
        resolve_tp_shard_specs(model, model._tp_plan, size)
    except ValueError as error:
        raise ConfigError(f"--tensor {size}: {model_class} ({component}): {error}") from None


class TensorCut:
    """A map from each planned parameter to the rows or columns that this rank holds, computed from whole shapes.

    So construct it while the parameters are still whole. `cut` then takes parts, `connect` makes the layers add up over the group.
    """

    def __init__(self, model: Any, group: dist.ProcessGroup) -> None:
        self._model = model
        self._group = group
        self._size = dist.get_world_size(group)
        self._index = dist.get_rank(group)
        self._specs = resolve_tp_shard_specs(model, model._tp_plan, self._size)

    def cut(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Take the part that this rank holds of a tensor named as in the model; a tensor outside the plan is returned whole.

        The result shares memory with `whole`, unless a fused layer's blocks had to be joined.
        """
        spec = self._specs.get(name)
        if spec is None or spec.dim is None:
            return whole
        return PartCut(spec.dim, tuple(spec.block_sizes), self._size, self._index).of(whole, spec.dim)

    def connect(self) -> None:
        """Replace the forward of each layer cut by its inputs: an all-reduce sums the partial results, and then the bias is added once.

        The layer's weight must be this rank's part by then.
        """
        for name in self._specs:
            layer = name.removesuffix(".weight")
            if layer != name and self._specs[name].dim == 1:
                linear = self._model.get_submodule(layer)
                linear.forward = _summing_forward(linear, self._group)

    def part(self, layer: str) -> LinearPart | None:
        """Describe to adapters which part of a layer is here, and whether `A x` has to be summed over the group; None outside the plan."""
        spec = self._specs.get(f"{layer}.weight")
        if spec is None:
            return None
        cut = PartCut(int(spec.dim or 0), tuple(spec.block_sizes), self._size, self._index)
        return LinearPart(cut, add_up=self._sum if cut.dim == 1 else _as_it_is)

    def _sum(self, mine: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(mine, group=self._group)
        return mine


def _as_it_is(low: torch.Tensor) -> torch.Tensor:
    return low


def _summing_forward(linear: nn.Linear, group: dist.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        result = functional.linear(x, linear.weight)
        dist.all_reduce(result, group=group)
        return result if linear.bias is None else result + linear.bias

    return forward
