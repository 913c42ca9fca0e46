# SPDX-License-Identifier: Apache-2.0
"""A convolution with slots for adapters: A is a convolution with the layer's own kernel size, B one with a kernel of size 1.

The rows of a call have different kernels, so they are computed as the groups of one convolution.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from diffusion_worker.lora.call_rows import RowAdaptersHolder
from diffusion_worker.lora.layers import BankPart, LoRALayer, scaled

CONVOLVE: dict[type[nn.Module], Callable[..., torch.Tensor]] = {
    nn.Conv1d: functional.conv1d,
    nn.Conv2d: functional.conv2d,
    nn.Conv3d: functional.conv3d,
}


class LoRAConvolution(LoRALayer):
    """A wrapped `nn.Conv1d`, `nn.Conv2d` or `nn.Conv3d` without groups."""

    def __init__(self, base: nn.Module, holder: RowAdaptersHolder, parts: tuple[BankPart, ...], *, name: str) -> None:
        super().__init__(base, holder, parts, name=name)
        self._kernel: tuple[int, ...] = tuple(base.weight.shape[1:])  # type: ignore[index]
        self._convolve = next(function for kind, function in CONVOLVE.items() if isinstance(base, kind))

    def _add_shared(
        self, x: torch.Tensor, out: torch.Tensor, part: BankPart, a: torch.Tensor, b: torch.Tensor, scales: torch.Tensor | None
    ) -> torch.Tensor:
        kernels, points = a.view(-1, *self._kernel), [1] * (len(self._kernel) - 1)
        low = self._convolved(x, kernels, groups=1).to(out.dtype)
        low = scaled(low, None if scales is None else scales.reshape(-1, *points))
        return out.add_(self._convolve(low, b.t().reshape(b.shape[1], b.shape[0], *points)))

    def _add_each(
        self, x: torch.Tensor, out: torch.Tensor, part: BankPart, a: torch.Tensor, b: torch.Tensor, scales: torch.Tensor | None
    ) -> torch.Tensor:
        rows, length = a.shape[:2]
        low = self._convolved(x.reshape(1, -1, *x.shape[2:]), a.view(-1, *self._kernel), groups=rows)
        low = low.reshape(rows, length, -1).to(out.dtype)
        low = scaled(low, None if scales is None else scales.unsqueeze(2))
        return out.add_(torch.bmm(b.transpose(1, 2), low).view(out.shape))

    def _convolved(self, x: torch.Tensor, kernels: torch.Tensor, *, groups: int) -> torch.Tensor:
        """Convolve with the stride, padding and dilation of the base layer, without its bias."""
        base: Any = self.base
        padding = base.padding
        if base.padding_mode != "zeros":
            x, padding = functional.pad(x, base._reversed_padding_repeated_twice, mode=base.padding_mode), 0
        return self._convolve(x, kernels, None, base.stride, padding, base.dilation, groups)
