# SPDX-License-Identifier: Apache-2.0
"""An adapter laid out in one run of bytes: its factors side by side in matrices [rank, columns], in the order of the slot bank.

The process of a load writes it, and a rank uses it where it lies. Columns that are adjacent here and in the bank are one copy.
The layout does not depend on the layers that have slots at the time.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import torch

from diffusion_worker.lora.host_adapter import HostAdapter
from diffusion_worker.lora.layers import LoRALayer
from diffusion_worker.lora.loads.model_table import dtype_named, name_of
from diffusion_worker.lora.model_layers import ModelLayer
from diffusion_worker.lora.slot_bank import ColumnRun, Columns, Scaling, Segment, fits

# Matrices begin at multiples of this.
ALIGNMENT = 64


class Bound(msgspec.Struct, frozen=True, gc=False):
    """Factors for one part of a layer, as a rank has it: `a` [rank, in], `b` [out, rank], in the dtype of their file.

    `name` is the adapter's name for the module.
    """

    name: str
    layer: ModelLayer
    part: int
    a: torch.Tensor
    b: torch.Tensor
    scaling: float


class Matrix(msgspec.Struct, frozen=True, array_like=True):
    """A matrix [rank, columns] of A factors only, or of transposed B factors only; it begins at byte `offset` of the buffer."""

    dtype: str
    rank: int
    columns: int
    offset: int
    is_b: bool


class Block(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The next `width` columns of the matrix with number `matrix`, which are for the part with number `part` of a layer."""

    layer: str
    part: int
    matrix: int
    width: int
    scaling: float


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """The layout of a whole adapter; blocks are in the order of their matrices, and side by side in them."""

    components: list[str]
    rank: int
    matrices: list[Matrix]
    blocks: list[Block]
    nbytes: int


# The layer as a rank wrapped it, its segment, and the columns of each of its parts.
Place = Callable[[str], tuple[LoRALayer, Segment, Sequence[Columns]]]


class _Kind(NamedTuple):
    """The factors that share a matrix: of layers of one dtype, in one dtype, of one rank, and all A or all B."""

    bank: str
    dtype: str
    rank: int
    is_b: bool

    def of(self, each: Bound) -> torch.Tensor:
        return each.b if self.is_b else each.a


class LaidOut:
    """An adapter with its layout, ready to be written into a buffer of `layout.nbytes` bytes."""

    def __init__(self, bound: Sequence[Bound], components: frozenset[str]) -> None:
        alike: dict[tuple[torch.dtype, torch.dtype, torch.dtype, int], list[Bound]] = {}
        for each in sorted(bound, key=lambda each: (each.layer.order, each.part)):
            alike.setdefault((each.layer.dtype, each.a.dtype, each.b.dtype, each.a.shape[0]), []).append(each)
        groups: dict[_Kind, list[Bound]] = {}
        for (bank, of_a, of_b, rank), group in alike.items():
            groups.setdefault(_Kind(name_of(bank), name_of(of_a), rank, False), []).extend(group)
            groups.setdefault(_Kind(name_of(bank), name_of(of_b), rank, True), []).extend(group)
        self._groups = sorted(groups.items())
        matrices, blocks, end = [], [], 0
        for number, (kind, group) in enumerate(self._groups):
            widths = [kind.of(each).shape[0 if kind.is_b else 1] for each in group]
            matrices.append(Matrix(kind.dtype, kind.rank, sum(widths), end, kind.is_b))
            size = kind.rank * sum(widths) * dtype_named(kind.dtype).itemsize
            end += -(-size // ALIGNMENT) * ALIGNMENT
            for each, width in zip(group, widths, strict=True):
                blocks.append(Block(each.layer.name, each.part, number, width, each.scaling if kind.is_b else 1.0))
        self.layout = Layout(sorted(components), max(matrix.rank for matrix in matrices), matrices, blocks, end)

    @torch.inference_mode(False)
    @torch.no_grad()
    def write(self, buffer: torch.Tensor) -> Bound | None:
        """Write the whole adapter into `buffer`, and return the first factors that are not finite in a slot's dtype; None if all are.

        `buffer` has `layout.nbytes` bytes. Those between matrices become zeros, because they count in the checksum.
        """
        wrong = None
        for matrix, view, (kind, group) in zip(self.layout.matrices, _views(self.layout, buffer), self._groups, strict=True):
            end = matrix.offset + view.nbytes
            buffer[end : -(-end // ALIGNMENT) * ALIGNMENT].zero_()
            # Transposing all at once takes less time than each by itself.
            if kind.is_b:
                view.copy_(torch.cat([each.b for each in group]).t())
            else:
                torch.cat([each.a for each in group], dim=1, out=view)
            largest = max([1.0, *(abs(each.scaling) for each in group if kind.is_b)])
            if wrong is None and not fits(view, largest, group[0].layer.dtype):
                wrong = next((each for each in group if not _fits(each, kind)), None)
        return wrong


def _fits(each: Bound, kind: _Kind) -> bool:
    return fits(kind.of(each), each.scaling if kind.is_b else 1.0, each.layer.dtype)


def _views(layout: Layout, buffer: torch.Tensor) -> list[torch.Tensor]:
    found = []
    for matrix in layout.matrices:
        dtype = dtype_named(matrix.dtype)
        size = matrix.rank * matrix.columns * dtype.itemsize
        found.append(buffer[matrix.offset : matrix.offset + size].view(dtype).view(matrix.rank, matrix.columns))
    return found


class _Run:
    """Blocks that are side by side in their matrix and in a segment."""

    def __init__(self, matrix: int, at: int, segment: Segment, start: int) -> None:
        self.matrix, self.at, self.segment, self.start = matrix, at, segment, start
        self.width = 0
        self.scalings: list[Scaling] = []

    def continues(self, matrix: int, segment: Segment, start: int) -> bool:
        return self.matrix == matrix and self.segment is segment and self.start + self.width == start

    def add(self, width: int, factor: float) -> None:
        begin, self.width = self.width, self.width + width
        if factor == 1.0:
            return
        last = self.scalings[-1] if self.scalings else None
        if last is not None and (last.stop, last.factor) == (begin, factor):
            self.scalings[-1] = Scaling(last.start, self.width, factor)
        else:
            self.scalings.append(Scaling(begin, self.width, factor))


@torch.inference_mode(False)
def open_layout(layout: Layout, buffer: torch.Tensor, place: Place) -> HostAdapter:
    """Return an adapter whose factors are views of the buffer. `place` finds a layer, its segment and its columns by name.

    Raises:
        ValueError: a block does not have the columns of its layer's part.
    """
    views, runs, parts = _views(layout, buffer), list[_Run](), dict[tuple[int, int], tuple[LoRALayer, int]]()
    matrix, at = -1, 0
    for block in layout.blocks:
        if block.matrix != matrix:
            matrix, at = block.matrix, 0
        layer, segment, columns = place(block.layer)
        target = columns[block.part].b if layout.matrices[matrix].is_b else columns[block.part].a
        if target.stop - target.start != block.width:
            raise ValueError(f"layer {block.layer}: expected {target.stop - target.start} columns, found {block.width}")
        if not runs or not runs[-1].continues(matrix, segment, target.start):
            runs.append(_Run(matrix, at, segment, target.start))
        runs[-1].add(block.width, block.scaling)
        parts[id(layer), block.part] = layer, block.part
        at += block.width
    found = tuple(ColumnRun(run.segment, run.start, views[run.matrix][:, run.at : run.at + run.width], tuple(run.scalings)) for run in runs)
    return HostAdapter(frozenset(layout.components), layout.rank, found, tuple(parts.values()), buffer)
