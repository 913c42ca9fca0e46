# SPDX-License-Identifier: Apache-2.0
"""Folders of peft: good ones for given linear layers, and changed ones, that are no adapter or none for the model at hand.

Real: all files. Not real: the factors of the good ones, which are random.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from diffusion_worker.lora.adapter_file import PEFT_WEIGHTS
from diffusion_worker.lora.peft_settings import CONFIG_FILE

Tensors = dict[str, torch.Tensor]


def write_adapter(folder: str | Path, linears: dict[str, nn.Linear], *, rank: int = 4, seed: int = 3) -> None:
    """A folder that is the same for the same layers and seed; its effect is of the size of the layers' own."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, linear in linears.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = (
            torch.randn(rank, linear.in_features, generator=generator) / linear.in_features**0.5
        )
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(linear.out_features, rank, generator=generator) / 4
    save_file(tensors, Path(folder) / PEFT_WEIGHTS)
    (Path(folder) / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))


def make_bad_adapters(folder: Path, *, like: Path) -> dict[str, Path]:
    """Make a folder for each fault that an adapter can have; return them by the fault's name."""
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
    # The axis that meets the model is twice as long: inputs of A, outputs of B.
    _write(made["other-shapes"], like, lambda tensors: {key: torch.cat([tensors[key]] * 2, int("lora_A" in key)) for key in tensors})
    changed_adapter(made["huge-rank"], like, config={"r": 128, "rank_pattern": {}}, tensors=_of_rank_128)
    return made


def changed_adapter(folder: Path, like: Path, *, config: dict[str, Any] | None = None, tensors: Callable[[Any], Any] = dict) -> Path:
    """A copy of a peft folder in `folder`, with other settings, and with what `tensors` makes of its torch tensors."""
    settings = json.loads((like / CONFIG_FILE).read_text()) | (config or {})
    (folder / CONFIG_FILE).write_text(json.dumps(settings))
    _write(folder, like, tensors)
    return folder


def _write(folder: Path, like: Path, change: Callable[[Tensors], Tensors]) -> None:
    save_file({key: value.contiguous() for key, value in change(load_file(like / PEFT_WEIGHTS)).items()}, folder / PEFT_WEIGHTS)


def _of_rank_128(tensors: Tensors) -> Tensors:
    shapes = {key: (128, value.shape[1]) if "lora_A" in key else (value.shape[0], 128) for key, value in tensors.items()}
    return {key: torch.zeros(shape, dtype=tensors[key].dtype) for key, shape in shapes.items()}
