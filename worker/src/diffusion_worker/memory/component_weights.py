# SPDX-License-Identifier: Apache-2.0
"""The weights of one component: a slab, the place of every tensor in it, and where their contents come from at a wake.

For a tensor that was filled from the checkpoint's file, or equals it after conversion to the model's dtype, that file is the mirror. Other
tensors (computed buffers, fused or quantised ones) are kept in our own memory. An accelerator has a host mirror of the whole slab beside
that, which makes waking a copy.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from diffusion_worker.memory.filling import Fill, fill_tensors
from diffusion_worker.memory.host_mirror import HostMirror
from diffusion_worker.memory.slabs import Slab, blank
from diffusion_worker.memory.weight_files import StoredTensor, WeightFile

MakeMirror = Callable[[int], HostMirror | None]


class Whole(NamedTuple):
    """The tensor that a placed one is a part of: its shape, and how to get that part from it."""

    shape: torch.Size
    cut: Callable[[torch.Tensor], torch.Tensor]


class PlacedTensor:
    """A module's tensor: its place in a slab, `offset` bytes from its start, and its contents in a file or kept here."""

    def __init__(self, like: torch.Tensor, offset: int, whole: Whole) -> None:
        self.view = blank(like.shape, like.dtype)
        self.offset = offset
        self.whole = whole
        self.fill: Fill | None = None
        self.kept: torch.Tensor | None = None

    def part_of(self, slab: torch.Tensor) -> torch.Tensor:
        """Return the tensor's bytes in a slab."""
        return slab[self.offset : self.offset + nbytes_of(self.view)].view(self.view.dtype).view(self.view.shape)

    def fill_from(self, stored: StoredTensor) -> Fill:
        """From now on its contents come from a file."""
        self.fill = Fill(self.view, stored, None if self.whole.shape == self.view.shape else self.whole.cut)
        return self.fill


class ComponentWeights:
    """The tensors of one slab. The placing code ensures that each has a fill, or is kept, or is mirrored."""

    def __init__(self, slab: Slab, mirror: HostMirror | None) -> None:
        self.slab = slab
        self.mirror = mirror
        self.placed: list[PlacedTensor] = []

    def add(self, placed: PlacedTensor, tensor: torch.Tensor) -> None:
        """Put a module's tensor in its place."""
        tensor.data = placed.view
        self.slab.lend(placed.view, placed.part_of)
        self.slab.lend(tensor, placed.part_of)
        self.placed.append(placed)

    def replace(self, placed: PlacedTensor, values: torch.Tensor) -> None:
        """Other contents, given whole. The file no longer mirrors them, so they are kept in memory."""
        placed.view.copy_(placed.whole.cut(values))
        placed.fill = None
        if self.mirror is None:
            placed.kept = placed.view.to("cpu", copy=True)
        else:
            self.mirror.take(placed.view.view(-1).view(torch.uint8), start=placed.offset)

    def files(self) -> list[WeightFile]:
        """The files that contents come from."""
        return files_of([self])

    def discard(self) -> None:
        """Keep nothing in memory but what is in no file."""
        if self.mirror is not None:
            for placed in self.placed:
                if placed.fill is None:
                    placed.kept = self._mirrored(placed, self.mirror)
            self.mirror = None

    def have_mirror(self, make: MakeMirror) -> None:
        """Mirror the slab's contents, where there is room: what was kept beside it goes."""
        if (mirror := make(self.slab.size)) is None:
            return
        mirror.take(self.slab.bytes)
        self.mirror = mirror
        for placed in self.placed:
            placed.kept = None

    def mirror_bytes(self) -> tuple[int, int]:
        """Return the bytes that a wake reads from files, and the bytes of host memory held for it."""
        if self.mirror is not None:
            return 0, self.mirror.nbytes
        in_files = sum(nbytes_of(placed.view) for placed in self.placed if placed.fill is not None)
        return in_files, sum(nbytes_of(placed.kept) for placed in self.placed if placed.kept is not None)

    def _mirrored(self, placed: PlacedTensor, mirror: HostMirror) -> torch.Tensor:
        found = torch.empty(placed.view.shape, dtype=placed.view.dtype)
        mirror.read(found.view(-1).view(torch.uint8), start=placed.offset)
        return found


def files_of(components: Iterable[ComponentWeights]) -> list[WeightFile]:
    """The files that contents of components come from, each once."""
    stored = [placed.fill.stored for component in components for placed in component.placed if placed.fill is not None]
    return list({id(each.file): each.file for each in stored}.values())


def fill_again(placed: Iterable[PlacedTensor]) -> None:
    """The contents of tensors from files, and from what is kept of them.

    Raises:
        ConfigError: a file ends early, or was written to meanwhile; the tensors' contents are undefined then.
    """
    found = list(placed)
    fill_tensors(each.fill for each in found if each.fill is not None)
    for each in found:
        if each.kept is not None:
            each.view.copy_(each.kept)


def nbytes_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's contents."""
    return tensor.numel() * tensor.element_size()
