# SPDX-License-Identifier: Apache-2.0
"""An adapter in host memory, laid out as it lies in the slot bank: being written into a slot is a copy for each run of columns."""

import itertools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch

from diffusion_worker.lora.layers import LoRALayer
from diffusion_worker.lora.slot_bank import ColumnRun, Columns, Scaling, Segment


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
    runs: tuple[ColumnRun, ...]
    parts: tuple[tuple[LoRALayer, int], ...]

    @property
    def nbytes(self) -> int:
        """Host memory that it takes."""
        return sum(run.values.nbytes for run in self.runs)


class _Block(NamedTuple):
    """What is to be in some columns: an A [rank, columns] or a B [columns, rank]. Sorted by where it is, so those fields come first."""

    segment: int
    start: int
    stop: int
    rank: int
    scaling: float
    is_b: bool
    values: torch.Tensor


def lay_out(bound: Sequence[Bound], components: frozenset[str]) -> HostAdapter:
    """Copy the factors of an adapter into runs."""
    segments = {id(each.segment): each.segment for each in bound}
    blocks = []
    for _, _, segment, columns, a, b, scaling in bound:
        rank = a.shape[0]
        blocks.append(_Block(id(segment), columns.a.start, columns.a.stop, rank, 1.0, False, a))
        blocks.append(_Block(id(segment), columns.b.start, columns.b.stop, rank, scaling, True, b))
    blocks.sort(key=_PLACE)
    cuts = [0, *(number for number in range(1, len(blocks)) if not _continues(blocks[number - 1], blocks[number])), len(blocks)]
    runs = [_run(segments[blocks[start].segment], blocks[start:stop]) for start, stop in itertools.pairwise(cuts)]
    rank = max(block.rank for block in blocks)
    return HostAdapter(components, rank, tuple(runs), tuple((each.layer, each.part) for each in bound))


_PLACE = operator.itemgetter(0, 1)


def _continues(before: _Block, block: _Block) -> bool:
    side_by_side = before.stop == block.start and before.segment == block.segment and before.rank == block.rank
    return side_by_side and before.is_b is block.is_b and before.values.dtype is block.values.dtype


@torch.inference_mode(False)
def _run(segment: Segment, blocks: list[_Block]) -> ColumnRun:
    # Also of a single one it is a copy. Turning all at once takes less than each by itself.
    values = torch.cat([block.values for block in blocks], dim=0 if blocks[0].is_b else 1)
    if blocks[0].is_b:
        values = values.t().contiguous()
    first = blocks[0].start
    scalings = []
    for factor, group in itertools.groupby(blocks, key=operator.attrgetter("scaling")):
        if factor != 1.0:
            alike = list(group)
            scalings.append(Scaling(alike[0].start - first, alike[-1].stop - first, factor))
    return ColumnRun(segment, first, values, tuple(scalings))
