# SPDX-License-Identifier: Apache-2.0
"""An adapter in host memory, laid out as it lies in the slot bank: being written into a slot is a copy for each run of columns."""

from typing import NamedTuple

import torch

from diffusion_worker.lora.layers import LoRALayer
from diffusion_worker.lora.slot_bank import ColumnRun


class HostAdapter(NamedTuple):
    """An adapter ready to be written into a slot. Layers that it does not name take no memory.

    `kept` are the bytes that the runs lie in.
    """

    components: frozenset[str]
    rank: int
    runs: tuple[ColumnRun, ...]
    parts: tuple[tuple[LoRALayer, int], ...]
    kept: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Host memory that its factors take."""
        return sum(run.values.nbytes for run in self.runs)
