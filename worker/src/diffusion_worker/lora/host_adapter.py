# SPDX-License-Identifier: Apache-2.0
"""An adapter in host memory, laid out as in the slot bank: writing it into a slot takes one copy for each run of columns."""

from typing import NamedTuple

import torch

from diffusion_worker.lora.layers import LoRALayer
from diffusion_worker.lora.slot_bank import ColumnRun


class HostAdapter(NamedTuple):
    """An adapter ready to be written into a slot. Layers that it does not name take no memory.

    `kept` is the buffer of bytes that holds the values of all runs.
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
