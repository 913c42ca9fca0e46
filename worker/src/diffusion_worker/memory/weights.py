# SPDX-License-Identifier: Apache-2.0
"""All weights of a pipeline in slabs, with a mirror to fill them from again: sleep copies nothing, wake copies once.

A tensor's mirror is the checkpoint's file wherever it was filled from there, or the file holds just these values (after
conversion to the model's dtype); what is in no file (computed buffers, fused tensors) is copied into memory of our own at load.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from diffusion_worker.errors import ConfigError, ErrorCode, RequestError
from diffusion_worker.memory.checkpoint import stored_in
from diffusion_worker.memory.filling import Fill, ReportBytes, fill_tensors, read_tensor
from diffusion_worker.memory.placeholders import Placeholders, is_lost
from diffusion_worker.memory.slabs import Slab, make_slab, resident_bytes
from diffusion_worker.memory.weight_files import StoredTensor
from diffusion_worker.messages import MemoryReport

ALIGNMENT = 64  # a cache line, and what vectorised kernels like
NO_SLEEP = "sleep: not supported with --shard, whose weights are in no memory of ours"

NOTHING_UNREAD = Placeholders()

# A tensor's name and the whole of it -> what this rank has of it.
Cut = Callable[[str, torch.Tensor], torch.Tensor]


class _Whole(NamedTuple):
    """The tensor that a placed one is a part of: its shape, and how to get that part from it."""

    shape: torch.Size
    cut: Callable[[torch.Tensor], torch.Tensor]


class _Placed:
    """One tensor of a module: its place in a slab, and where to get its contents again, a file or memory of our own."""

    def __init__(self, view: torch.Tensor, fill: Fill | None, whole: _Whole) -> None:
        self.view = view
        self.fill = fill
        self.kept = None if fill else view.to("cpu", copy=True)
        self.whole = whole

    def replace(self, values: torch.Tensor) -> None:
        """Other contents, given whole. What the file holds is no mirror of them, so they are kept in memory."""
        self.view.copy_(self.whole.cut(values))
        self.fill, self.kept = None, self.view.to("cpu", copy=True)


class ModelWeights:
    """The weights of a pipeline's modules on one rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slabs: list[Slab] = []
        self._placed: list[_Placed] = []
        self._elsewhere: list[torch.Tensor] = []

    def place(
        self,
        module: torch.nn.Module,
        checkpoint: Path,
        *,
        cut: Cut | None = None,
        unread: Placeholders = NOTHING_UNREAD,
        report: ReportBytes = lambda count: None,
    ) -> int:
        """Move every parameter and buffer of a module into a slab of its own; returns their bytes, of which `report` hears on the way.

        What is in a slab already, since another module shares it, stays there. `unread` says where the contents of tensors
        are that have none yet. `checkpoint` is the folder of the module's safetensors files, which need not exist: it is the
        mirror of other tensors that it holds. `cut` says, by a tensor's name, which part of it this rank has.

        Raises:
            ConfigError: a file cannot be read to its end, or was written to meanwhile.
        """
        here = {placed.view.data_ptr() for placed in self._placed}
        tensors = [(name, tensor) for name, tensor in _named_tensors(module) if tensor.data_ptr() not in here]
        parts = [_part(name, tensor.data, cut, unread) for name, tensor in tensors]
        if not parts:
            return 0
        offsets, size = _layout(parts)
        slab = make_slab(size, self._device)
        self._slabs.append(slab)
        mirrors = stored_in(checkpoint)
        empty: list[Fill] = []
        for (name, tensor), part, offset in zip(tensors, parts, offsets, strict=True):
            view = _view_of(slab, offset, part)
            whole = _Whole(tensor.shape, functools.partial(cut, name) if cut else lambda whole: whole)
            fill: Fill | None
            if stored := unread.stored_of(tensor):
                empty.append(fill := _fill_of(view, stored, whole))
            else:
                view.copy_(part)
                fill = _matching(mirrors.get(name), view, whole)
                report(_nbytes(view))
            tensor.data = view
            self._placed.append(_Placed(view, fill, whole))
        fill_tensors(empty, report)
        return size

    def tensors(self) -> list[torch.Tensor]:
        """All weights as they are on the device now, in the order in which they were placed; those that were left elsewhere last."""
        return [placed.view for placed in self._placed] + self._elsewhere

    def whole_shape(self, tensor: torch.Tensor) -> torch.Size | None:
        """The shape in which contents of a placed tensor are given to `replace`; None for one that is in no slab."""
        placed = self._find(tensor)
        return None if placed is None else placed.whole.shape

    def replace(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Give a placed tensor other contents, in its slab and in its mirror."""
        placed = self._find(tensor)
        assert placed is not None, "whole_shape tells which tensors are in a slab"
        placed.replace(values)

    def holds(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether all of them are placed here."""
        return {tensor.data_ptr() for tensor in tensors} <= {placed.view.data_ptr() for placed in self._placed}

    def refill(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give placed tensors the contents of their mirrors again, bit by bit what they were placed with.

        Raises:
            ConfigError: a file was written to meanwhile; the tensors' contents are undefined then.
        """
        wanted = {tensor.data_ptr() for tensor in tensors}
        _fill_again([placed for placed in self._placed if placed.view.data_ptr() in wanted])

    def _find(self, tensor: torch.Tensor) -> _Placed | None:
        """By the memory that it is in: after a sleep the slabs of an accelerator are elsewhere."""
        return next(
            (placed for placed in self._placed if placed.view.data_ptr() == tensor.data_ptr() and placed.view.shape == tensor.shape), None
        )

    def leave(self, tensors: Iterable[torch.Tensor]) -> int:
        """Count weights that stay where they are, and with which there is no sleep; returns their bytes."""
        found = list(tensors)
        self._elsewhere += found
        return sum(map(_nbytes, found))

    def release(self) -> None:
        """Give the memory of all slabs back. The modules must not run until `restore`.

        Raises:
            RequestError: InvalidRequest, some weights are in no slab.
        """
        if self._elsewhere:
            raise RequestError(ErrorCode.INVALID_REQUEST, NO_SLEEP)
        for slab in self._slabs:
            slab.release()

    def restore(self) -> None:
        """Fill the slabs from their mirrors."""
        for slab in self._slabs:
            slab.restore()
        _fill_again(self._placed)

    def report(self) -> MemoryReport:
        """Where the weights are now."""
        in_files = sum(_nbytes(placed.view) for placed in self._placed if placed.kept is None)
        in_memory = sum(_nbytes(placed.kept) for placed in self._placed if placed.kept is not None)
        elsewhere = sum(map(_nbytes, self._elsewhere))
        return MemoryReport(
            weights_bytes=in_files + in_memory + elsewhere,
            weights_resident_bytes=resident_bytes(self._slabs) + elsewhere,
            mirror_file_bytes=in_files,
            mirror_memory_bytes=in_memory,
            mappings=["{:x}-{:x}".format(*slab.address_range) for slab in self._slabs if slab.address_range is not None],
        )


def read_in_place(module: torch.nn.Module, unread: Placeholders, report: ReportBytes) -> None:
    """Give the tensors of a module that have no contents yet memory of their own, outside of slabs, and what is stored for them.

    Raises:
        ConfigError: a file cannot be read to its end, or was written to meanwhile.
    """
    fills = []
    for _, tensor in _named_tensors(module):
        if stored := unread.stored_of(tensor):
            tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype)
            fills.append(Fill(tensor.data, stored))
        else:
            report(_nbytes(tensor))
    fill_tensors(fills, report)


def _fill_again(placed: Iterable[_Placed]) -> None:
    """The contents of tensors from their mirrors: files first, then memory of our own."""
    found = list(placed)
    fill_tensors(each.fill for each in found if each.fill is not None)
    for each in found:
        if each.kept is not None:
            each.view.copy_(each.kept)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _named_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, each once: tied ones are the same object and stay tied. Quantised ones as what they consist of."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        yield from parts_of(name, tensor)


def weights_bytes(module: torch.nn.Module) -> int:
    """Bytes of a module's weights, each tensor once."""
    return sum(_nbytes(tensor) for _, tensor in _named_tensors(module))


def parts_of(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors that a tensor consists of, by name: itself, or what is in torchao's and bitsandbytes' own kinds."""
    if is_traceable_wrapper_subclass(tensor):
        inner = [(part, getattr(tensor, part)) for part in tensor.__tensor_flatten__()[0]]
        yield from ((f"{name}.{part}", value) for part, value in inner if value is not None)
        return
    yield name, tensor
    state = getattr(tensor, "quant_state", None)
    if state is not None:
        # One scale for each block of weights, and the table of the values that four bits stand for.
        yield from ((f"{name}.{part}", getattr(state, part)) for part in ("absmax", "code"))


def is_quantized(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds weights of fewer bits than it says, so that it cannot be given other contents."""
    return is_traceable_wrapper_subclass(tensor) or getattr(tensor, "quant_state", None) is not None


def _layout(tensors: list[torch.Tensor]) -> tuple[list[int], int]:
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-_nbytes(tensor) // ALIGNMENT) * ALIGNMENT
    return offsets, max(end, ALIGNMENT)


def _view_of(slab: Slab, offset: int, like: torch.Tensor) -> torch.Tensor:
    return slab.bytes[offset : offset + _nbytes(like)].view(like.dtype).view(like.shape)


def _part(name: str, whole: torch.Tensor, cut: Cut | None, unread: Placeholders) -> torch.Tensor:
    """This rank's part of a tensor; of one that has no contents only what it will look like."""
    if unread.stored_of(whole):
        whole = torch.empty_like(whole, device="meta")
    elif is_lost(whole):
        raise ConfigError(f"tensor {name}: its contents were not read, and it was copied: this pipeline class cannot be loaded")
    return whole if cut is None else cut(name, whole)


def _fill_of(view: torch.Tensor, stored: StoredTensor, whole: _Whole) -> Fill:
    return Fill(view, stored, None if whole.shape == view.shape else whole.cut)


def _matching(stored: StoredTensor | None, view: torch.Tensor, whole: _Whole) -> Fill | None:
    """How to fill a tensor again from its file, if the file holds just what it holds."""
    if stored is None or stored.shape != whole.shape:
        return None
    content = whole.cut(read_tensor(stored))
    return _fill_of(view, stored, whole) if torch.equal(content.to(view.device, view.dtype), view) else None
