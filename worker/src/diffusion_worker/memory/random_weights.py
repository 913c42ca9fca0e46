# SPDX-License-Identifier: Apache-2.0
"""Tensors of random numbers that are in no file: made where they belong, and the same on every device.

Each number is computed from its position and the tensor's seed in integer arithmetic. So a tensor filled on an accelerator equals the one
filled in host memory, nothing is copied, and a wake can make it again.
"""

import zlib
from collections.abc import Callable
from typing import NamedTuple

import torch

# A chunk takes three times its bytes for a moment.
CHUNK_NUMBERS = 1 << 24
_LARGEST = 2.0**31


class RandomTensor(NamedTuple):
    """Random numbers around `mean`, at most `spread` away from it, equally likely everywhere between."""

    seed: int
    dtype: torch.dtype
    shape: torch.Size
    mean: float
    spread: float

    def fill(self, view: torch.Tensor, cut: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        """Write the numbers to a contiguous tensor, on its device; with `cut` only the part that it makes of the whole."""
        if cut is None:
            self._write(view)
            return
        whole = torch.empty(self.shape, dtype=view.dtype, device=view.device)
        self._write(whole)
        view.copy_(cut(whole))

    def _write(self, into: torch.Tensor) -> None:
        flat = into.view(-1)
        for begin in range(0, flat.numel(), CHUNK_NUMBERS):
            part = flat[begin : begin + CHUNK_NUMBERS]
            numbers = torch.arange(begin, begin + part.numel(), dtype=torch.int64, device=into.device).to(torch.int32)
            part.copy_(_mixed(numbers.add_(self.seed)).to(torch.float32).mul_(self.spread / _LARGEST).add_(self.mean))


def random_tensor(name: str, like: torch.Tensor, *, mean: float, spread: float) -> RandomTensor:
    """Return a description of random contents in the dtype and shape of `like`; the seed comes from the name. No numbers are made."""
    seed = zlib.crc32(name.encode()) & 0x7FFFFFFF
    return RandomTensor(seed, like.dtype, like.shape, mean, spread)


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Scramble 32-bit integers in place so that neighbours have nothing in common: three shifts and two odd factors."""
    for shift, factor in ((16, 0x7FEB352D), (15, -0x7B935975), (16, 1)):
        # Torch shifts the sign in; the mask takes it out again.
        numbers.bitwise_xor_(numbers.bitwise_right_shift(shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(factor)
    return numbers
