# SPDX-License-Identifier: Apache-2.0
"""The adapters of one rank as requests name them: read from files, registered by their effect, and found again for each row.

Two ids with the same bytes and the same effect share one copy in memory and one slot. Reading (`read`) registers and evicts
nothing, so that ranks can agree before any of them makes room for an adapter (`register`).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch
from torch import nn

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.checkpoint import LoRACheckpoint, read_checkpoint
from diffusion_worker.lora.identity import identity_of_several
from diffusion_worker.lora.layers import LinearPart
from diffusion_worker.lora.loads.binding import components_of
from diffusion_worker.lora.loads.layout import Layout
from diffusion_worker.lora.loads.model_table import ConverterTable, ModelTable
from diffusion_worker.lora.loads.sealed_memory import map_sealed
from diffusion_worker.lora.model_layers import can_be_wrapped
from diffusion_worker.lora.model_manager import LoRAModel, LRUCacheLoRAModelManager
from diffusion_worker.lora.naming import AdaptedModel
from diffusion_worker.lora.pipeline_layers import AdapterLayers, HostAdapter
from diffusion_worker.lora.request import LoadOptions, LoRARequest
from diffusion_worker.memory.checksum import checksum
from diffusion_worker.messages import AdapterIdentity, LoadedLoRA, LoRAUse, PreparedPart

if TYPE_CHECKING:
    from diffusion_worker.lora.conversion import Convert

PLAIN = LoadOptions()


class Candidate(NamedTuple):
    """An adapter that was read and fits, and is not registered yet."""

    request: LoRARequest
    options: LoadOptions
    adapter: HostAdapter
    loaded: LoadedLoRA


class _Known(NamedTuple):
    """A registered id: its request, the number of its copy in the registry, and the report that the caller got."""

    request: LoRARequest
    copy: int
    loaded: LoadedLoRA


class DiffusionLoRAManager:
    """A manager of the adapters of a pipeline's components, whose layers get slots when the first adapter names them."""

    def __init__(
        self,
        components: Mapping[str, nn.Module],
        *,
        denoiser: str,
        slots: int,
        cached: int,
        max_rank: int,
        device: torch.device,
        part_of: Callable[[str], LinearPart | None] = lambda name: None,
        target_modules: Sequence[str] = (),
        convert: "Convert | None" = None,
        converter: ConverterTable | None = None,
        in_use: Callable[[], Iterable[LoRAUse]] = tuple,
        asleep: bool = False,
    ) -> None:
        """Manage adapters that may change `components`; modules without a component's name belong to the `denoiser`.

        `cached` adapters are kept in host memory, and one more while it replaces another; none at all without `slots`.
        `convert` converts names of an original model to diffusers', and `converter` describes that to a process without the model.
        `device` is the device on which the components compute, wherever their weights are. `in_use` returns the adapters of running
        requests. With `asleep` slots take no memory before `restore`.
        """
        self._components = dict(components)
        self._model = AdaptedModel(self._components, denoiser, convert)
        self._targets, self._converter = target_modules, converter
        self._cached = cached
        self._in_use = in_use
        self._layers = AdapterLayers(
            components,
            slots=max(1, slots),
            max_rank=max_rank,
            device=device,
            part_of=part_of,
            target_modules=target_modules if slots else (),
            asleep=asleep,
        )
        self._copies = LRUCacheLoRAModelManager(self._layers, slots=slots, capacity=cached + 1, in_use=self._copies_in_use)
        self._known: dict[int, _Known] = {}
        self._effects: dict[int, AdapterIdentity] = {}
        self._pinned: set[int] = set()
        # Numbers of copies are never used twice; dummies count down from 0.
        self._next_copy = 1

    @property
    def layers(self) -> AdapterLayers:
        """The layers that adapters change."""
        return self._layers

    def register_module(self, name: str) -> bool:
        """Wrap the layer `component.path` with slots before any adapter needs it; return False if it was wrapped already.

        Raises:
            ValueError: `--max-loras` is 0; or nothing of that name may have adapters.
        """
        if not self._copies.lora_slots:
            raise ValueError(f"layer {name}: adapters are off, --max-loras is 0")
        return self._copies.register_module(name)

    def unregister_modules(self) -> None:
        """Forget every adapter, and put the model's own layers back. Call it while no request runs."""
        self.remove_all_adapters()
        self._layers.unregister_modules()

    def make_static(self, regions: Iterable[nn.Module]) -> None:
        """Give slots to all layers inside these modules that adapters may change; call it before the modules are compiled.

        Do nothing if adapters are off.
        """
        if self._copies.lora_slots:
            self._layers.make_static(regions)

    def add_adapter(self, request: LoRARequest, options: LoadOptions = PLAIN) -> LoadedLoRA:
        """Read, check and register one adapter. A refused one is not registered, and nothing is evicted for it.

        Raises:
            RequestError: the errors of `read`; CapacityExceeded if too few adapters in memory may be evicted.
        """
        return self.register(self.read(request, options))

    def read(self, request: LoRARequest, options: LoadOptions = PLAIN) -> Candidate:
        """Read an adapter from its file, check it and lay it out. Nothing is registered or evicted, but its layers get slots.

        Raises:
            RequestError: the errors of `read_checkpoint` and `AdapterBinding.bind`; CapacityExceeded if adapters are off; Conflict
                if the id is another adapter's.
        """
        name = request.lora_name
        self._require_free_id(request)
        if not self._copies.lora_slots:
            raise RequestError(ErrorCode.CAPACITY_EXCEEDED, f"adapter {name!r}: adapters are off, --max-loras is 0")
        if not any(can_be_wrapped(part) for module in self._components.values() for part in module.modules()):
            found = ", ".join(type(module).__name__ for module in self._components.values()) or "no component"
            raise RequestError(ErrorCode.NO_MATCHING_MODULES, f"adapter {name!r}: the model has no layer for adapters in {found}")
        checkpoint = read_checkpoint(request.lora_path, root=request.lora_root, name=name, options=options, model=self._model)
        adapter = self._layers.pack(checkpoint, name=name)
        return Candidate(request, options, adapter, described(checkpoint, adapter.kept))

    def adopt(self, request: LoRARequest, options: LoadOptions, part: PreparedPart) -> LoadedLoRA:
        """Register an adapter that the process of a load has read, checked and laid out for this rank, and return its report.

        If the id is registered already, only return its report.

        Raises:
            RequestError: CapacityExceeded; Conflict if the id is another adapter's; RankFailed if the layout is not for this model.
        """
        self._require_free_id(request)
        if request.lora_int_id in self._known:
            return self._known[request.lora_int_id].loaded
        try:
            layout = msgspec.msgpack.decode(part.layout, type=Layout)
            adapter = self._layers.open(layout, map_sealed(part.path, part.size))
        except (OSError, KeyError, ValueError) as error:
            message = f"adapter {request.lora_name!r}: a rank cannot use the prepared weights: {type(error).__name__}: {error}"
            raise RequestError(ErrorCode.RANK_FAILED, message) from None
        return self.register(Candidate(request, options, adapter, part.loaded))

    def table(self) -> ModelTable:
        """Return a description of the model as plain data, by which the process of a load checks and lays out adapters."""
        modules, layers = self._layers.table()
        return ModelTable(
            denoiser=self._model.denoiser,
            components={name: type(module).__name__ for name, module in self._components.items()},
            modules=modules,
            layers=layers,
            targets=list(self._targets),
            slots=self._copies.lora_slots,
            max_rank=self._layers.max_rank,
            converter=self._converter,
        )

    def _require_free_id(self, request: LoRARequest) -> None:
        known = self._known.get(request.lora_int_id)
        if known is not None and known.request != request:
            message = f"adapter {request.lora_name!r}: its id {request.lora_int_id} is that of adapter {known.request.lora_name!r}"
            raise RequestError(ErrorCode.CONFLICT, message)

    def register(self, candidate: Candidate) -> LoadedLoRA:
        """Register an adapter, keep it in host memory and return its report; others are evicted if there is no room.

        An adapter with the effect of a registered one shares that one's copy. If the id is registered already, only return its report.

        Raises:
            RequestError: CapacityExceeded, and nothing was evicted.
        """
        request = candidate.request
        if request.lora_int_id in self._known:
            return self._known[request.lora_int_id].loaded
        loaded = candidate.loaded
        copy = next((copy for copy, effect in self._effects.items() if effect == candidate.loaded.identity), None)
        if copy is None:
            going = self._making_room(candidate)
            loaded = msgspec.structs.replace(loaded, evicted=going)
            for lora_int_id in going:
                self.remove_adapter(lora_int_id)
            copy, self._next_copy = self._next_copy, self._next_copy + 1
            self._copies.add_adapter(LoRAModel(copy, request.lora_name, candidate.adapter))
            self._effects[copy] = candidate.loaded.identity
        self._copies.touch(copy)
        self._known[request.lora_int_id] = _Known(request, copy, msgspec.structs.replace(loaded, evicted=[]))
        return loaded

    def remove_adapter(self, lora_int_id: int) -> bool:
        """Forget an adapter, and its copy and slot unless another id shares them; return False if it was not registered.

        A pinned adapter goes too. The caller makes sure that no running request uses it.
        """
        known = self._known.get(lora_int_id)
        if known is None:
            return False
        self.unpin_adapter(lora_int_id)
        del self._known[lora_int_id]
        if not self._ids_of(known.copy):
            self._copies.remove_adapter(known.copy)
            del self._effects[known.copy]
        return True

    def remove_all_adapters(self) -> None:
        """Forget every adapter, also pinned ones, and empty all slots; their memory stays allocated."""
        self._copies.remove_all_adapters()
        self._known.clear()
        self._effects.clear()
        self._pinned.clear()

    def list_adapters(self) -> list[int]:
        """List the ids of all adapters in host memory in ascending order, in a slot or not."""
        return sorted(self._known)

    @property
    def host_bytes(self) -> int:
        """Bytes of the registered adapters in host memory; a copy that several ids share counts once."""
        return sum(model.adapter.nbytes for model in self._copies.list_adapters().values())

    def release(self, *, forget: bool) -> None:
        """Free the memory of all slots, and with `forget` forget every adapter. Call it while no adapter is in use."""
        if forget:
            self.remove_all_adapters()
        self._copies.deactivate_all()
        self._layers.release()

    def restore(self) -> None:
        """Take back the memory that `release` freed, with all slots empty until requests fill them.

        Raises:
            MemoryError: there is no room; torch may raise its own error instead.
        """
        self._layers.restore()

    def host_copies(self) -> dict[int, tuple[str, list[torch.Tensor]]]:
        """Return, by id, the identity of each registered adapter and the tensors of its copy in host memory."""
        found: dict[int, tuple[str, list[torch.Tensor]]] = {}
        for lora_int_id, known in self._known.items():
            model = self._copies.get_adapter(known.copy)
            if model is not None:
                found[lora_int_id] = known.loaded.identity, [model.adapter.kept]
        return found

    @torch.inference_mode(mode=False)
    def misapplied(self) -> set[int]:
        """Put adapters into slots as requests would, and return the ids whose slots differ from their copy in host memory.

        The most recently used adapters are checked, as many as there are slots, because requests most likely use them next.
        Call it while no request runs.
        """
        wrong, slots = set(), self._copies.lora_slots
        for copy, model in list(self._copies.list_adapters().items())[-slots:] if slots else ():
            self._copies.activate_adapter(copy)
            slot = self._copies.slot_of(copy)
            if slot is None or not self._layers.holds(slot, model.adapter):
                wrong |= self._ids_of(copy)
        return wrong

    def pin_adapter(self, lora_int_id: int) -> bool:
        """Keep an adapter in host memory until it is unpinned or removed; return False if it is not registered.

        Other adapters may still take its slot.
        """
        known = self._known.get(lora_int_id)
        if known is None or not self._copies.keep_adapter(known.copy):
            return False
        self._pinned.add(lora_int_id)
        return True

    def unpin_adapter(self, lora_int_id: int) -> bool:
        """Allow the eviction of an adapter again that was pinned; return False if it is unknown or had no pin.

        An id that shares its copy with a pinned one stays in host memory until that one is unpinned too.
        """
        if lora_int_id not in self._pinned:
            return False
        self._pinned.remove(lora_int_id)
        copy = self._known[lora_int_id].copy
        if self._pinned.isdisjoint(self._ids_of(copy)):
            self._copies.unpin_adapter(copy)
        return True

    # Slots are written both in ticks and between them; tensors made in inference mode could be written only in that mode.
    @torch.inference_mode(mode=False)
    def activate(self, uses: Iterable[LoRAUse]) -> None:
        """Give slots to the adapters of a request, which keep them as long as `in_use` returns these adapters.

        Adapters of strength 0 get none. The factors are copied later, by `fill` or when a call first uses the slot.

        Raises:
            RequestError: AdapterNotLoaded; CapacityExceeded if other requests use the slots.
        """
        for use in uses:
            copy = self._copy_of(use)
            if use.scale:
                self._copies.activate_adapter(copy)

    def is_ready(self, uses: Iterable[LoRAUse]) -> bool:
        """Return whether no copy of a request's adapters into their slots is unfinished. Adapters in no slot count as ready."""
        slots = [self._copies.slot_of(known.copy) for use in uses if use.scale and (known := self._known.get(use.lora_int_id))]
        return all(slot is None or self._layers.is_filled(slot) for slot in slots)

    def fill(self, *, at_most: int | None = None) -> None:
        """Continue the copies into slots, until they are done or `at_most` bytes were copied (None: no limit)."""
        self._layers.fill(at_most=at_most)

    def identity_in(self, component: str, uses: Sequence[LoRAUse]) -> str | None:
        """Return a text for the effect of adapters at these strengths on a component: equal texts mean equal effects.

        Return None if no adapter changes the component. Unknown adapters are left out.
        """
        # An adapter that is gone is reported by the call itself.
        changing = [(known.copy, use.scale) for use in uses if use.scale and (known := self._known.get(use.lora_int_id))]
        return identity_of_several((self._effects[copy], scale) for copy, scale in changing if component in self._components_of(copy))

    def set_adapter_mapping(self, component: str, uses: Sequence[Sequence[LoRAUse]]) -> AbstractContextManager[None]:
        """Return a context in which row i of a call of a component uses the adapters in `uses[i]`; none for an empty entry.

        Raises:
            RequestError: AdapterNotLoaded if an adapter is unknown, or is in no slot and its strength is not 0.
        """
        return self._copies.set_adapter_mapping([self._copies_of(component, row) for row in uses])

    @contextmanager
    def dummy_adapters(self, count: int) -> Iterator[list[int]]:
        """Register adapters that change nothing, for a warm-up, and yield their ids.

        There are `count`, but at most as many as there are slots, and none if no layer has slots. They are removed at the end.
        """
        made = list(range(0, -min(count, self._copies.lora_slots), -1)) if self._layers.any_wrapped else []
        nothing = LoRARequest(lora_name="dummy", lora_int_id=0, lora_path="")
        for number in made:
            self._copies.capacity += 1
            self._copies.add_adapter(self._copies.create_dummy_lora(number, self._copies.get_dummy_lora_warmup_rank()))
            self._effects[number] = AdapterIdentity(nothing.lora_name)
            self._known[number] = _Known(nothing, number, LoadedLoRA(digest="", rank=0, modules=0, size_bytes=0))
        try:
            yield made
        finally:
            for number in made:
                self.remove_adapter(number)
                self._copies.capacity -= 1

    def _making_room(self, candidate: Candidate) -> list[int]:
        """Return the ids to evict for an adapter: no more than needed, and none that is pinned or in use.

        They are the first of `options.evict`, or without that list the least recently used. With a list, memory may hold one adapter more.

        Raises:
            RequestError: CapacityExceeded if too few may be evicted.
        """
        evict = candidate.options.evict
        free = self._copies.evictable()
        if evict is None:
            copies, most = free, self._cached
        else:
            named = dict.fromkeys(known.copy for lora_int_id in evict if (known := self._known.get(lora_int_id)))
            copies = [copy for copy in named if copy in free and self._ids_of(copy) <= set(evict)]
            # A new version may lie beside the old one.
            most = self._cached + 1
        count = len(self._copies)
        going = copies[: max(0, count + 1 - self._cached)]
        if count + 1 - len(going) > most:
            message = f"adapter {candidate.request.lora_name!r}: {count} adapters are in host memory, and too few of them can be evicted"
            raise RequestError(ErrorCode.CAPACITY_EXCEEDED, message)
        return [lora_int_id for copy in going for lora_int_id in sorted(self._ids_of(copy))]

    def _copies_of(self, component: str, uses: Sequence[LoRAUse]) -> dict[int, float]:
        """Add up a row's strengths by copy, as ids may share one; only copies that change the component are returned.

        Raises:
            RequestError: AdapterNotLoaded, if an adapter whose strength is not 0 is in no slot.
        """
        scales: dict[int, float] = {}
        for use in uses:
            copy = self._copy_of(use)
            active = self._copies.slot_of(copy) is not None
            if use.scale and not active:
                raise _not_loaded(use)
            if active and component in self._components_of(copy):
                scales[copy] = scales.get(copy, 0.0) + use.scale
        return scales

    def _copies_in_use(self) -> Collection[int]:
        return {known.copy for use in self._in_use() if (known := self._known.get(use.lora_int_id))}

    def _ids_of(self, copy: int) -> set[int]:
        return {lora_int_id for lora_int_id, known in self._known.items() if known.copy == copy}

    def _copy_of(self, use: LoRAUse) -> int:
        if use.lora_int_id not in self._known:
            raise _not_loaded(use)
        return self._known[use.lora_int_id].copy

    def _components_of(self, copy: int) -> frozenset[str]:
        model = self._copies.get_adapter(copy)
        return frozenset() if model is None else model.adapter.components


def described(checkpoint: LoRACheckpoint, kept: torch.Tensor) -> LoadedLoRA:
    """Return the report of an adapter for callers, with the checksum of `kept`, the bytes of a rank's copy."""
    return LoadedLoRA(
        digest=checkpoint.digest,
        rank=checkpoint.rank,
        modules=len(checkpoint.modules),
        size_bytes=checkpoint.size_bytes,
        components=sorted(components_of(checkpoint)),
        format=checkpoint.format,
        alpha=checkpoint.alpha,
        base_model=checkpoint.base_model,
        recipe=checkpoint.recipe,
        checksum=checksum([kept]),
        identity=checkpoint.identity,
    )


def _not_loaded(use: LoRAUse) -> RequestError:
    return RequestError(ErrorCode.ADAPTER_NOT_LOADED, f"the adapter of the request is not loaded (id {use.lora_int_id})")
