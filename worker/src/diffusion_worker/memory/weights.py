# SPDX-License-Identifier: Apache-2.0
"""All weights of a pipeline in slabs, with a mirror to fill them from again: a mirrored sleep copies nothing, a wake copies once."""

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from diffusion_worker.errors import ConfigError, ErrorCode, RequestError
from diffusion_worker.memory.checkpoint import stored_in
from diffusion_worker.memory.component_weights import ComponentWeights, PlacedTensor, Whole, files_of, fill_again, nbytes_of
from diffusion_worker.memory.filling import Fill, RandomFill, ReportBytes, fill_tensors, read_tensor
from diffusion_worker.memory.heap import give_back_pinned
from diffusion_worker.memory.host_memory import available_host_bytes
from diffusion_worker.memory.host_mirror import HostMirror, copying_to, own_bytes, own_mirrors, require_room
from diffusion_worker.memory.module_tensors import named_tensors
from diffusion_worker.memory.placeholders import Placeholders, is_lost
from diffusion_worker.memory.slabs import DeviceSlab, make_slab, resident_bytes
from diffusion_worker.memory.weight_files import StoredTensor
from diffusion_worker.messages import MemoryReport, SleepLevel

ALIGNMENT = 64  # a cache line, which vectorised kernels prefer
NO_SLEEP = "sleep: not supported with --shard or --offload, whose weights the worker cannot free"

NOTHING_UNREAD = Placeholders()

# A tensor's name and the whole tensor -> this rank's part of it.
Cut = Callable[[str, torch.Tensor], torch.Tensor]


class ModelWeights:
    """The weights of a pipeline's modules on one rank."""

    def __init__(self, device: torch.device, *, asleep: bool = False, mirrored: bool | None = None) -> None:
        """Start without weights. `asleep` means as after a sleep that discards: placed weights take no memory before `restore`.

        `mirrored` gives slabs mirrors in host memory before a sleep, the default on an accelerator. On a CPU they would duplicate the
        system's cache of the files.
        """
        self._device = device
        self._mirrored = device.type != "cpu" if mirrored is None else mirrored
        self._components: list[ComponentWeights] = []
        self._elsewhere: list[torch.Tensor] = []
        self._level = SleepLevel.DISCARD if asleep else None

    def place(
        self,
        module: torch.nn.Module,
        checkpoint: Path,
        *,
        cut: Cut | None = None,
        unread: Placeholders = NOTHING_UNREAD,
        report: ReportBytes = lambda count: None,
    ) -> int:
        """Move all parameters and buffers of a module into one new slab; return the slab's size in bytes, 0 if there are none to move.

        Tensors already in a slab, because another module shares them, stay there. `unread` has the placeholders, whose contents are read
        from their files or made now. `checkpoint` is the folder of the module's safetensors files, which need not exist. A wake reads the
        tensors that it holds from there. `cut` returns this rank's part of a tensor, by name. `report` is called with each count of bytes
        that are in place. Asleep, nothing is read and the slab takes no memory; contents that the module has already and no file holds
        are kept.

        Raises:
            ConfigError: a file cannot be read to its end, or was written to meanwhile.
        """
        here = {placed.view.data_ptr() for placed in self._placed}
        tensors = [(name, tensor) for name, tensor in named_tensors(module) if tensor.data_ptr() not in here]
        parts = [_part(name, tensor.data, cut, unread) for name, tensor in tensors]
        if not parts:
            return 0
        offsets, size = _layout(parts)
        component = self._component(size)
        stored_here = stored_in(checkpoint)
        empty: list[Fill | RandomFill] = []
        for (name, tensor), part, offset in zip(tensors, parts, offsets, strict=True):
            placed = PlacedTensor(part, offset, Whole(tensor.shape, functools.partial(cut, name) if cut else lambda whole: whole))
            stored = unread.stored_of(tensor)
            component.add(placed, tensor)
            if stored is not None:
                empty.append(placed.fill_from(stored))
            else:
                self._take_contents(component, placed, part, stored_here.get(name))
                report(nbytes_of(part))
        if self._level is None:
            fill_tensors(empty, report)
        return size

    def _component(self, size: int) -> ComponentWeights:
        asleep = self._level is not None
        slab = DeviceSlab(size, self._device, released=asleep) if self._mirrored else make_slab(size, self._device, released=asleep)
        self._components.append(component := ComponentWeights(slab))
        return component

    def _take_contents(self, component: ComponentWeights, placed: PlacedTensor, part: torch.Tensor, stored: StoredTensor | None) -> None:
        """Copy a tensor's current contents into its place, unless asleep; note or keep what a wake takes them from."""
        if stored is not None and _holds(stored, part, placed.whole):
            placed.fill_from(stored)
        elif self._level is not None or not self._mirrored:
            placed.kept = part.to("cpu", copy=True)
        if self._level is None:
            placed.view.copy_(part)

    @property
    def _placed(self) -> list[PlacedTensor]:
        return [placed for component in self._components for placed in component.placed]

    def tensors(self) -> list[torch.Tensor]:
        """List this rank's weights, in the order of placing: views of the slabs first, then those that `leave` counted."""
        return [placed.view for placed in self._placed] + self._elsewhere

    def whole_shape(self, tensor: torch.Tensor) -> torch.Size | None:
        """Return the shape that `replace` expects for a placed tensor; None for a tensor in no slab."""
        found = self._find(tensor)
        return None if found is None else found[1].whole.shape

    def replace(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Give a placed tensor other contents, in its slab and for later wakes. Call it only while awake.

        `values` is the whole tensor, in the shape of `whole_shape`; this rank's part is cut from it. A tensor in no slab is refused by an
        AssertionError.
        """
        found = self._find(tensor)
        assert found is not None, "whole_shape tells which tensors are in a slab"
        component, placed = found
        component.replace(placed, values)

    def _find(self, tensor: torch.Tensor) -> tuple[ComponentWeights, PlacedTensor] | None:
        """Find a placed tensor by its current address, which changes when an accelerator's slab is restored."""
        for component in self._components:
            for placed in component.placed:
                if placed.view.data_ptr() == tensor.data_ptr() and placed.view.shape == tensor.shape:
                    return component, placed
        return None

    def leave(self, tensors: Iterable[torch.Tensor]) -> int:
        """Count weights that stay where they are, and that rule out sleep; return their bytes."""
        found = list(tensors)
        self._elsewhere += found
        return sum(map(nbytes_of, found))

    @property
    def missing_bytes(self) -> int:
        """Device bytes that the slabs need to be restored; 0 while they are awake."""
        return 0 if self._level is None else sum(component.slab.size for component in self._components)

    @property
    def has_mirrors(self) -> bool:
        """Return whether sleeps at `HostMemory` use mirrors in host memory: by default on an accelerator, not on a CPU."""
        return self._mirrored

    @property
    def unmirrored(self) -> list[int]:
        """Sizes in bytes of the slabs that have no mirror and need one for a sleep at `HostMemory`.

        It is empty while asleep, and where `has_mirrors` is False.
        """
        return [component.slab.size for component in self._lacking()]

    def _lacking(self) -> list[ComponentWeights]:
        if not self._mirrored or self._level is not None:
            return []
        return [component for component in self._components if component.mirror is None]

    def have_mirrors(self, mirrors: Sequence[HostMirror], *, fill: bool = True) -> None:
        """Use these mirrors for the slabs of `unmirrored`. With `fill` their contents are copied; else another process does that."""
        for component, mirror in zip(self._lacking(), mirrors, strict=True):
            if fill:
                mirror.take(component.slab.bytes)
            component.have_mirror(mirror)

    def make_mirrors(self) -> None:
        """Mirror all slabs of `unmirrored` in memory of this process."""
        self.have_mirrors(own_mirrors(self.unmirrored, pinned=self._device.type != "cpu"))

    def drop_mirrors(self) -> None:
        """Forget all mirrors, which may be incomplete. Call it only while awake, because nothing is copied from them."""
        for component in self._components:
            component.mirror = None

    def require_sleep(self) -> None:
        """Refuse a sleep with RequestError (InvalidRequest) if `leave` counted weights, as with --shard and --offload group."""
        if self._elsewhere:
            raise RequestError(ErrorCode.INVALID_REQUEST, NO_SLEEP)

    def release(self, level: SleepLevel = SleepLevel.HOST_MEMORY) -> None:
        """Give the memory of all slabs back; with `DISCARD` also the mirrors and the cached pages of the files.

        Mirrors that `HostMemory` needs and nobody made are made first. The modules must not run until `restore`. While asleep already,
        `DISCARD` still drops mirrors and pages.

        Raises:
            RequestError: InvalidRequest, some weights are in no slab; InsufficientMemory, mirrors do not fit. Nothing was given back then.
        """
        self.require_sleep()
        if level is SleepLevel.HOST_MEMORY and self.unmirrored:
            require_room(own_bytes(self.unmirrored), available_host_bytes())
            self.make_mirrors()
        for component in self._components if self._level is None else []:
            component.keep()
        for component in self._components:
            component.slab.release()
        if level is SleepLevel.DISCARD:
            for component in self._components:
                component.discard()
            for file in files_of(self._components):
                file.drop_pages()
            give_back_pinned(self._device)
        self._level = SleepLevel.DISCARD if SleepLevel.DISCARD in (level, self._level) else level

    def restore(self) -> None:
        """Allocate the slabs and fill them, from host mirrors where there are any; do nothing while awake.

        After a failure all slabs are released.

        Raises:
            ConfigError: a weights file changed since it was opened, or is too short. MemoryError, or torch's own error: out of memory.
        """
        if self._level is None:
            return
        try:
            self._fill_again()
        except BaseException:
            self.release(self._level)
            raise
        self._level = None

    def _fill_again(self) -> None:
        for file in files_of(self._components):
            file.check_unchanged()
        for component in self._components:
            component.slab.restore()
        unmirrored = []
        with copying_to(self._device):
            for component in self._components:
                if component.mirror is None:
                    unmirrored.append(component)
                else:
                    component.mirror.give(component.slab.bytes)
        fill_again(placed for component in unmirrored for placed in component.placed)

    def report(self) -> MemoryReport:
        """Return a report of the weights' current memory by place; its fields for adapters, caches and sleep stay empty."""
        mirrors = [component.mirror_bytes() for component in self._components]
        slabs = [component.slab for component in self._components]
        elsewhere = sum(map(nbytes_of, self._elsewhere))
        return MemoryReport(
            weights_bytes=sum(nbytes_of(placed.view) for placed in self._placed) + elsewhere,
            weights_resident_bytes=resident_bytes(slabs) + elsewhere,
            mirror_file_bytes=sum(in_files for in_files, _, _ in mirrors),
            mirror_memory_bytes=sum(own for _, own, _ in mirrors),
            mirror_shared_bytes=sum(shared for _, _, shared in mirrors),
            mappings=["{:x}-{:x}".format(*slab.address_range) for slab in slabs if slab.address_range is not None],
        )


def read_in_place(module: torch.nn.Module, unread: Placeholders, report: ReportBytes) -> None:
    """Read the contents of a module's placeholders into new host memory, outside of slabs. Other tensors stay as they are.

    `report` gets each count of bytes that are in place, those of the other tensors too.

    Raises:
        ConfigError: a file cannot be read to its end, or was written to meanwhile.
    """
    fills: list[Fill | RandomFill] = []
    for _, tensor in named_tensors(module):
        if contents := unread.stored_of(tensor):
            tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype)
            fills.append(Fill(tensor.data, contents) if isinstance(contents, StoredTensor) else RandomFill(tensor.data, contents))
        else:
            report(nbytes_of(tensor))
    fill_tensors(fills, report)


def _layout(tensors: list[torch.Tensor]) -> tuple[list[int], int]:
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-nbytes_of(tensor) // ALIGNMENT) * ALIGNMENT
    return offsets, max(end, ALIGNMENT)


def _part(name: str, whole: torch.Tensor, cut: Cut | None, unread: Placeholders) -> torch.Tensor:
    """Return this rank's part of a tensor; of a placeholder only its shape and dtype, on the meta device."""
    if unread.stored_of(whole):
        whole = torch.empty_like(whole, device="meta")
    elif is_lost(whole):
        raise ConfigError(f"tensor {name}: the pipeline class copied it before its contents were read, which is not supported")
    return whole if cut is None else cut(name, whole)


def _holds(stored: StoredTensor, part: torch.Tensor, whole: Whole) -> bool:
    """Return whether a file holds exactly a tensor's values, after conversion."""
    return stored.shape == whole.shape and torch.equal(whole.cut(read_tensor(stored)).to(part.device, part.dtype), part)
