# SPDX-License-Identifier: Apache-2.0
"""The adapters of one rank: which are registered, in which slot, and which rows of a call use them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.adapter_layers import AdapterLayers, HostAdapter, SlotUse
from diffusion_worker.lora.checkpoint import read_checkpoint
from diffusion_worker.lora.layers import LinearPart
from diffusion_worker.lora.request import LoadOptions, LoRARequest
from diffusion_worker.messages import LoadedLoRA, LoRAUse

# No id of an adapter: those are positive.
EMPTY = 0
PLAIN = LoadOptions()


class DiffusionLoRAManager:
    """Loads adapters into slots of the components' layers; layers are wrapped when the first adapter names them."""

    def __init__(
        self,
        components: Mapping[str, nn.Module],
        *,
        denoiser: str,
        slots: int,
        max_rank: int,
        device: torch.device,
        part_of: Callable[[str], LinearPart | None] = lambda name: None,
    ) -> None:
        """`components` are what adapters may change, `denoiser` the name of the one that they are for unless they say.

        `device` is where these compute, wherever their weights are.
        """
        self._components = dict(components)
        self._denoiser = denoiser
        self._layers = AdapterLayers(components, slots=slots, max_rank=max_rank, device=device, part_of=part_of)
        self._slot_count = slots
        self._free = list(range(slots))
        self._slots: dict[int, int] = {}
        self._adapters: dict[int, HostAdapter] = {}

    def make_static(self, regions: Iterable[nn.Module]) -> None:
        """Have the layers inside of these ready for every adapter before they are compiled."""
        if self._slot_count > 1:  # one slot is for what replaces an adapter, and there is none to replace
            self._layers.make_static(regions)

    @contextmanager
    def empty_adapter(self) -> Iterator[int | None]:
        """The id of an adapter that changes nothing, for a warm-up; None where no layer has slots yet, or none is free."""
        if not self._layers.any_wrapped or not self._free:
            yield None
            return
        slot = self._free.pop(0)
        self._slots[EMPTY] = slot
        try:
            yield EMPTY
        finally:
            del self._slots[EMPTY]
            self._free.insert(0, slot)

    def add_adapter(self, request: LoRARequest, options: LoadOptions = PLAIN) -> LoadedLoRA:
        """Read, check and load one adapter. A refused one leaves nothing behind.

        Raises:
            RequestError: InvalidAdapter, DigestMismatch, CapacityExceeded.
        """
        checkpoint = read_checkpoint(request.lora_path, expected_digest=options.digest, denoiser=self._denoiser)
        adapter = self._layers.pack(checkpoint, name=request.lora_name)
        if not self._free:
            raise RequestError(ErrorCode.CAPACITY_EXCEEDED, f"adapter {request.lora_name!r}: all slots are in use")
        slot = self._free.pop(0)
        self._layers.write(slot, adapter)
        self._slots[request.lora_int_id] = slot
        self._adapters[request.lora_int_id] = adapter
        return LoadedLoRA(
            digest=checkpoint.digest,
            rank=checkpoint.rank,
            modules=len(checkpoint.modules),
            size_bytes=checkpoint.size_bytes,
            components=sorted(adapter.components),
            format=checkpoint.format,
            alpha=checkpoint.alpha,
            base_model=checkpoint.base_model,
            recipe=checkpoint.recipe,
        )

    def remove_adapter(self, lora_int_id: int) -> bool:
        """Forget an adapter and empty its slot; False if it was not loaded."""
        slot = self._slots.pop(lora_int_id, None)
        if slot is None:
            return False
        self._layers.clear(slot)
        self._free.append(slot)
        del self._adapters[lora_int_id]
        return True

    def identity_in(self, module: nn.Module | None, uses: Sequence[LoRAUse]) -> str | None:
        """The adapters (their digests and strengths) that change what a module returns; None without one."""
        name = next((name for name, component in self._components.items() if component is module), None)
        changing = [use for use in uses if (adapter := self._adapters.get(use.lora_int_id)) and name in adapter.components]
        return " + ".join(f"{self._adapters[use.lora_int_id].checkpoint.digest} x {use.scale}" for use in changing) or None

    def list_adapters(self) -> list[int]:
        """Ids of the loaded adapters."""
        return sorted(self._slots)

    @contextmanager
    def rows(self, uses: Sequence[Sequence[LoRAUse]]) -> Iterator[None]:
        """While a call of a component runs: the adapters of each of its rows.

        Raises:
            RequestError: AdapterNotLoaded.
        """
        if missing := sorted({use.lora_int_id for row in uses for use in row} - self._slots.keys()):
            raise RequestError(ErrorCode.ADAPTER_NOT_LOADED, f"the adapter of the request is not loaded (id {missing[0]})")
        with self._layers.rows([[SlotUse(self._slots[use.lora_int_id], use.scale) for use in row] for row in uses]):
            yield
