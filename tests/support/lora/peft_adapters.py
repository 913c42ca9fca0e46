# SPDX-License-Identifier: Apache-2.0
"""Writes a real peft LoRA folder for given linear layers. Not real: the factors, which are random."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn


def write_adapter(folder: str | Path, linears: dict[str, nn.Linear], *, rank: int = 4, seed: int = 3) -> None:
    """A folder that is the same for the same layers and seed; its effect is of the size of the layers' own."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, linear in linears.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = (
            torch.randn(rank, linear.in_features, generator=generator) / linear.in_features**0.5
        )
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(linear.out_features, rank, generator=generator) / 4
    save_file(tensors, Path(folder) / "adapter_model.safetensors")
    (Path(folder) / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
