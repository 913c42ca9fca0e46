# SPDX-License-Identifier: Apache-2.0
"""The adapters of one rank: which are loaded, in which slot, and which rows of a call use them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.checkpoint import LoRACheckpoint, invalid, read_checkpoint
from diffusion_worker.lora.layers import LinearPart, LoRALinear, RowAdapters, RowAdaptersHolder, SlotOfEachRow
from diffusion_worker.lora.request import LoRARequest
from diffusion_worker.messages import LoadedLoRA, LoRAUse

# No id of an adapter: those are positive.
EMPTY = 0


class DiffusionLoRAManager:
    """Loads adapters into slots of the denoiser's linear layers; layers are wrapped when the first adapter names them."""

    def __init__(
        self,
        denoiser: nn.Module,
        *,
        slots: int,
        max_rank: int,
        device: torch.device,
        part_of: Callable[[str], LinearPart | None] = lambda name: None,
    ) -> None:
        """`device` is where the denoiser computes, wherever its weights are.

        `part_of` tells, by the name of a linear layer, which part of it this rank has; None means all.
        """
        self._denoiser = denoiser
        self._device = device
        self._part_of = part_of
        self._max_rank = max_rank
        self._slot_count = slots
        self._free = list(range(slots))
        self._slots: dict[int, int] = {}
        self._digests: dict[int, str] = {}
        self._wrapped: dict[str, LoRALinear] = {}
        self._holder = RowAdaptersHolder()
        self._static = False

    def make_static(self, regions: Iterable[nn.Module]) -> None:
        """Give every linear layer inside of these its slots now: what is compiled then knows them, whoever uses them later."""
        if self._slot_count <= 1:
            return  # one slot is for what replaces an adapter, and there is none to replace
        self._static = True
        inside = {id(part) for region in regions for part in region.modules() if isinstance(part, nn.Linear)}
        for name, part in list(self._denoiser.named_modules()):
            if id(part) in inside:
                self._wrap(name)

    @contextmanager
    def empty_adapter(self) -> Iterator[int | None]:
        """The id of an adapter that changes nothing, for a warm-up; None where no layer has slots yet, or none is free."""
        if not self._wrapped or not self._free:
            yield None
            return
        slot = self._free.pop(0)
        self._slots[EMPTY] = slot
        try:
            yield EMPTY
        finally:
            del self._slots[EMPTY]
            self._free.insert(0, slot)

    def add_adapter(self, request: LoRARequest, *, expected_digest: str | None = None) -> LoadedLoRA:
        """Read, check and load one adapter. A refused one leaves nothing behind.

        Raises:
            RequestError: InvalidAdapter, DigestMismatch, CapacityExceeded.
        """
        checkpoint = read_checkpoint(request.lora_path, expected_digest=expected_digest)
        self._check(request, checkpoint)
        if not self._free:
            raise RequestError(ErrorCode.CAPACITY_EXCEEDED, f"adapter {request.lora_name!r}: all slots are in use")
        slot = self._free.pop(0)
        for name, factors in checkpoint.modules.items():
            self._wrap(name).write(slot, factors)
        self._slots[request.lora_int_id] = slot
        self._digests[request.lora_int_id] = checkpoint.digest
        return LoadedLoRA(digest=checkpoint.digest, rank=checkpoint.rank, modules=len(checkpoint.modules), size_bytes=checkpoint.size_bytes)

    def remove_adapter(self, lora_int_id: int) -> bool:
        """Forget an adapter and empty its slot; False if it was not loaded."""
        slot = self._slots.pop(lora_int_id, None)
        if slot is None:
            return False
        for layer in self._wrapped.values():
            layer.write(slot, None)
        self._free.append(slot)
        del self._digests[lora_int_id]
        return True

    def identity_in(self, module: nn.Module | None, use: LoRAUse | None) -> str | None:
        """The adapter (its digest and strength) that changes what a module returns; None without one, as in every text encoder."""
        if use is None or module is not self._denoiser or use.lora_int_id not in self._digests:
            return None
        return f"{self._digests[use.lora_int_id]} x {use.scale}"

    def list_adapters(self) -> list[int]:
        """Ids of the loaded adapters."""
        return sorted(self._slots)

    @contextmanager
    def rows(self, uses: list[LoRAUse | None]) -> Iterator[None]:
        """While a call of the denoiser runs: the adapter of each of its rows.

        Raises:
            RequestError: AdapterNotLoaded.
        """
        if not any(uses):
            yield
            return
        if missing := sorted({use.lora_int_id for use in uses if use is not None} - self._slots.keys()):
            raise RequestError(ErrorCode.ADAPTER_NOT_LOADED, f"the adapter of the request is not loaded (id {missing[0]})")
        slots = [None if use is None else self._slots[use.lora_int_id] for use in uses]
        scales = [0.0 if use is None else use.scale for use in uses]
        if self._static:
            self._holder.static = SlotOfEachRow(slots, scales, self._device)
        else:
            self._holder.current = RowAdapters(slots, scales, self._device)
        try:
            yield
        finally:
            self._holder.current = self._holder.static = None

    def _check(self, request: LoRARequest, checkpoint: LoRACheckpoint) -> None:
        """Every tensor binds, or the adapter is refused with the first names that do not."""
        if checkpoint.rank > self._max_rank:
            raise invalid(f"adapter {request.lora_name!r}: rank {checkpoint.rank} is over the limit of {self._max_rank}")
        strangers = []
        for name, factors in checkpoint.modules.items():
            base = self._linear(name)
            if base is None:
                strangers.append(f"{name} (no such linear layer)")
            elif (factors.a.shape[1], factors.b.shape[0]) != (base.in_features, base.out_features):
                found, expected = f"{factors.a.shape[1]} -> {factors.b.shape[0]}", f"{base.in_features} -> {base.out_features}"
                strangers.append(f"{name} (expected {expected}, found {found})")
        if strangers:
            raise invalid(
                f"adapter {request.lora_name!r}: {len(strangers)} of {len(checkpoint.modules)} modules do not match "
                f"{type(self._denoiser).__name__}: {', '.join(strangers[:3])}"
            )

    def _linear(self, name: str) -> nn.Linear | None:
        if name in self._wrapped:
            return self._wrapped[name].base
        try:
            module = self._denoiser.get_submodule(name)
        except AttributeError:
            return None
        return module if isinstance(module, nn.Linear) else None

    def _wrap(self, name: str) -> LoRALinear:
        if name not in self._wrapped:
            base = self._linear(name)
            assert base is not None, name
            part, slots, max_rank = self._part_of(name), self._slot_count, self._max_rank
            layer = LoRALinear(base, self._holder, slots=slots, max_rank=max_rank, device=self._device, part=part)
            parent, _, child = name.rpartition(".")
            setattr(self._denoiser.get_submodule(parent), child, layer)
            self._wrapped[name] = layer
        return self._wrapped[name]
