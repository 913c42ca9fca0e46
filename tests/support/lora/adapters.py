# SPDX-License-Identifier: Apache-2.0
"""Adapters with random factors for a module, applied by our layers, by peft and by merging; folders of peft, good ones and bad ones.

Real: both kinds of layers, and all files. Not real: the factors, which are random. A bad folder holds no adapter, or an adapter for another
model.
"""

import copy
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from diffusion_worker.lora.checkpoint import LoRACheckpoint
from diffusion_worker.lora.located import CONFIG_FILE, PEFT_WEIGHTS
from diffusion_worker.lora.naming import LoRAFactors
from diffusion_worker.lora.pipeline_layers import AdapterLayers, SlotUse

Factors = Mapping[str, LoRAFactors]
Tensors = dict[str, torch.Tensor]


def factors_of(layer: Any, *, rank: int, scaling: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float32) -> LoRAFactors:
    """Return random factors whose effect on a layer is of the same size as the layer's output."""
    generator = torch.Generator().manual_seed(seed)
    inputs, points = tuple(layer.weight.shape[1:]), (1,) * (layer.weight.dim() - 2)
    a = torch.randn(rank, *inputs, generator=generator) / torch.Size(inputs).numel() ** 0.5
    b = torch.randn(layer.weight.shape[0], rank, *points, generator=generator) / rank**0.5
    return LoRAFactors(a.to(dtype), b.to(dtype), scaling)


def random_factors(model: nn.Module, names: Sequence[str], *, rank: int = 4, scaling: float = 1.0, seed: int = 0) -> dict[str, LoRAFactors]:
    """Draw factors for some layers of a model, by path, each from another seed, so that no two are alike."""
    numbered = enumerate(names, seed * 100)
    return {name: factors_of(model.get_submodule(name), rank=rank, scaling=scaling, seed=number) for number, name in numbered}


def checkpoint_of(factors: Factors) -> LoRACheckpoint:
    """Return a checkpoint with these factors, as of the component `transformer`; its digest and size are placeholders."""
    return LoRACheckpoint(hashed=lambda: "sha256:0", size_bytes=0, modules={f"transformer.{name}": each for name, each in factors.items()})


def layers_of(model: nn.Module, **options: Any) -> AdapterLayers:
    """Wrap a model's layers for adapters, as the component `transformer`: by default on the CPU, with 4 slots and a rank up to 16.

    It also limits torch to one thread.
    """
    torch.set_num_threads(1)
    return AdapterLayers({"transformer": model}, **{"slots": 4, "max_rank": 16, "device": torch.device("cpu")} | options)


def load(layers: AdapterLayers, slot: int, factors: Factors) -> None:
    """Pack factors and write them to `slot`, up to the end of the copy, so that the next rows may use them."""
    layers.write(slot, layers.pack(checkpoint_of(factors), name=f"adapter {slot}"))
    layers.fill()


def run(layers: AdapterLayers, model: nn.Module, x: torch.Tensor, uses: Sequence[Sequence[tuple[int, float]]]) -> torch.Tensor:
    """Run the model with the adapters (slot and strength) of each row."""
    with torch.inference_mode(), layers.rows([[SlotUse(*use) for use in row] for row in uses]):
        result: torch.Tensor = model(x)
        return result


def with_peft(model: nn.Module, factors: Factors, scale: float = 1.0) -> nn.Module:
    """Inject an adapter by peft, as a reference that never merges weights; `scale` multiplies its scaling.

    The given model is changed, set to evaluation and returned.
    """
    import peft  # takes a second, which most users of this file save

    ranks = {name: each.a.shape[0] for name, each in factors.items()}
    made = peft.inject_adapter_in_model(peft.LoraConfig(target_modules=list(factors), r=1, rank_pattern=ranks), model)
    for name, each in factors.items():
        layer: Any = made.get_submodule(name)
        layer.lora_A["default"].weight.data = each.a
        layer.lora_B["default"].weight.data = each.b
        layer.scaling["default"] = each.scaling * scale
    return made.eval()


def merged(model: nn.Module, factors: Factors, scale: float = 1.0) -> nn.Module:
    """Add an adapter to the model's weights, and return the model. The model is changed."""
    for name, each in factors.items():
        layer: Any = model.get_submodule(name)
        delta = each.b.float().flatten(1) @ each.a.float().flatten(1)
        layer.weight.data += (delta * each.scaling * scale).reshape(layer.weight.shape).to(layer.weight.dtype)
    return model


def require_rows_as_merged(
    made: torch.Tensor, x: torch.Tensor, uses: Sequence[Sequence[tuple[int, float]]], *, base: nn.Module, adapters: Sequence[Factors]
) -> None:
    """Check that each row of `made` equals the output of the base model for that row of `x` alone, with the row's adapters merged.

    `uses` has the adapters (number in `adapters` and strength) of each row. `base` is not changed.
    """
    for row, own in enumerate(uses):
        alone = copy.deepcopy(base)
        for number, scale in own:
            merged(alone, adapters[number], scale)
        torch.testing.assert_close(made[row : row + 1], alone(x[row : row + 1]), atol=1e-5, rtol=1e-5)


def write_adapter(folder: str | Path, linears: dict[str, nn.Linear], *, rank: int = 4, seed: int = 3) -> None:
    """Write a peft folder, the same for the same layers and seed; its effect is of the same size as the layers' output."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, linear in linears.items():
        inputs = linear.in_features
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / inputs**0.5
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(linear.out_features, rank, generator=generator) / 4
    save_file(tensors, Path(folder) / PEFT_WEIGHTS)
    (Path(folder) / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))


def make_bad_adapters(folder: Path, *, like: Path) -> dict[str, Path]:
    """Damage copies of the adapter `like`, each in its own way, and return their folders by fault.

    `empty` contains no file, and `missing` does not exist.
    """

    def of_rank_128(tensors: Tensors) -> Tensors:
        return {key: value.new_zeros((128, value.shape[1]) if "lora_A" in key else (len(value), 128)) for key, value in tensors.items()}

    changed = ("no-config", "no-weights", "garbage", "other-modules", "other-shapes", "huge-rank", "cut")
    made = {name: folder / name for name in ("empty", *changed, "missing")}
    made["empty"].mkdir()
    for name in changed:
        shutil.copytree(like, made[name])
    (made["no-config"] / CONFIG_FILE).unlink()
    (made["no-weights"] / PEFT_WEIGHTS).unlink()
    (made["garbage"] / PEFT_WEIGHTS).write_bytes(b"these are no tensors" * 100)
    weights = (made["cut"] / PEFT_WEIGHTS).read_bytes()
    (made["cut"] / PEFT_WEIGHTS).write_bytes(weights[: len(weights) // 2])
    _write(made["other-modules"], like, lambda tensors: {key.replace("transformer_blocks", "layers"): tensors[key] for key in tensors})
    # The axis that the model determines is doubled: inputs of A, outputs of B.
    _write(made["other-shapes"], like, lambda tensors: {key: torch.cat([tensors[key]] * 2, int("lora_A" in key)) for key in tensors})
    changed_adapter(made["huge-rank"], like, config={"r": 128, "rank_pattern": {}}, tensors=of_rank_128)
    return made


def changed_adapter(folder: Path, like: Path, *, config: dict[str, Any] | None = None, tensors: Callable[[Any], Any] = dict) -> Path:
    """Write settings and weights of the peft folder `like` with changes into `folder`, which must exist, and return `folder`.

    `config` overrides settings, and `tensors` makes the tensors to write from those of the file.
    """
    settings = json.loads((like / CONFIG_FILE).read_text()) | (config or {})
    (folder / CONFIG_FILE).write_text(json.dumps(settings))
    _write(folder, like, tensors)
    return folder


def _write(folder: Path, like: Path, change: Callable[[Tensors], Tensors]) -> None:
    save_file({key: value.contiguous() for key, value in change(load_file(like / PEFT_WEIGHTS)).items()}, folder / PEFT_WEIGHTS)
