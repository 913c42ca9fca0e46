# SPDX-License-Identifier: Apache-2.0
"""Folders that are no adapter, or none for the model at hand, made from a good one. Real: the good one, and all files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
Tensors = dict[str, torch.Tensor]


def make_bad_adapters(folder: Path, *, like: Path) -> dict[str, Path]:
    """One folder for each thing that can be wrong."""
    changed = ("no-config", "no-weights", "garbage", "other-modules", "other-shapes", "huge-rank", "cut")
    made = {name: folder / name for name in ("empty", *changed, "missing")}
    made["empty"].mkdir()
    for name in changed:
        shutil.copytree(like, made[name])
    (made["no-config"] / CONFIG).unlink()
    (made["no-weights"] / WEIGHTS).unlink()
    (made["garbage"] / WEIGHTS).write_bytes(b"these are no tensors" * 100)
    weights = (made["cut"] / WEIGHTS).read_bytes()
    (made["cut"] / WEIGHTS).write_bytes(weights[: len(weights) // 2])
    _write(made["other-modules"], like, lambda tensors: {key.replace("transformer_blocks", "layers"): tensors[key] for key in tensors})
    # The axis that meets the model is twice as long: inputs of A, outputs of B.
    _write(made["other-shapes"], like, lambda tensors: {key: torch.cat([tensors[key]] * 2, int("lora_A" in key)) for key in tensors})
    changed_adapter(made["huge-rank"], like, config={"r": 128, "rank_pattern": {}}, tensors=_of_rank_128)
    return made


def changed_adapter(folder: Path, like: Path, *, config: dict[str, Any] | None = None, tensors: Callable[[Any], Any] = dict) -> Path:
    """A copy of a peft folder in `folder`, with other settings, and with what `tensors` makes of its torch tensors."""
    settings = json.loads((like / CONFIG).read_text()) | (config or {})
    (folder / CONFIG).write_text(json.dumps(settings))
    _write(folder, like, tensors)
    return folder


def _write(folder: Path, like: Path, change: Callable[[Tensors], Tensors]) -> None:
    save_file({key: value.contiguous() for key, value in change(load_file(like / WEIGHTS)).items()}, folder / WEIGHTS)


def _of_rank_128(tensors: Tensors) -> Tensors:
    shapes = {key: (128, value.shape[1]) if "lora_A" in key else (value.shape[0], 128) for key, value in tensors.items()}
    return {key: torch.zeros(shape, dtype=tensors[key].dtype) for key, shape in shapes.items()}
