# SPDX-License-Identifier: Apache-2.0
"""A linear layer with slots for adapters: each row of a call uses its own slot, or none.

Slot buffers are allocated once, at the largest rank, and zero padded: loading and removing an adapter only writes into
them. Rows without an adapter get the base layer's result untouched.

In a compiled model each row has a slot, so that calls differ in nothing that is compiled but the number of rows: what a row
without an adapter adds is then computed too, and is zero.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from diffusion_worker.lora.checkpoint import LoRAFactors


@dataclass(frozen=True)
class LinearPart:
    """How the factors of an adapter are cut for a layer of which this rank has a part, and what `A x` still lacks.

    A layer cut by its outputs needs the same rows of B; one cut by its inputs the same columns of A, and the sum of
    `A x` over the ranks, since its base result is summed already.
    """

    cut_a: Callable[[torch.Tensor], torch.Tensor]
    cut_b: Callable[[torch.Tensor], torch.Tensor]
    add_up: Callable[[torch.Tensor], torch.Tensor]


class RowAdapters:
    """Which rows of the call about to run use which slots, and how strongly; `total` rows in all. A row may use several."""

    def __init__(self, uses: Sequence[Sequence[tuple[int, float]]], device: torch.device) -> None:
        chosen = [(row, slot, scale) for row, used in enumerate(uses) for slot, scale in used]
        self.total = len(uses)
        self.rows = torch.tensor([row for row, _, _ in chosen], dtype=torch.long, device=device)
        self.slots = torch.tensor([slot for _, slot, _ in chosen], dtype=torch.long, device=device)
        self.scales = torch.tensor([scale for _, _, scale in chosen], dtype=torch.float32, device=device)


class SlotOfEachRow:
    """The same for a compiled model: a slot for each row, with a strength of zero where it has no adapter."""

    def __init__(self, slots: list[int | None], scales: list[float], device: torch.device) -> None:
        strengths = [0.0 if slot is None else scale for slot, scale in zip(slots, scales, strict=True)]
        self.slots = torch.tensor([slot or 0 for slot in slots], dtype=torch.long, device=device)
        self.scales = torch.tensor(strengths, dtype=torch.float32, device=device)
        if len(slots) > 1:
            for tensor in (self.slots, self.scales):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)


class RowAdaptersHolder:
    """The one place where all layers of a model look up the rows of the running call: one of the two, or none."""

    def __init__(self) -> None:
        self.current: RowAdapters | None = None
        self.static: SlotOfEachRow | None = None


class LoRALinear(nn.Module):
    """A wrapped `nn.Linear`: base(x) plus, for the rows that ask for it, scale * B A x of their slot.

    The slots are on `device`, where it computes. With a `part` the base holds a part of its weight, and so do the slots.
    """

    def __init__(
        self, base: nn.Linear, holder: RowAdaptersHolder, *, slots: int, max_rank: int, device: torch.device, part: LinearPart | None = None
    ) -> None:
        super().__init__()
        self.base = base
        self._holder = holder
        self._part = part
        self._named = False
        # Of four bits only this state knows what the weight looks like; elsewhere the weight does, also where it is a part.
        like = getattr(base.weight, "quant_state", base.weight)
        out_features, in_features = like.shape
        dtype = getattr(base, "compute_dtype", None) or like.dtype
        # Plain tensors, also where the weight is one of several ranks' shards.
        self._a = torch.zeros(slots, max_rank, in_features, dtype=dtype, device=device)
        self._b = torch.zeros(slots, out_features, max_rank, dtype=dtype, device=device)

    def __getattr__(self, name: str) -> torch.Tensor | nn.Module:
        """Pipelines look at a linear's own attributes (`weight.dtype`, `in_features`)."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)  # type: ignore[no-any-return]

    def write(self, slot: int, factors: LoRAFactors | None) -> None:
        """Put an adapter into a slot; None empties it."""
        self._a[slot].zero_()
        self._b[slot].zero_()
        if factors is not None:
            self._named = True
            rank = factors.a.shape[0]
            self._a[slot, :rank].copy_(self._part.cut_a(factors.a) if self._part else factors.a)
            # In float32, so that alpha / r is applied once and without a second rounding.
            b = factors.b.float() * factors.scaling
            self._b[slot, :, :rank].copy_(self._part.cut_b(b) if self._part else b)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x)
        if self._holder.static is not None:
            return self._add_to_each_row(x, out, self._holder.static)
        call = self._holder.current
        if call is None:
            return out
        if x.shape[0] != call.total:
            raise _other_rows(x.shape[0], call.total)
        low = torch.einsum("k...i,kri->k...r", x[call.rows], self._a[call.slots])
        if self._part is not None:
            low = self._part.add_up(low)
        scales = call.scales.to(low.dtype).reshape(-1, *[1] * (low.dim() - 1))
        return out.index_add(0, call.rows, torch.einsum("k...r,kor->k...o", low * scales, self._b[call.slots]))

    def _add_to_each_row(self, x: torch.Tensor, out: torch.Tensor, call: SlotOfEachRow) -> torch.Tensor:
        if x.shape[0] != call.slots.shape[0]:
            if self._named:
                raise _other_rows(x.shape[0], call.slots.shape[0])
            # Wrapped like all others when the model was compiled, and no adapter has anything for it.
            return out
        low = torch.einsum("k...i,kri->k...r", x, self._a[call.slots])
        if self._part is not None:
            low = self._part.add_up(low)
        scales = call.scales.to(low.dtype).reshape(-1, *[1] * (low.dim() - 1))
        return out + torch.einsum("k...r,kor->k...o", low * scales, self._b[call.slots])


def _other_rows(found: int, expected: int) -> RuntimeError:
    return RuntimeError(f"a wrapped layer got {found} rows in a call of {expected}: adapters cannot be told apart")
