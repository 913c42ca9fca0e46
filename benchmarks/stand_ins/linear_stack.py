# SPDX-License-Identifier: Apache-2.0
"""A stack of linear layers of random float32, of any size: its file is streamed to the disk, its weights are read into slabs."""

import json
from pathlib import Path

import torch
from torch import nn

from diffusion_worker.memory.checkpoint import stored_in
from diffusion_worker.memory.device_memory import available_bytes
from diffusion_worker.memory.placeholders import Placeholders
from diffusion_worker.memory.weights import ModelWeights

WIDTH = 2048
LAYER_BYTES = WIDTH * WIDTH * 4
CPU = torch.device("cpu")


def write_stack(folder: Path, size: int) -> Path:
    """Write `model.safetensors` with weights of about `size` bytes to a folder, made if missing, and return the file's path.

    Every layer has the same random values.
    """
    count = size // LAYER_BYTES
    header = {
        f"{number}.weight": {
            "dtype": "F32",
            "shape": [WIDTH, WIDTH],
            "data_offsets": [number * LAYER_BYTES, (number + 1) * LAYER_BYTES],
        }
        for number in range(count)
    }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    # The same layer's bytes again and again: nothing here looks at their values.
    layer = torch.rand(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)).numpy().tobytes()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for _ in range(count):
            file.write(layer)
    return path


def place_stack(folder: Path) -> tuple[nn.Module, ModelWeights]:
    """Return the layers whose file `write_stack` left in a folder, and the `ModelWeights` that hold their values on the CPU."""
    stored, unread = stored_in(folder), Placeholders()
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in stored)).requires_grad_(False)
    for number, layer in enumerate(module):
        layer.weight = nn.Parameter(unread.make(stored[f"{number}.weight"], torch.float32), requires_grad=False)
    weights = ModelWeights(CPU)
    weights.place(module, folder, unread=unread)
    return module, weights


def require_memory(size: int) -> None:
    """Raise RuntimeError if fewer bytes of memory are free: swapping would spoil the measurement."""
    if (found := available_bytes(CPU)) < size:
        raise RuntimeError(f"the measurement needs {size / 1e9:.1f} GB of memory, found {found / 1e9:.1f} GB free")
