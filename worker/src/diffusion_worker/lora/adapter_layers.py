# SPDX-License-Identifier: Apache-2.0
"""All layers of a pipeline that adapters change: strict binding, the slots, and which rows of a call use which of them.

A layer is named `component.path` (`transformer.blocks.0.attn.to_q`, `text_encoder.…`) and is wrapped when the first adapter names it,
or before a model is compiled.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from diffusion_worker.lora.checkpoint import LoRACheckpoint, invalid
from diffusion_worker.lora.layers import LinearPart, LoRALinear, RowAdapters, RowAdaptersHolder, SlotOfEachRow


class SlotUse(NamedTuple):
    """One adapter of a row: the slot it is in and how strongly it is applied."""

    slot: int
    scale: float


class HostAdapter(NamedTuple):
    """An adapter in host memory, ready to be written into a slot."""

    checkpoint: LoRACheckpoint

    @property
    def nbytes(self) -> int:
        """Host memory that it takes."""
        return sum(factors.a.nbytes + factors.b.nbytes for factors in self.checkpoint.modules.values())

    @property
    def components(self) -> frozenset[str]:
        """The components it changes."""
        return frozenset(name.partition(".")[0] for name in self.checkpoint.modules)


class AdapterLayers:
    """The wrapped layers of a pipeline's components."""

    def __init__(
        self,
        components: Mapping[str, nn.Module],
        *,
        slots: int,
        max_rank: int,
        device: torch.device,
        part_of: Callable[[str], LinearPart | None] = lambda name: None,
        target_modules: Sequence[str] = (),
    ) -> None:
        """`components` are the modules adapters may change, by component name; `device` is where they compute.

        `part_of` tells, by the name of a layer, which part of it this rank has; None means all.
        `target_modules` are suffixes of names, the only layers that adapters may change; none means any.
        """
        self._components = dict(components)
        self._slot_count = slots
        self._max_rank = max_rank
        self._device = device
        self._part_of = part_of
        self._wrapped: dict[str, LoRALinear] = {}
        self._holder = RowAdaptersHolder()
        self._static = False

    @property
    def any_wrapped(self) -> bool:
        """Whether some layer has slots."""
        return bool(self._wrapped)

    def make_static(self, regions: Iterable[nn.Module]) -> None:
        """Give every linear layer inside of these its slots now: what is compiled then knows them, whoever uses them later."""
        self._static = True
        inside = {id(part) for region in regions for part in region.modules() if isinstance(part, nn.Linear)}
        for component, module in self._components.items():
            for name, part in list(module.named_modules()):
                if id(part) in inside:
                    self._wrap(f"{component}.{name}")

    def pack(self, checkpoint: LoRACheckpoint, *, name: str) -> HostAdapter:
        """An adapter as it is kept on the host; `name` is for messages.

        Raises:
            RequestError: InvalidAdapter with the first names that do not bind, or the rank. Nothing was changed then.
        """
        self._check(checkpoint, name)
        return HostAdapter(checkpoint)

    def write(self, slot: int, adapter: HostAdapter) -> None:
        """Put an adapter into a slot."""
        for layer in self._wrapped.values():
            layer.write(slot, None)
        for name, factors in adapter.checkpoint.modules.items():
            self._wrap(name).write(slot, factors)

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        for layer in self._wrapped.values():
            layer.write(slot, None)

    @contextmanager
    def rows(self, uses: Sequence[Sequence[SlotUse]]) -> Iterator[None]:
        """While a call of a component runs: the adapters of each of its rows."""
        if not any(uses):
            yield
            return
        if self._static:
            first = [row[0] if row else None for row in uses]
            scales = [use.scale if use else 0.0 for use in first]
            self._holder.static = SlotOfEachRow([use and use.slot for use in first], scales, self._device)
        else:
            self._holder.current = RowAdapters(uses, self._device)
        try:
            yield
        finally:
            self._holder.current = self._holder.static = None

    def _check(self, checkpoint: LoRACheckpoint, adapter: str) -> None:
        """Every tensor binds, or the adapter is refused with the first names that do not."""
        if checkpoint.rank > self._max_rank:
            raise invalid(f"adapter {adapter!r}: rank {checkpoint.rank} is over the limit of {self._max_rank}")
        strangers = []
        for name, factors in checkpoint.modules.items():
            base = self._linear(name)
            if base is None:
                strangers.append(f"{name} (no such linear layer)")
            elif (factors.a.shape[1], factors.b.shape[0]) != (base.in_features, base.out_features):
                found, expected = f"{factors.a.shape[1]} -> {factors.b.shape[0]}", f"{base.in_features} -> {base.out_features}"
                strangers.append(f"{name} (expected {expected}, found {found})")
        if strangers:
            models = ", ".join(type(module).__name__ for module in self._components.values())
            count = f"{len(strangers)} of {len(checkpoint.modules)} modules"
            raise invalid(f"adapter {adapter!r}: {count} do not match {models}: {', '.join(strangers[:3])}")

    def _linear(self, name: str) -> nn.Linear | None:
        if name in self._wrapped:
            return self._wrapped[name].base
        component, _, path = name.partition(".")
        try:
            module = self._components[component].get_submodule(path)
        except (AttributeError, KeyError):
            return None
        return module if isinstance(module, nn.Linear) else None

    def _wrap(self, name: str) -> LoRALinear:
        if name not in self._wrapped:
            base = self._linear(name)
            assert base is not None, name
            component, _, path = name.partition(".")
            part = self._part_of(name)
            layer = LoRALinear(base, self._holder, slots=self._slot_count, max_rank=self._max_rank, device=self._device, part=part)
            parent, _, child = path.rpartition(".")
            setattr(self._components[component].get_submodule(parent), child, layer)
            self._wrapped[name] = layer
        return self._wrapped[name]
