# SPDX-License-Identifier: Apache-2.0
"""Which rows of a call use which rows of the slot bank, and how strongly.

An adapter of rank r is r rows of the bank, so several adapters of one row of a call are simply more of them: each row has a
list of bank rows with a strength for each, and all lists of a call have one length.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

# In compiled code lists have a multiple of this: torch makes code of its own for lengths of 0 and 1, kernels like 8.
COMPILED_MULTIPLE = 8


class SlotUse(NamedTuple):
    """One adapter of a row: the slot it is in and how strongly it is applied."""

    slot: int
    scale: float


Uses = Sequence[Sequence[SlotUse]]


class RowsCannotBeToldApart(ValueError):
    """Raised when rows of one call use other adapters and a layer that these name does not see those rows: make a call for each."""


class BankLayout(NamedTuple):
    """How the slots lie in a bank: the rank of the adapter in each, the bank's largest, and where the bank is."""

    ranks: list[int]
    max_rank: int
    device: torch.device

    def rows(self, use: SlotUse) -> Iterator[int]:
        """The bank rows of an adapter."""
        return iter(range(use.slot * self.max_rank, use.slot * self.max_rank + self.ranks[use.slot]))


class RowAdapters:
    """The adapters of the rows of one call, of which `total` are about to run.

    With `shared` all rows use the same ones at the same strengths, and there is one list of bank rows. Otherwise there is one
    for each of `rows`, those that use some (None: all of them). `mask` has a bit for each slot in use.
    """

    def __init__(self, uses: Uses, layout: BankLayout) -> None:
        used = [tuple(use for use in row if use.scale and layout.ranks[use.slot]) for row in uses]
        self.total = len(used)
        self.mask = sum(1 << slot for slot in {use.slot for row in used for use in row})
        self.shared = len(set(used)) == 1
        active = [number for number, row in enumerate(used) if row]
        self.rows = None if self.shared or len(active) == self.total else _positions(active, layout.device)
        lists = _lists(used[:1] if self.shared else [used[number] for number in active], layout, multiple=1)
        self.count, self.length = len(lists), len(lists[0]) if lists else 0
        index = [place for row in lists for place, _ in row]
        scales = torch.tensor([[scale for _, scale in row] for row in lists], dtype=torch.float32, device=layout.device)
        # Side by side they need not be gathered.
        alone = self.shared and len(used[0]) == 1
        self.index = slice(index[0], index[-1] + 1) if alone else torch.tensor(index, dtype=torch.long, device=layout.device)
        plain = all(scale == 1.0 for row in lists for _, scale in row)
        self._scales: dict[torch.dtype, torch.Tensor] | None = None if plain else {torch.float32: scales}

    def scales(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Strengths as [lists, length]; None where all are 1."""
        if self._scales is not None and dtype not in self._scales:
            self._scales[dtype] = self._scales[torch.float32].to(dtype)
        return None if self._scales is None else self._scales[dtype]


class CompiledRows:
    """The same for compiled code, in which nothing but the number of rows and the length of their lists differs from call to call.

    A row that uses nothing has strengths of zero: what it adds is then computed too, and is zero.
    """

    def __init__(self, uses: Uses, layout: BankLayout) -> None:
        lists = _lists(uses, layout, multiple=COMPILED_MULTIPLE)
        self.index = torch.tensor([[place for place, _ in row] for row in lists], dtype=torch.long, device=layout.device)
        self.scales = torch.tensor([[scale for _, scale in row] for row in lists], dtype=torch.float32, device=layout.device)
        for tensor in (self.index, self.scales):
            torch._dynamo.maybe_mark_dynamic(tensor, 1)
            if len(lists) > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)


class RowAdaptersHolder:
    """The one place where all layers of a model look up the rows of the running call; copies of a model look here too."""

    def __init__(self) -> None:
        self.current: RowAdapters | None = None
        self.compiled: CompiledRows | None = None

    def __deepcopy__(self, memo: object) -> "RowAdaptersHolder":
        return self


def _lists(uses: Uses, layout: BankLayout, *, multiple: int) -> list[list[tuple[int, float]]]:
    """Bank rows and their strengths for each row, filled up to one length by what counts for nothing."""
    lists = [[(place, use.scale) for use in row for place in layout.rows(use)] for row in uses]
    length = max(map(len, lists), default=0)
    length = max(multiple, -(-length // multiple) * multiple) if multiple > 1 else length
    # By a row's own, where it has any: whatever another adapter holds then stays out of it.
    return [row + [(row[0][0] if row else 0, 0.0)] * (length - len(row)) for row in lists]


def _positions(rows: list[int], device: torch.device) -> torch.Tensor | slice:
    """A slice where they lie side by side: then nothing is gathered."""
    if rows and rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, dtype=torch.long, device=device)
