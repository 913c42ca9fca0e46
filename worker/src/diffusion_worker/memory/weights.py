# SPDX-License-Identifier: Apache-2.0
"""All weights of a pipeline in slabs, with a mirror to fill them from again: sleep copies nothing, wake copies once.

A tensor's mirror is the mapped checkpoint file wherever the file holds just these values (after conversion to the model's
dtype), since its pages cost nothing while nobody reads them; what is in no file (computed buffers, renamed or fused
tensors) is copied into memory of our own at load.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.memory.slabs import Slab, make_slab, resident_bytes
from diffusion_worker.messages import MemoryReport

ALIGNMENT = 64  # a cache line, and what vectorised kernels like
NO_SLEEP = "sleep: not supported with --shard, whose weights are in no memory of ours"

# A tensor's name and the whole of it -> what this rank has of it.
Cut = Callable[[str, torch.Tensor], torch.Tensor]


class _Whole(NamedTuple):
    """The tensor that a placed one is a part of: its shape, and how to get that part from it."""

    shape: torch.Size
    cut: Callable[[torch.Tensor], torch.Tensor]


class _Placed:
    """One tensor of a module: its place in a slab, and how to get its contents again."""

    def __init__(self, view: torch.Tensor, read_file: Callable[[], torch.Tensor] | None, whole: "_Whole") -> None:
        self.view = view
        self.read_file = read_file
        self.kept = None if read_file else view.to("cpu", copy=True)
        self.whole = whole

    def replace(self, values: torch.Tensor) -> None:
        """Other contents, given whole. What the file holds is no mirror of them, so they are kept in memory."""
        self.view.copy_(self.whole.cut(values))
        self.read_file, self.kept = None, self.view.to("cpu", copy=True)

    def fill(self) -> None:
        """Copy the mirror into the slab; conversion from the file's dtype is part of the copy."""
        source = self.read_file() if self.read_file else self.kept
        assert source is not None
        self.view.copy_(source)


class ModelWeights:
    """The weights of a pipeline's modules on one rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slabs: list[Slab] = []
        self._placed: list[_Placed] = []
        self._elsewhere: list[torch.Tensor] = []

    def place(self, module: torch.nn.Module, checkpoint: Path, *, cut: Cut = lambda name, whole: whole) -> int:
        """Move every parameter and buffer of a module into a slab of its own; returns their bytes.

        `checkpoint` is the folder of the module's safetensors files; it need not exist. `cut` says, by a tensor's name,
        which part of it this rank has.
        """
        named = [(name, tensor, cut(name, tensor.data)) for name, tensor in _named_tensors(module)]
        if not named:
            return 0
        offsets, size = _layout([part for _, _, part in named])
        tensor_shapes = {name: tensor.shape for name, tensor, _ in named}
        slab = make_slab(size, self._device)
        self._slabs.append(slab)
        files = _checkpoint_readers(checkpoint)
        for (name, tensor, part), offset in zip(named, offsets, strict=True):
            view = _view_of(slab, offset, part)
            view.copy_(part)
            tensor.data = view
            whole = _Whole(tensor_shapes[name], functools.partial(cut, name))
            self._placed.append(_Placed(view, _matching_reader(_cut_reader(files.get(name), name, cut), view), whole))
        return size

    def whole_shape(self, tensor: torch.Tensor) -> torch.Size | None:
        """The shape in which contents of a placed tensor are given to `replace`; None for one that is in no slab."""
        placed = self._find(tensor)
        return None if placed is None else placed.whole.shape

    def replace(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Give a placed tensor other contents, in its slab and in its mirror."""
        placed = self._find(tensor)
        assert placed is not None, "whole_shape tells which tensors are in a slab"
        placed.replace(values)

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
        for placed in self._placed:
            placed.fill()

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


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _named_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, each once: tied ones are the same object and stay tied."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def _layout(tensors: list[torch.Tensor]) -> tuple[list[int], int]:
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-_nbytes(tensor) // ALIGNMENT) * ALIGNMENT
    return offsets, max(end, ALIGNMENT)


def _view_of(slab: Slab, offset: int, like: torch.Tensor) -> torch.Tensor:
    return slab.bytes[offset : offset + _nbytes(like)].view(like.dtype).view(like.shape)


def _checkpoint_readers(folder: Path) -> dict[str, Callable[[], torch.Tensor]]:
    """How to read each tensor of a component's safetensors files, which stay mapped: replacing a file changes nothing."""
    readers: dict[str, Callable[[], torch.Tensor]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        handle: Any = safe_open(path, framework="pt")
        for key in handle.keys():  # noqa: SIM118 (a handle is no mapping)
            readers[key] = functools.partial(handle.get_tensor, key)
    return readers


def _cut_reader(read: Callable[[], torch.Tensor] | None, name: str, cut: Cut) -> Callable[[], torch.Tensor] | None:
    """Reads this rank's part; of a mapped file nothing else is touched."""
    return None if read is None else lambda: cut(name, read())


def _matching_reader(reader: Callable[[], torch.Tensor] | None, view: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    """The reader, if the file holds just what the model holds."""
    if reader is None:
        return None
    stored = reader()
    same = stored.shape == view.shape and torch.equal(stored.to(view.device, view.dtype), view)
    return reader if same else None
