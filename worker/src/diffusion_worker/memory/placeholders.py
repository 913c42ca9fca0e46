# SPDX-License-Identifier: Apache-2.0
"""Tensors whose contents are still in a file, or are yet to be made: they have a shape, a dtype, and one element of memory."""

import torch

from diffusion_worker.memory.random_weights import RandomTensor
from diffusion_worker.memory.weight_files import StoredTensor

Contents = StoredTensor | RandomTensor


class Placeholders:
    """A registry of placeholders with the tensor, stored or random, that fills each of them later.

    The key is the address of a placeholder's memory. It stays the same when a library wraps a tensor in a parameter or ties it.
    `wanted_soon` is False for a load asleep, which reads no contents until a wake; then files are not read ahead.
    """

    def __init__(self, *, wanted_soon: bool = True) -> None:
        self.wanted_soon = wanted_soon
        self._stored: dict[int, Contents] = {}
        # An address stays a placeholder's own only as long as its tensor lives.
        self._tensors: list[torch.Tensor] = []

    def make(self, stored: Contents, dtype: torch.dtype) -> torch.Tensor:
        """Make a placeholder for the contents of a stored or random tensor in this dtype."""
        # NaN, so that no library takes two of them for equal.
        tensor = torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype).expand(stored.shape)
        self._stored[tensor.data_ptr()] = stored
        self._tensors.append(tensor)
        return tensor

    def stored_of(self, tensor: torch.Tensor) -> Contents | None:
        """Return the stored or random tensor behind a placeholder; None for a tensor that has its contents."""
        return self._stored.get(tensor.data_ptr())


def is_lost(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of unknown origin seems to copy a placeholder.

    It does if all of its elements are one element in memory, or if all are NaN.
    """
    if tensor.numel() > 1 and not any(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1):
        return True
    if not tensor.numel() or not tensor.is_floating_point() or not tensor.reshape(-1)[:1].isnan():
        return False
    return bool(tensor.isnan().all())
