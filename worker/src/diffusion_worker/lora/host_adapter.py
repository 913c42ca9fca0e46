# SPDX-License-Identifier: Apache-2.0
"""An adapter in host memory, laid out as it lies in the slot bank: being written into a slot is a copy for each run of columns."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from diffusion_worker.lora.layers import LoRALayer
from diffusion_worker.lora.slot_bank import Columns, Run, Scaling, Segment


class Bound(NamedTuple):
    """Factors for one part of a wrapped layer: `a` [rank, in], `b` [out, rank], in the dtype of their file."""

    layer: LoRALayer
    part: int
    segment: Segment
    columns: Columns
    a: torch.Tensor
    b: torch.Tensor
    scaling: float


class HostAdapter(NamedTuple):
    """An adapter ready to be written into a slot. Layers that it does not name take no memory."""

    components: frozenset[str]
    rank: int
    runs: tuple[Run, ...]
    parts: tuple[tuple[LoRALayer, int], ...]

    @property
    def nbytes(self) -> int:
        """Host memory that it takes."""
        return sum(run.values.nbytes for run in self.runs)


class _Block(NamedTuple):
    """What is to be in some columns: [rank, columns]."""

    segment: Segment
    start: int
    values: torch.Tensor
    scaling: float

    @property
    def stop(self) -> int:
        return self.start + self.values.shape[1]


def lay_out(bound: Sequence[Bound], components: frozenset[str]) -> HostAdapter:
    """Copy the factors of an adapter into runs."""
    blocks = [_Block(each.segment, each.columns.a.start, each.a, 1.0) for each in bound]
    blocks += [_Block(each.segment, each.columns.b.start, each.b.t(), each.scaling) for each in bound]
    blocks.sort(key=lambda block: (id(block.segment), block.start))
    runs: list[list[_Block]] = []
    for block in blocks:
        if runs and _continues(runs[-1][-1], block):
            runs[-1].append(block)
        else:
            runs.append([block])
    rank = max(each.a.shape[0] for each in bound)
    return HostAdapter(components, rank, tuple(map(_run, runs)), tuple((each.layer, each.part) for each in bound))


def _continues(before: _Block, block: _Block) -> bool:
    same = before.segment is block.segment and before.stop == block.start
    return same and before.values.shape[0] == block.values.shape[0] and before.values.dtype == block.values.dtype


@torch.inference_mode(False)
def _run(blocks: list[_Block]) -> Run:
    first = blocks[0]
    values = torch.empty(first.values.shape[0], blocks[-1].stop - first.start, dtype=first.values.dtype)
    for block in blocks:
        values[:, block.start - first.start : block.stop - first.start].copy_(block.values)
    scalings = []
    for factor, group in itertools.groupby(blocks, key=lambda block: block.scaling):
        if factor != 1.0:
            alike = list(group)
            scalings.append(Scaling(alike[0].start - first.start, alike[-1].stop - first.start, factor))
    return Run(first.segment, first.start, values, tuple(scalings))
