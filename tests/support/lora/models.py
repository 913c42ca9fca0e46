# SPDX-License-Identifier: Apache-2.0
"""Adapters with random factors for a module, applied by our layers, by peft, and by merging. Real: both kinds of layers."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import peft
import torch
from torch import nn

from diffusion_worker.lora.checkpoint import LoRACheckpoint, LoRAFactors
from diffusion_worker.lora.pipeline_layers import AdapterLayers, SlotUse

Factors = Mapping[str, LoRAFactors]


def factors_of(layer: Any, *, rank: int, scaling: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float32) -> LoRAFactors:
    """Factors whose effect is of the size of the layer's own."""
    generator = torch.Generator().manual_seed(seed)
    inputs, points = tuple(layer.weight.shape[1:]), (1,) * (layer.weight.dim() - 2)
    a = torch.randn(rank, *inputs, generator=generator) / torch.Size(inputs).numel() ** 0.5
    b = torch.randn(layer.weight.shape[0], rank, *points, generator=generator) / rank**0.5
    return LoRAFactors(a.to(dtype), b.to(dtype), scaling)


def random_factors(model: nn.Module, names: Sequence[str], *, rank: int = 4, scaling: float = 1.0, seed: int = 0) -> dict[str, LoRAFactors]:
    """Factors for the layers of these names."""
    return {
        name: factors_of(model.get_submodule(name), rank=rank, scaling=scaling, seed=seed * 100 + number)
        for number, name in enumerate(names)
    }


def checkpoint_of(factors: Factors) -> LoRACheckpoint:
    """A checkpoint as it is read from the file of an adapter of a transformer."""
    return LoRACheckpoint(digest="sha256:0", size_bytes=0, modules={f"transformer.{name}": each for name, each in factors.items()})


def layers_of(model: nn.Module, **options: Any) -> AdapterLayers:
    """The layers of a model that is a pipeline's transformer."""
    torch.set_num_threads(1)
    return AdapterLayers({"transformer": model}, **{"slots": 4, "max_rank": 16, "device": torch.device("cpu")} | options)


def load(layers: AdapterLayers, slot: int, factors: Factors) -> None:
    """Put an adapter into a slot."""
    layers.write(slot, layers.pack(checkpoint_of(factors), name=f"adapter {slot}"))


def run(layers: AdapterLayers, model: nn.Module, x: torch.Tensor, uses: Sequence[Sequence[tuple[int, float]]]) -> torch.Tensor:
    """One call of the model, with the adapters (slot and strength) of each of its rows."""
    with torch.inference_mode(), layers.rows([[SlotUse(*use) for use in row] for row in uses]):
        result: torch.Tensor = model(x)
        return result


def with_peft(model: nn.Module, factors: Factors, scale: float = 1.0) -> nn.Module:
    """The model with an adapter in peft's own layers, unmerged. The model is changed."""
    ranks = {name: each.a.shape[0] for name, each in factors.items()}
    made = peft.inject_adapter_in_model(peft.LoraConfig(target_modules=list(factors), r=1, rank_pattern=ranks), model)
    for name, each in factors.items():
        layer: Any = made.get_submodule(name)
        layer.lora_A["default"].weight.data = each.a
        layer.lora_B["default"].weight.data = each.b
        layer.scaling["default"] = each.scaling * scale
    return made.eval()


def merged(model: nn.Module, factors: Factors, scale: float = 1.0) -> nn.Module:
    """The model with an adapter added to its weights. The model is changed."""
    for name, each in factors.items():
        layer: Any = model.get_submodule(name)
        delta = each.b.float().flatten(1) @ each.a.float().flatten(1)
        layer.weight.data += (delta * each.scaling * scale).reshape(layer.weight.shape).to(layer.weight.dtype)
    return model


def require_rows_as_merged(
    made: torch.Tensor, x: torch.Tensor, uses: Sequence[Sequence[tuple[int, float]]], *, base: nn.Module, adapters: Sequence[Factors]
) -> None:
    """Each row is what the base makes of it alone with that row's own adapters added to its weights."""
    for row, own in enumerate(uses):
        alone = copy.deepcopy(base)
        for number, scale in own:
            merged(alone, adapters[number], scale)
        torch.testing.assert_close(made[row : row + 1], alone(x[row : row + 1]), atol=1e-5, rtol=1e-5)
