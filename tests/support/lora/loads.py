# SPDX-License-Identifier: Apache-2.0
"""A model of a few layers, an adapter for it, and orders to load the adapter on ranks with this model."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from torch import nn

from diffusion_worker.lora.diffusion_manager import DiffusionLoRAManager
from diffusion_worker.lora.layers import LinearPart
from diffusion_worker.lora.loads.order import LoadOrder
from diffusion_worker.lora.located import DIFFUSERS_WEIGHTS
from diffusion_worker.lora.request import LoadOptions, LoRARequest


def blocks(count: int = 3, width: int = 8) -> nn.Module:
    """Build a module of `count` blocks with linear layers `to_q` and `to_k`, as in an attention, and a convolution `conv`.

    Weights follow a fixed seed; it cannot be called.
    """
    torch.manual_seed(0)

    def block() -> nn.Module:
        return nn.ModuleDict({"to_q": nn.Linear(width, width), "to_k": nn.Linear(width, 2 * width), "conv": nn.Conv2d(width, width, 3)})

    return nn.ModuleDict({"blocks": nn.ModuleList([block() for _ in range(count)])})


def manager_of(model: nn.Module, *, part_of: Any = lambda name: None, **options: Any) -> DiffusionLoRAManager:
    """Return a rank's manager of adapters for a model as `transformer`: on the CPU, with 2 slots, 4 cached and a rank up to 8.

    `part_of` and `options` go to the manager, and may override these.
    """
    settings: dict[str, Any] = {"slots": 2, "cached": 4, "max_rank": 8, "device": torch.device("cpu"), "part_of": part_of} | options
    return DiffusionLoRAManager({"transformer": model}, denoiser="transformer", **settings)


def write_file(folder: Path, model: nn.Module, *, rank: int = 2, metadata: dict[str, str] | None = None, seed: int = 1) -> Path:
    """Write an adapter for all layers of a model in diffusers' layout into `folder`, made if it is missing, and return `folder`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, layer in model.named_modules():
        if not list(layer.children()) and hasattr(layer, "weight"):
            out, inputs, *points = layer.weight.shape
            tensors[f"transformer.{name}.lora_A.weight"] = torch.randn(rank, inputs, *points, generator=generator)
            tensors[f"transformer.{name}.lora_B.weight"] = torch.randn(out, rank, *[1] * len(points), generator=generator)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / DIFFUSERS_WEIGHTS, metadata)
    return folder


def request(path: Path, number: int = 1) -> LoRARequest:
    """Return a request for an adapter that is named for its folder."""
    return LoRARequest(path.name, number, str(path))


@contextmanager
def order_for(path: Path, *managers: DiffusionLoRAManager, **options: Any) -> Iterator[LoadOrder]:
    """Provide the order to load the adapter at `path` on ranks, one for each manager; it is not carried out here.

    The memories for the ranks belong to this process, and are closed after the block.
    """
    memories = [os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) for _ in managers]
    try:
        yield LoadOrder(
            request=request(path),
            options=LoadOptions(**options),
            tables=[msgspec.msgpack.encode(manager.table()) for manager in managers],
            ranks=[[number] for number in range(len(managers))],
            memories=[f"/proc/{os.getpid()}/fd/{memory}" for memory in memories],
            deadline_s=60.0,
        )
    finally:
        for memory in memories:
            os.close(memory)


def linear_part(cut: Any) -> LinearPart:
    """Return a `LinearPart` with this cut whose `add_up` changes nothing, since no other rank has a share of the sums."""
    return LinearPart(cut, add_up=lambda low: low)
