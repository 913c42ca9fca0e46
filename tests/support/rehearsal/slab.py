# SPDX-License-Identifier: Apache-2.0
"""A slab of the rehearsal's device: weights and slots live in it as in `DeviceSlab`, whose storage a fake tensor does not have."""

from collections.abc import Callable

import torch

from support.rehearsal.fake_tensor import FakeCudaTensor, become

# The bytes of a slab that sleeps: every number of them is no number, so a use of it shows.
POISON = 0xFF


class FakeSlab:
    """A stand-in for `DeviceSlab` in host memory, whose borrowers become fake tensors once it has memory. A release fills its bytes with
    POISON."""

    address_range = None

    def __init__(self, size: int, device: torch.device, *, released: bool = False) -> None:
        self.size = size
        with torch.inference_mode(False):
            self._inner = torch.full((size,), POISON, dtype=torch.uint8)
        self._waiting: list[tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] | None = [] if released else None

    @property
    def bytes(self) -> torch.Tensor:
        return FakeCudaTensor(self._inner)

    def lend(self, tensor: torch.Tensor, part: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self._waiting is None:
            self._lend(tensor, part)
        else:
            self._waiting.append((tensor, part))

    @torch.inference_mode(False)
    def _lend(self, tensor: torch.Tensor, part: Callable[[torch.Tensor], torch.Tensor]) -> None:
        become(tensor, FakeCudaTensor(part(self._inner)))

    def release(self) -> None:
        self._inner.fill_(POISON)

    def restore(self) -> None:
        waiting, self._waiting = self._waiting or [], None
        for tensor, part in waiting:
            self._lend(tensor, part)
