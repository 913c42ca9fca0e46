# SPDX-License-Identifier: Apache-2.0
"""The tensors of a module: parameters and buffers, and the plain parts of those that are quantised."""

from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from diffusion_worker.memory.component_weights import nbytes_of


def named_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers by name, each once: tied ones are the same object. Quantised ones come as their plain parts."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        yield from parts_of(name, tensor)


def weights_bytes(module: torch.nn.Module) -> int:
    """Sum the bytes of a module's parameters and buffers. Tied tensors count once, quantised ones by their stored parts."""
    return sum(nbytes_of(tensor) for _, tensor in named_tensors(module))


def parts_of(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the plain tensors that a tensor consists of, by name: itself, or the parts of torchao's and bitsandbytes' kinds."""
    if is_traceable_wrapper_subclass(tensor):
        inner = [(part, getattr(tensor, part)) for part in tensor.__tensor_flatten__()[0]]
        yield from ((f"{name}.{part}", value) for part, value in inner if value is not None)
        return
    yield name, tensor
    state = getattr(tensor, "quant_state", None)
    if state is not None:
        # A scale for each block of weights, and the table of the values that four bits stand for.
        yield from ((f"{name}.{part}", getattr(state, part)) for part in ("absmax", "code"))


def is_quantized(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds quantised weights, whose contents cannot be replaced."""
    return is_traceable_wrapper_subclass(tensor) or getattr(tensor, "quant_state", None) is not None
