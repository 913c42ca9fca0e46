# SPDX-License-Identifier: Apache-2.0
"""Device memory of adapters: layers that were wrapped together share one buffer [slots, largest rank, columns].

Every part of a layer has columns for its A and, behind the A of all parts, columns for its B, transposed. The rank is a slot's
outer dimension, so an adapter of rank r fills the slot's first r rows. An adapter that changes all layers is written by two
copies; columns that it does not fill are zero. A buffer never moves. While the model sleeps it has no memory, and its slots
are empty.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from diffusion_worker.memory.slabs import Slab, blank, make_slab

# Columns of a part begin at multiples of this, so that the rows of a slot are aligned for the matrix kernels.
ALIGNMENT = 8
# Zeroing or copying a piece of this size takes a few milliseconds at most, even if one thread scales and rounds it.
PIECE_BYTES = 8 << 20
# The first write to a slot takes its pages from the system: 3 ms a MiB on a CPU, in place of 0.1 ms.
FRESH_COST = 8


class Widths(NamedTuple):
    """The number of columns for the A of a layer's part, and for its B."""

    a: int
    b: int


class Columns(NamedTuple):
    """The columns of a part's A and of its B."""

    a: slice
    b: slice


class Scaling(NamedTuple):
    """Columns of a run, counted from its start, that are multiplied when it is written."""

    start: int
    stop: int
    factor: float


class ColumnRun(NamedTuple):
    """Values [rank, columns] to copy into columns of a segment from `start` on, in the file's dtype.

    `scalings` are applied during the copy.
    """

    segment: "Segment"
    start: int
    values: torch.Tensor
    scalings: tuple[Scaling, ...]

    @property
    def span(self) -> "Span":
        """Return the area of a slot that `write` fills: columns from `start`, and as many rows as the rank of the adapter."""
        return Span(self.start, self.start + self.values.shape[1], self.values.shape[0])


class Span(NamedTuple):
    """Columns of a slot, of which the first `rank` rows are filled."""

    start: int
    stop: int
    rank: int


class Segment:
    """The buffer of the layers of one dtype that were wrapped together."""

    @torch.inference_mode(False)
    def __init__(
        self,
        widths: Sequence[Widths],
        *,
        slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        released: bool = False,
    ) -> None:
        """Allocate empty slots; with `released` they have no device memory, and must not be written to, before `restore`."""
        self._slots, self._max_rank = slots, max_rank
        self.columns, self._total = _layout(widths)
        self._dtype = dtype
        self._slab = make_slab(slots * max_rank * self._total * dtype.itemsize, device, released=released)
        self.rows = self.of(slice(0, self._total))
        self._written: list[list[Span]] = [[] for _ in range(slots)]
        # Slots that have taken their pages from the system.
        self._used: set[int] = set()
        if not released:
            self.restore()

    @property
    def slab(self) -> Slab:
        """The memory of all slots."""
        return self._slab

    @property
    def nbytes(self) -> int:
        """Size of the whole buffer in bytes, which stays the same while it has no memory."""
        return self.rows.numel() * self.rows.element_size()

    def release(self) -> None:
        """Free the memory; the content of all slots is lost."""
        self._slab.release()
        self._written = [[] for _ in range(self._slots)]
        self._used.clear()

    def restore(self) -> None:
        """Take memory after `release`, or for the first time, and zero it on an accelerator.

        Raises MemoryError or torch's own error without room.
        """
        self._slab.restore()
        if self._slab.address_range is None:  # the pages of a CPU's are zero, and cost nothing before they are written
            self._slab.bytes.zero_()

    @torch.inference_mode(False)
    def of(self, columns: slice) -> torch.Tensor:
        """Lend a tensor [slots x largest rank, width of `columns`] in the buffer. It stays valid across `release` and `restore`."""
        shape = torch.Size((self._slots * self._max_rank, columns.stop - columns.start))

        def part(slab: torch.Tensor) -> torch.Tensor:
            # A tensor of its own and no view, because the compiler of a layer also inspects the base of a view.
            like = torch.empty(0, dtype=self._dtype, device=slab.device)
            found: torch.Tensor = like.set_(slab.untyped_storage(), columns.start, shape, (self._total, 1))
            return found

        lent = blank(shape, self._dtype)
        self._slab.lend(lent, part)
        return lent

    def of_slot(self, slot: int) -> torch.Tensor:
        """Return a slot's part of the buffer as a view [largest rank, all columns]; an adapter of rank r fills its first r rows."""
        return self.rows[slot * self._max_rank : (slot + 1) * self._max_rank]

    def write(self, slot: int, runs: Sequence[ColumnRun]) -> None:
        """Fill a slot with these runs alone; of its old values only those that are not overwritten are zeroed."""
        for _ in self.write_in_pieces(slot, runs):
            pass

    def write_in_pieces(self, slot: int, runs: Sequence[ColumnRun]) -> Iterator[int]:
        """Fill a slot as `write` does, one piece at each step, and yield the bytes of that piece, weighted by their cost.

        Nothing is written before the first step. The slot holds the runs only after the last step.
        """
        rows = self.of_slot(slot)
        ranks = {(run.span.start, run.span.stop): run.span.rank for run in runs}
        # The cost is the same on all ranks, so that all of them finish in the same tick.
        cost = 1 if slot in self._used else FRESH_COST
        before, self._written[slot] = self._written[slot], [*self._written[slot], *(run.span for run in runs)]
        for span in before:
            yield from _in_pieces(rows[ranks.get((span.start, span.stop), 0) : span.rank, span.start : span.stop], _zero, cost)
        for run in runs:
            span = run.span
            yield from _in_pieces(rows[: span.rank, span.start : span.stop], functools.partial(_copy_part, run), cost)
        self._written[slot] = [run.span for run in runs]
        self._used.add(slot)

    @torch.no_grad()
    def holds(self, slot: int, run: ColumnRun) -> bool:
        """Compare a slot's memory with a scaled and rounded copy of the run; return whether they are equal.

        Rows past its rank are not compared.
        """
        span = run.span
        found = self.of_slot(slot)[: span.rank, span.start : span.stop]
        expected = torch.empty(found.shape, dtype=found.dtype, device=found.device)
        _copy(expected, run)
        return torch.equal(found, expected)


def aligned(width: int) -> int:
    """Return the columns that a part of this width takes, with those that are left empty before the next part."""
    return -(-width // ALIGNMENT) * ALIGNMENT


def _layout(widths: Sequence[Widths]) -> tuple[list[Columns], int]:
    """Return the columns of each part, and the number of columns in all."""
    starts, end = [], 0
    for width in (*(each.a for each in widths), *(each.b for each in widths)):
        starts.append(end)
        end += aligned(width)
    a, b = starts[: len(widths)], starts[len(widths) :]
    columns = [Columns(slice(at, at + each.a), slice(bt, bt + each.b)) for each, at, bt in zip(widths, a, b, strict=True)]
    return columns, end


def fits(values: torch.Tensor, factor: float, dtype: torch.dtype) -> bool:
    """Return whether all values times a factor are finite in a dtype; True without values and for a dtype of whole numbers.

    The product is made in double precision.
    """
    if not values.numel() or not dtype.is_floating_point:
        return True
    largest = max(abs(float(extreme)) for extreme in values.aminmax())
    return largest * abs(factor) <= torch.finfo(dtype).max


def _in_pieces(target: torch.Tensor, act: Callable[[torch.Tensor, int, int], None], cost: int) -> Iterator[int]:
    """Call `act` on each piece of the target, with the numbers of its first row and column, and yield the bytes times `cost`.

    A piece is some whole rows, or a part of a long row. Adjacent bytes touch the fewest pages, and pages of a new slot are costly.
    """
    rows, columns = target.shape
    most = max(1, PIECE_BYTES // cost)
    row_bytes = max(1, columns * target.element_size())
    height = max(1, most // row_bytes)
    width = columns if row_bytes <= most else max(1, most // target.element_size())
    for row in range(0, rows, height):
        for column in range(0, columns, width):
            part = target[row : row + height, column : column + width]
            with torch.no_grad():
                act(part, row, column)
            yield part.numel() * part.element_size() * cost


def _zero(part: torch.Tensor, row: int, column: int) -> None:
    part.zero_()


def _copy_part(run: ColumnRun, part: torch.Tensor, row: int, start: int) -> None:
    """Copy values of a run to `part`, a piece of a slot, and scale them. They begin at this row and column of the run."""
    stop = start + part.shape[1]
    inside = [each for each in run.scalings if each.start < stop and start < each.stop]
    scalings = tuple(Scaling(max(each.start, start) - start, min(each.stop, stop) - start, each.factor) for each in inside)
    values = run.values[row : row + part.shape[0], start:stop]
    _copy(part, ColumnRun(run.segment, run.start + start, values, scalings))


def _copy(target: torch.Tensor, run: ColumnRun) -> None:
    """Copy a run's values to a target of their shape, and scale them; only the result is rounded, to the target's dtype."""
    exact = target.dtype in (run.values.dtype, torch.float32)
    if exact or not run.scalings:
        target.copy_(run.values, non_blocking=True)
        for scaling in run.scalings:
            target[:, scaling.start : scaling.stop].mul_(scaling.factor)
        return
    scaled = run.values.to(torch.float32, copy=True)
    for scaling in run.scalings:
        scaled[:, scaling.start : scaling.stop].mul_(scaling.factor)
    target.copy_(scaled)
