# SPDX-License-Identifier: Apache-2.0
"""The rows of the slot bank that each row of a call uses, and their strengths.

An adapter of rank r is r rows of the bank, and several adapters are the rows of all. So each row of a call has a list of bank
rows with a strength for each. All lists of a call have one length.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

# Length of lists in compiled code, or a multiple: torch compiles lengths of 0 and 1 separately, and kernels are fast at multiples of 8.
COMPILED_MULTIPLE = 8


class SlotUse(NamedTuple):
    """The use of an adapter by a row of a call: the slot that it is in, and its strength."""

    slot: int
    scale: float


Uses = Sequence[Sequence[SlotUse]]


class RowsNotSeparable(ValueError):
    """Raised when rows of one call use different adapters, and a layer that these change cannot tell the rows apart.

    The caller then makes a separate call for each group of rows with the same adapters.
    """


class BankLayout(NamedTuple):
    """The layout of a slot bank: the rank of the adapter in each slot, the largest rank of a slot, and the bank's device."""

    ranks: list[int]
    max_rank: int
    device: torch.device

    def rows(self, use: SlotUse) -> range:
        """Return the numbers of the bank rows that the adapter in the slot of `use` fills; empty for an empty slot."""
        return range(use.slot * self.max_rank, use.slot * self.max_rank + self.ranks[use.slot])


class _Lists(NamedTuple):
    """Bank rows and their strengths: the lists of all `rows` of a call one after the other, each of the same `length`."""

    places: list[int]
    scales: list[float]
    rows: int
    length: int

    def scales_on(self, device: torch.device) -> torch.Tensor:
        return _sent(self.scales, torch.float32, device).view(self.rows, self.length)

    def index_on(self, device: torch.device) -> torch.Tensor:
        return _sent(self.places, torch.long, device)


class RowAdapters:
    """The adapters of the rows of one call, which are `total` rows.

    With `shared` all rows use the same adapters at the same strengths, and there is one list of bank rows. Otherwise each of
    `rows`, the rows that use adapters (None: all of them), has a list. `mask` has a bit for each slot in use.
    """

    def __init__(self, uses: Uses, layout: BankLayout) -> None:
        # Sorted, so that rows with the same adapters are equal.
        used = [tuple(sorted(use for use in row if use.scale and layout.ranks[use.slot])) for row in uses]
        self.total = len(used)
        self.mask = sum(1 << slot for slot in {use.slot for row in used for use in row})
        self.shared = len(set(used)) == 1
        active = [number for number, row in enumerate(used) if row]
        self.rows = None if self.shared or len(active) == self.total else _positions(active, layout.device)
        lists = _lists(used[:1] if self.shared else [used[number] for number in active], layout)
        self.count, self.length = lists.rows, lists.length
        # The bank rows of a single adapter are adjacent, so they need not be gathered.
        alone = self.shared and len(used[0]) == 1
        self.index = slice(lists.places[0], lists.places[-1] + 1) if alone else lists.index_on(layout.device)
        plain = lists.scales.count(1.0) == len(lists.scales)
        self._scales: dict[torch.dtype, torch.Tensor] | None = None if plain else {torch.float32: lists.scales_on(layout.device)}

    def scales(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the strengths as [lists, length] in a dtype; None if all are 1."""
        if self._scales is not None and dtype not in self._scales:
            self._scales[dtype] = self._scales[torch.float32].to(dtype)
        return None if self._scales is None else self._scales[dtype]


class CompiledRows:
    """The adapters of the rows of one call in compiled code, for which calls differ only in the number of rows and the lists' length.

    A row without adapters has strengths of zero: its update is computed too, and is zero.
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
    """The holder of the running call's adapters, shared by all layers of a model and of its copies."""

    def __init__(self) -> None:
        self.current: RowAdapters | None = None
        self.compiled: CompiledRows | None = None
        # Layers, by name, that were found not to see the rows of a call.
        self.folding: dict[str, Any] = {}

    def __deepcopy__(self, memo: object) -> "RowAdaptersHolder":
        return self


def _lists(uses: Uses, layout: BankLayout, *, multiple: int = 1) -> _Lists:
    """Return a list of bank rows for each row of a call, padded to one length, a multiple of `multiple`.

    Padding has strengths of zero.
    """
    most = max((sum(layout.ranks[use.slot] for use in row) for row in uses), default=0)
    length = max(multiple, -(-most // multiple) * multiple) if multiple > 1 else most
    index: list[int] = []
    scales: list[float] = []
    for number, row in enumerate(uses):
        for use in row:
            index += layout.rows(use)
            scales += [use.scale] * layout.ranks[use.slot]
        missing = (number + 1) * length - len(index)
        # Padding repeats a bank row of the row's own adapters, if it has any, so that no value of another adapter is used.
        index += [index[-1] if length > missing else 0] * missing
        scales += [0.0] * missing
    return _Lists(index, scales, len(uses), length)


def _positions(rows: list[int], device: torch.device) -> torch.Tensor | slice:
    """Return an index of these rows of a call: a slice if they are adjacent, so that nothing is gathered."""
    if rows and rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return _sent(rows, torch.long, device)


def _sent(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make a tensor on a device; an accelerator gets it from pinned memory, so that nothing waits for the copy."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
