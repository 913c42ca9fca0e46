# SPDX-License-Identifier: Apache-2.0
"""A layer with slots for adapters: each row of a call uses its own adapters, or none.

The factors of adapters are in a slot bank (`slot_bank.py`), allocated once: loading and removing an adapter only writes into it.
Rows without an adapter get the base layer's result unchanged. So do all rows in a layer that no adapter of the call changes.

In a compiled model each row has a list of bank rows. So calls differ only in the number of rows and the length of the lists.
The update of a row without an adapter is then computed too, and is zero.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from diffusion_worker.lora.call_rows import CompiledRows, RowAdapters, RowAdaptersHolder, RowsNotSeparable
from diffusion_worker.lora.loads.model_table import PartCut

EXPERTS = ".experts."


@dataclass(frozen=True)
class LinearPart:
    """The cut of an adapter's factors for a layer of which this rank has a part, and the sum of `A x` that the cut requires.

    A layer cut by its outputs needs the same rows of B. A layer cut by its inputs needs the same columns of A. Then `add_up` sums
    `A x` over the ranks, as the base layer sums its own result.
    """

    cut: PartCut
    add_up: Callable[[torch.Tensor], torch.Tensor]


class BankPart:
    """The bank's memory for one part of a layer: `a` [slots x largest rank, in], `b` [slots x largest rank, out].

    `outputs` are the outputs of the layer that this part computes; a fused layer has several parts. `named` has a bit for each
    slot whose adapter changes the part. Copies of a model share it.
    """

    def __init__(self, a: torch.Tensor, b: torch.Tensor, outputs: slice, add_up: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        self.a = a
        self.b = b
        self.outputs = outputs
        self.add_up = add_up
        self.named = 0

    def __deepcopy__(self, memo: object) -> "BankPart":
        return self


class LoRALayer(nn.Module):
    """A wrapped layer: base(x) plus, for the rows that ask for it, scale * B A x of their slots.

    Some layers do not see the rows of a call: an expert of a mixture sees tokens. Such a layer is in the holder's `folding`, at the
    latest after it ran. Compiled code cannot add it there, and sets `folds` instead.
    """

    def __init__(self, base: nn.Module, holder: RowAdaptersHolder, parts: tuple[BankPart, ...], *, name: str) -> None:
        super().__init__()
        self.base = base
        self.parts = parts
        self.name = name
        self.folds = False
        self._holder = holder
        if EXPERTS in name:
            holder.folding[name] = self

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that only the wrapped layer has, because pipelines read those (`weight.dtype`, `in_features`).

        Raises:
            AttributeError: neither layer has it.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def named_by(self, mask: int) -> bool:
        """Return whether an adapter in a slot of `mask`, which has a bit for each slot, changes this layer."""
        return any(part.named & mask for part in self.parts)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = self.base(x, *args, **kwargs)
        if torch.compiler.is_compiling():
            compiled = self._holder.compiled
            return out if compiled is None else self._add_compiled(x, out, compiled)
        call = self._holder.current
        if call is None or not self.named_by(call.mask):
            return out
        return self._add(x, out, call)

    def _add(self, x: torch.Tensor, out: torch.Tensor, call: RowAdapters) -> torch.Tensor:
        if x.shape[0] not in (1, call.total):
            self._holder.folding[self.name] = self
        if x.shape[0] != call.total and not call.shared:
            raise RowsNotSeparable(
                f"layer {self.name}: expected a batch of {call.total} rows, found {x.shape[0]}: adapters of rows cannot be kept apart"
            )
        out = out if out.is_contiguous() or call.shared else out.contiguous()
        mine, target = x, out
        if call.rows is not None:
            mine, target = _rows_of(x, call.rows), _rows_of(out, call.rows)
        for part in self.parts:
            if part.named & call.mask:
                a, b = _take(part.a, call, mine.dtype), _take(part.b, call, out.dtype)
                add = self._add_shared if call.shared else self._add_each
                target = add(mine, target, part, a, b, call.scales(out.dtype))
        if isinstance(call.rows, torch.Tensor):
            return out.index_copy_(0, call.rows, target)
        return target if call.rows is None else out

    def _add_compiled(self, x: torch.Tensor, out: torch.Tensor, call: CompiledRows) -> torch.Tensor:
        rows, length = call.index.shape
        shared = x.shape[0] != rows
        if shared:
            # The result is right only if all rows use the same adapters. The mark makes `AdapterLayers.rows` refuse it otherwise.
            self.folds = True
        index = call.index[0] if shared else call.index.reshape(-1)
        scales = (call.scales[:1] if shared else call.scales).to(out.dtype)
        for part in self.parts:
            a, b = part.a.index_select(0, index).to(x.dtype), part.b.index_select(0, index).to(out.dtype)
            if shared:
                out = self._add_shared(x, out, part, a, b, scales)
            else:
                out = self._add_each(x, out.contiguous(), part, a.view(rows, length, -1), b.view(rows, length, -1), scales)
        return out

    def _add_shared(
        self, x: torch.Tensor, out: torch.Tensor, part: BankPart, a: torch.Tensor, b: torch.Tensor, scales: torch.Tensor | None
    ) -> torch.Tensor:
        """Add to `out` the update of input `x` by factors that all rows share; return `out`, or a contiguous copy with the update.

        `a` and `b` are [length, columns]. `scales` is [1, length], or None for strengths of 1.
        """
        raise NotImplementedError

    def _add_each(
        self, x: torch.Tensor, out: torch.Tensor, part: BankPart, a: torch.Tensor, b: torch.Tensor, scales: torch.Tensor | None
    ) -> torch.Tensor:
        """Add each row's own update to `out`, which is contiguous, and return it: a [rows, length, in], b [rows, length, out]."""
        raise NotImplementedError


class LoRALinear(LoRALayer):
    """A wrapped `nn.Linear`, or a layer that computes like one."""

    def _add_shared(
        self, x: torch.Tensor, out: torch.Tensor, part: BankPart, a: torch.Tensor, b: torch.Tensor, scales: torch.Tensor | None
    ) -> torch.Tensor:
        low = scaled(_summed(functional.linear(x, a), part).to(out.dtype), scales)
        if not out.is_contiguous():
            out = out.contiguous()
        out.view(-1, out.shape[-1])[:, part.outputs].addmm_(low.reshape(-1, low.shape[-1]), b)
        return out

    def _add_each(
        self, x: torch.Tensor, out: torch.Tensor, part: BankPart, a: torch.Tensor, b: torch.Tensor, scales: torch.Tensor | None
    ) -> torch.Tensor:
        low = _summed(torch.bmm(_tokens(x), a.transpose(1, 2)), part).to(out.dtype)
        low = scaled(low, None if scales is None else scales.unsqueeze(1))
        _tokens(out)[..., part.outputs].baddbmm_(low, b)
        return out


def scaled(low: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Multiply `low`, the result of factor A, by the strength of each row; None stands for strength 1 everywhere."""
    if scales is None:
        return low
    if torch.compiler.is_compiling():
        # Padding may point at bank rows of any adapter: a value that overflows there, times 0, would be NaN.
        low = torch.where(scales == 0, 0, low)
    return low * scales


def _summed(low: torch.Tensor, part: BankPart) -> torch.Tensor:
    return low if part.add_up is None else part.add_up(low)


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """Reshape to [rows, tokens, features]; a contiguous tensor gives a view."""
    return x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)


def _rows_of(x: torch.Tensor, rows: torch.Tensor | slice) -> torch.Tensor:
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def _take(bank: torch.Tensor, call: RowAdapters, dtype: torch.dtype) -> torch.Tensor:
    """Select the factors of a call's adapters, in `dtype`.

    They are [length, columns] if all rows share them, or a stack of these for the rows that use any.
    """
    taken = bank[call.index] if isinstance(call.index, slice) else bank.index_select(0, call.index)
    taken = taken if taken.dtype == dtype else taken.to(dtype)
    return taken if call.shared else taken.view(call.count, call.length, -1)
