# SPDX-License-Identifier: Apache-2.0
"""Folders that are no adapter, or none for the model at hand, made from a good one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import torch as torch_files
from safetensors.numpy import load_file, save_file

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
Tensors = dict[str, np.ndarray[Any, Any]]


def make_bad_adapters(folder: Path, *, like: Path) -> dict[str, Path]:
    """One folder for each thing that can be wrong."""
    made = {
        name: folder / name for name in ("empty", "no-config", "no-weights", "garbage", "other-modules", "other-shapes", "huge-rank", "cut")
    }
    made["empty"].mkdir()
    made["missing"] = folder / "missing"
    for name, path in made.items():
        if name not in ("empty", "missing"):
            shutil.copytree(like, path)
    (made["no-config"] / CONFIG).unlink()
    (made["no-weights"] / WEIGHTS).unlink()
    (made["garbage"] / WEIGHTS).write_bytes(b"these are no tensors" * 100)
    weights = (made["cut"] / WEIGHTS).read_bytes()
    (made["cut"] / WEIGHTS).write_bytes(weights[: len(weights) // 2])
    _rewrite(made["other-modules"], lambda tensors: {key.replace("transformer_blocks", "layers"): value for key, value in tensors.items()})
    _rewrite(
        made["other-shapes"], lambda tensors: {key: np.concatenate([value, value], axis=_outer(key)) for key, value in tensors.items()}
    )
    _rewrite(made["huge-rank"], _of_rank_128)
    config = json.loads((made["huge-rank"] / CONFIG).read_text())
    (made["huge-rank"] / CONFIG).write_text(json.dumps({**config, "r": 128, "rank_pattern": {}}))
    return made


def changed_adapter(folder: Path, like: Path, *, config: dict[str, Any] | None = None, tensors: Callable[[Any], Any] | None = None) -> Path:
    """A copy of a peft folder in `folder`, with other settings, and with what `tensors` makes of its torch tensors."""
    settings = json.loads((like / CONFIG).read_text()) | (config or {})
    (folder / CONFIG).write_text(json.dumps(settings))
    state = torch_files.load_file(like / WEIGHTS)
    torch_files.save_file(tensors(state) if tensors else state, folder / WEIGHTS)
    return folder


def _rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    save_file({key: np.ascontiguousarray(value) for key, value in change(load_file(folder / WEIGHTS)).items()}, folder / WEIGHTS)


def _outer(key: str) -> int:
    """The axis that meets the model: inputs of A, outputs of B."""
    return 1 if "lora_A" in key else 0


def _of_rank_128(tensors: Tensors) -> Tensors:
    resized = {}
    for key, value in tensors.items():
        shape = (128, value.shape[1]) if "lora_A" in key else (value.shape[0], 128)
        resized[key] = np.zeros(shape, value.dtype)
    return resized
