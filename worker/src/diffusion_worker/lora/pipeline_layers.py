# SPDX-License-Identifier: Apache-2.0
"""All layers of a pipeline that adapters change: the binding of adapters, the slots, and the use of slots by the rows of a call.

A layer is named `component.path` (`transformer.blocks.0.attn.to_q`, `text_encoder.…`). It is wrapped when the first adapter names it,
or before its model is compiled. If the deployment names target modules, these are wrapped at once.
"""

import itertools
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from diffusion_worker.lora.call_rows import (
    BankLayout,
    CompiledRows,
    RowAdapters,
    RowAdaptersHolder,
    RowsNotSeparable,
    SlotUse,
    Uses,
)
from diffusion_worker.lora.checkpoint import LoRACheckpoint
from diffusion_worker.lora.convolution import LoRAConvolution
from diffusion_worker.lora.host_adapter import HostAdapter
from diffusion_worker.lora.layer_allowlist import LayerAllowlist
from diffusion_worker.lora.layers import BankPart, LinearPart, LoRALayer, LoRALinear
from diffusion_worker.lora.loads.binding import AdapterBinding, components_of, write_checked
from diffusion_worker.lora.loads.layout import Bound, LaidOut, Layout, open_layout
from diffusion_worker.lora.loads.model_table import TableLayer
from diffusion_worker.lora.model_layers import ModelLayer, ModelLayers
from diffusion_worker.lora.slot_bank import Columns, Segment, Widths
from diffusion_worker.memory.slabs import resident_bytes

__all__ = ["AdapterLayers", "HostAdapter", "SlotUse"]

# Number of calls whose rows are cached: requests use the same adapters at every step.
MOST_CALLS = 64


class AdapterLayers:
    """The layers that adapters may change in a pipeline, and the slots that hold the adapters' factors.

    It wraps the layers, writes adapters into slots, and sets which slots each row of a call uses.
    """

    def __init__(
        self,
        components: Mapping[str, nn.Module],
        *,
        slots: int,
        max_rank: int,
        device: torch.device,
        part_of: Callable[[str], LinearPart | None] = lambda name: None,
        target_modules: Sequence[str] = (),
        asleep: bool = False,
    ) -> None:
        """Find the layers of `components`, the modules that adapters may change by component name, and wrap the targets.

        `device` is the device on which the components compute. With `asleep` slots take no memory before `restore`.
        `part_of` returns this rank's part of a linear layer by its name; None means all of it.
        `target_modules` are suffixes of the names of the only layers that adapters may change; none means any.

        Raises:
            ConfigError: a target is the name of no layer that can be wrapped.
        """
        self._components = dict(components)
        self._slots, self._max_rank, self._device = slots, max_rank, device
        self._model = ModelLayers(components, part_of)
        self._envelope = LayerAllowlist(target_modules, self._model)
        kinds = {name: type(module).__name__ for name, module in components.items()}
        self.binding = AdapterBinding(self._model, self._envelope, kinds, max_rank=max_rank)
        self._wrapped: dict[ModelLayer, tuple[LoRALayer, Segment, list[Columns]]] = {}
        self._segments: list[Segment] = []
        self._asleep = asleep
        self._holder = RowAdaptersHolder()
        self._layout = BankLayout([0] * slots, max_rank, device)
        self._active: dict[int, HostAdapter] = {}
        self._filling: dict[int, Iterator[int]] = {}
        self._calls: dict[tuple[tuple[SlotUse, ...], ...], tuple[RowAdapters, CompiledRows | None]] = {}
        self._static = False
        self._wrap(self._envelope.layers)

    @property
    def any_wrapped(self) -> bool:
        """Return whether any layer is wrapped now; without one `dummy` has nothing to fill."""
        return bool(self._wrapped)

    @property
    def max_rank(self) -> int:
        """The largest rank that fits into a slot."""
        return self._max_rank

    @property
    def nbytes(self) -> int:
        """Return the size of all slots in bytes, also while a sleep has freed them; see `resident_bytes`."""
        return sum(segment.nbytes for segment in self._segments)

    @property
    def resident_bytes(self) -> int:
        """Bytes of all slots that are allocated now."""
        return resident_bytes([segment.slab for segment in self._segments])

    def release(self) -> None:
        """Free the memory of all slots. Call it while no adapter is active."""
        self._asleep = True
        for segment in self._segments:
            segment.release()

    def restore(self) -> None:
        """Give the empty slots memory after `release` or a start asleep; raises MemoryError or torch's own error for lack of it."""
        for segment in self._segments:
            segment.restore()
        self._asleep = False

    def make_static(self, regions: Iterable[nn.Module]) -> None:
        """Give every layer inside these modules its slots now, so that compiled code has them for any later adapter.

        If there are target modules, nothing is wrapped here, because these have their slots already.
        """
        self._static = True
        inside = {id(part) for region in regions for part in region.modules()}
        if not self._envelope.targets:
            self._wrap(layer for _, layer in self._model if id(layer.base) in inside)

    def register_module(self, name: str) -> bool:
        """Wrap the layers that `component.path` means before any adapter names them. Return False if all of them are wrapped already.

        Raises:
            ValueError: the name means no layer, or a layer outside the deployment's target modules.
        """
        layers = [piece.layer for piece in self._model.find(name).pieces]
        if not layers or not all(map(self._envelope.allows, layers)):
            raise ValueError(f"{name}: expected a layer that adapters may change, found {self._model.kind_of(name) or 'nothing'}")
        new = [layer for layer in layers if layer not in self._wrapped]
        self._wrap(new)
        return bool(new)

    def unregister_modules(self) -> None:
        """Give the model its own layers back and free all slots, also those of active adapters. No call of the model may run then."""
        for layer in self._wrapped:
            for parent, child in layer.places:
                setattr(parent, child, layer.base)
        for segment in self._segments:
            segment.release()
        self._wrapped, self._segments = {}, []
        self._filling.clear()
        self._active.clear()
        self._calls.clear()
        self._holder.folding.clear()

    def dummy(self, rank: int) -> HostAdapter:
        """Make an adapter of zeros for every layer that has slots.

        Raises:
            ValueError: no layer has slots, or the rank is over the largest one.
        """
        if not self._wrapped or not 0 < rank <= self._max_rank:
            layers = len(self._wrapped)
            expected = f"expected layers with slots, and a rank of 1 to {self._max_rank}"
            raise ValueError(f"adapter of zeros: {expected}, found {layers} such layers and rank {rank}")
        bound = [
            Bound(layer.name, layer, part, *_zeros(own, rank, segment.rows.dtype), 1.0)
            for layer, (_, segment, columns) in self._wrapped.items()
            for part, own in enumerate(columns)
        ]
        return self._adopt(LaidOut(bound, frozenset(self._components)), "dummy")

    def pack(self, checkpoint: LoRACheckpoint, *, name: str) -> HostAdapter:
        """Check and lay out an adapter here, as the process of a load does it elsewhere, and give its layers slots.

        `name` is for messages.

        Raises:
            RequestError: see `AdapterBinding.bind`; InvalidAdapter for factors that no slot can hold.
        """
        return self._adopt(LaidOut(self.binding.bind(checkpoint, name=name), components_of(checkpoint)), name)

    def _adopt(self, laid_out: LaidOut, name: str) -> HostAdapter:
        with torch.inference_mode(False):
            buffer = torch.empty(laid_out.layout.nbytes, dtype=torch.uint8)
        write_checked(laid_out, buffer, name=name)
        return self.open(laid_out.layout, buffer)

    def open(self, layout: Layout, buffer: torch.Tensor) -> HostAdapter:
        """Return an adapter that uses the buffer in place, and give its layers slots; raises KeyError or ValueError for another model's."""
        self._wrap(self._model.own(block.layer) for block in layout.blocks)
        return open_layout(layout, buffer, lambda layer: self._wrapped[self._model.own(layer)])

    def table(self) -> tuple[dict[str, str], list[TableLayer]]:
        """Describe the layers to a process without the model."""
        return self._model.table()

    def write(self, slot: int, adapter: HostAdapter) -> None:
        """Empty a slot, and let `fill` copy an adapter into it later. `rows` completes that copy before it uses the slot."""
        self.clear(slot)
        self._filling[slot] = self._pieces(slot, adapter)

    def _pieces(self, slot: int, adapter: HostAdapter) -> Iterator[int]:
        """Copy an adapter into a slot piece by piece, and yield the bytes of each, weighted by cost.

        After the last piece, layers use the slot.
        """
        # Segments without values of the adapter are written too, because compiled code reads them.
        for segment in self._segments:
            yield from segment.write_in_pieces(slot, [run for run in adapter.runs if run.segment is segment])
        for layer, part in adapter.parts:
            layer.parts[part].named |= 1 << slot
        self._layout.ranks[slot] = adapter.rank
        self._active[slot] = adapter

    @torch.inference_mode(mode=False)
    def fill(self, slots: Container[int] | None = None, *, at_most: int | None = None) -> None:
        """Continue the copies into `slots` (None: all), until they are done or `at_most` bytes were copied."""
        done = 0
        for slot in [slot for slot in self._filling if slots is None or slot in slots]:
            for size in self._filling[slot]:
                done += size
                if at_most is not None and done >= at_most:
                    return
            del self._filling[slot]

    def is_filled(self, slot: int) -> bool:
        """Return whether the copy into a slot is complete."""
        return slot not in self._filling

    def holds(self, slot: int, adapter: HostAdapter) -> bool:
        """Complete a slot's copy, and return whether the slot holds this adapter: its layers use the slot, and the factors are equal."""
        self.fill([slot])
        named = all(layer.parts[part].named >> slot & 1 for layer, part in adapter.parts)
        return named and self._layout.ranks[slot] == adapter.rank and all(run.segment.holds(slot, run) for run in adapter.runs)

    def clear(self, slot: int) -> None:
        """Empty a slot. The memory keeps the old values until the next write, but no layer uses them."""
        self._filling.pop(slot, None)
        adapter = self._active.pop(slot, None)
        for layer, part in adapter.parts if adapter else ():
            layer.parts[part].named &= ~(1 << slot)
        self._layout.ranks[slot] = 0
        self._calls.clear()

    @contextmanager
    def rows(self, uses: Uses) -> Iterator[None]:
        """Make row i of a call of a component use the slots in `uses[i]`, inside the `with` block alone.

        Unfinished copies into these slots are completed first.

        Raises:
            RowsNotSeparable: rows use different adapters, but a layer that these change does not see the rows. Compiled code shows this
                only at the end of the block, whose results are then wrong.
        """
        if not any(use.scale for row in uses for use in row):
            yield
            return
        if self._filling:
            self.fill({use.slot for row in uses for use in row if use.scale})
        call, self._holder.compiled = self._call(tuple(map(tuple, uses)))
        self._holder.current = call if call.mask else None
        try:
            self._require_separable(call)
            yield
            if self._static and not call.shared:
                self._learn_from_compiled()
                self._require_separable(call)
        finally:
            self._holder.current = self._holder.compiled = None

    def _call(self, uses: tuple[tuple[SlotUse, ...], ...]) -> tuple[RowAdapters, CompiledRows | None]:
        if uses not in self._calls:
            if len(self._calls) >= MOST_CALLS:
                self._calls.clear()
            self._calls[uses] = RowAdapters(uses, self._layout), CompiledRows(uses, self._layout) if self._static else None
        return self._calls[uses]

    def _require_separable(self, call: RowAdapters) -> None:
        for name, layer in self._holder.folding.items() if not call.shared else ():
            if layer.named_by(call.mask):
                raise RowsNotSeparable(f"layer {name} does not see the rows of a batch: adapters of rows cannot be kept apart")

    def _learn_from_compiled(self) -> None:
        """Add the layers that compiled code has marked as not seeing the rows of a call to the holder's `folding`."""
        self._holder.folding |= {layer.name: layer for layer, _, _ in self._wrapped.values() if layer.folds}

    def _wrap(self, layers: Iterable[ModelLayer]) -> None:
        """Wrap the layers that have no slots yet, and give them slots: one segment for all layers of a dtype."""
        new = sorted(dict.fromkeys(layer for layer in layers if layer not in self._wrapped), key=operator.attrgetter("order"))
        alike: dict[torch.dtype, list[ModelLayer]] = {}
        for layer in new:
            alike.setdefault(layer.dtype, []).append(layer)
        for dtype, group in alike.items():
            widths = [Widths(layer.widths[0], out) for layer in group for out in layer.widths[1]]
            segment = Segment(widths, slots=self._slots, max_rank=self._max_rank, dtype=dtype, device=self._device, released=self._asleep)
            self._segments.append(segment)
            columns = iter(segment.columns)
            for layer in group:
                self._replace(layer, segment, list(itertools.islice(columns, len(layer.widths[1]))))

    def _replace(self, layer: ModelLayer, segment: Segment, columns: list[Columns]) -> None:
        starts = itertools.accumulate(layer.widths[1], initial=0)
        outputs = [slice(start, start + width) for start, width in zip(starts, layer.widths[1], strict=False)]
        placed = zip(columns, outputs, strict=True)
        parts = tuple(BankPart(segment.of(own.a), segment.of(own.b), output, layer.add_up) for own, output in placed)
        kind = LoRALinear if isinstance(layer.base, nn.Linear) else LoRAConvolution
        wrapped = kind(layer.base, self._holder, parts, name=layer.name)
        for parent, child in layer.places:
            setattr(parent, child, wrapped)
        self._wrapped[layer] = wrapped, segment, columns


def _zeros(columns: Columns, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Make factors that change nothing, as wide as a part's columns in the bank: A [rank, in] and B [out, rank]."""
    a, b = columns.a.stop - columns.a.start, columns.b.stop - columns.b.start
    return torch.zeros(rank, a, dtype=dtype), torch.zeros(b, rank, dtype=dtype)
