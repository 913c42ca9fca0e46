# SPDX-License-Identifier: Apache-2.0
"""An adapter in host memory, laid out as in the slot bank: writing it into a slot takes one copy for each run of columns."""

from typing import NamedTuple

import torch

from diffusion_worker.lora.layers import LoRALayer
from diffusion_worker.lora.slot_bank import ColumnRun


class HostAdapter(NamedTuple):
    """The factors of an adapter in host memory, laid out as a slot has them.

    `parts` lists the parts of layers that it changes; no others take memory. The values of all `runs` are views of `kept`, a flat buffer of
    bytes. `rank` is the number of rows that it takes in a slot.
    """

    components: frozenset[str]
    rank: int
    runs: tuple[ColumnRun, ...]
    parts: tuple[tuple[LoRALayer, int], ...]
    kept: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of its factors in host memory."""
        return sum(run.values.nbytes for run in self.runs)
