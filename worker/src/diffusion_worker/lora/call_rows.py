# SPDX-License-Identifier: Apache-2.0
"""Which rows of a call use which rows of the slot bank, and how strongly.

An adapter of rank r is r rows of the bank, so several adapters of one row of a call are simply more of them: each row has a
list of bank rows with a strength for each, and all lists of a call have one length.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

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

    def rows(self, use: SlotUse) -> range:
        """The bank rows of an adapter."""
        return range(use.slot * self.max_rank, use.slot * self.max_rank + self.ranks[use.slot])


class _Lists(NamedTuple):
    """Bank rows and their strengths, the lists of all rows of a call one after the other; all of them have one length."""

    places: list[int]
    scales: list[float]
    rows: int
    length: int

    def scales_on(self, device: torch.device) -> torch.Tensor:
        return torch.tensor(self.scales, dtype=torch.float32, device=device).view(self.rows, self.length)

    def index_on(self, device: torch.device) -> torch.Tensor:
        return torch.tensor(self.places, dtype=torch.long, device=device)


class RowAdapters:
    """The adapters of the rows of one call, of which `total` are about to run.

    With `shared` all rows use the same ones at the same strengths, and there is one list of bank rows. Otherwise there is one
    for each of `rows`, those that use some (None: all of them). `mask` has a bit for each slot in use.
    """

    def __init__(self, uses: Uses, layout: BankLayout) -> None:
        # In one order: what is the same is then seen to be.
        used = [tuple(sorted(use for use in row if use.scale and layout.ranks[use.slot])) for row in uses]
        self.total = len(used)
        self.mask = sum(1 << slot for slot in {use.slot for row in used for use in row})
        self.shared = len(set(used)) == 1
        active = [number for number, row in enumerate(used) if row]
        self.rows = None if self.shared or len(active) == self.total else _positions(active, layout.device)
        lists = _lists(used[:1] if self.shared else [used[number] for number in active], layout)
        self.count, self.length = lists.rows, lists.length
        # Side by side they need not be gathered.
        alone = self.shared and len(used[0]) == 1
        self.index = slice(lists.places[0], lists.places[-1] + 1) if alone else lists.index_on(layout.device)
        plain = lists.scales.count(1.0) == len(lists.scales)
        self._scales: dict[torch.dtype, torch.Tensor] | None = None if plain else {torch.float32: lists.scales_on(layout.device)}

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
        self.index = lists.index_on(layout.device).view(lists.rows, lists.length)
        self.scales = lists.scales_on(layout.device)
        for tensor in (self.index, self.scales):
            torch._dynamo.maybe_mark_dynamic(tensor, 1)
            if lists.rows > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)


class RowAdaptersHolder:
    """The one place where all layers of a model look up the rows of the running call; copies of a model look here too."""

    def __init__(self) -> None:
        self.current: RowAdapters | None = None
        self.compiled: CompiledRows | None = None
        # By name: the layers that were found not to see the rows of a call.
        self.folding: dict[str, Any] = {}

    def __deepcopy__(self, memo: object) -> "RowAdaptersHolder":
        return self


def _lists(uses: Uses, layout: BankLayout, *, multiple: int = 1) -> _Lists:
    """The lists of each row, filled up to one length by what counts for nothing."""
    most = max((sum(layout.ranks[use.slot] for use in row) for row in uses), default=0)
    length = max(multiple, -(-most // multiple) * multiple) if multiple > 1 else most
    index: list[int] = []
    scales: list[float] = []
    for number, row in enumerate(uses):
        for use in row:
            index += layout.rows(use)
            scales += [use.scale] * layout.ranks[use.slot]
        missing = (number + 1) * length - len(index)
        # By a row's own, where it has any: whatever another adapter holds then stays out of it.
        index += [index[-1] if length > missing else 0] * missing
        scales += [0.0] * missing
    return _Lists(index, scales, len(uses), length)


def _positions(rows: list[int], device: torch.device) -> torch.Tensor | slice:
    """A slice where they lie side by side: then nothing is gathered."""
    if rows and rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, dtype=torch.long, device=device)
