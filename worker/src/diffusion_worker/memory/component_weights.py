# SPDX-License-Identifier: Apache-2.0
"""The weights of one component: a slab, the place of every tensor in it, and the source that a wake fills it from.

For a tensor that was filled from the checkpoint's file, or equals it after conversion to the model's dtype, that file is the mirror. Other
tensors (computed buffers, fused or quantised ones) are kept in memory. For an accelerator the whole slab may also have a host mirror, so
that waking is one copy. An accelerator's tensors are kept, and its slabs mirrored, only when a sleep comes.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from diffusion_worker.memory.filling import Fill, RandomFill, fill_tensors
from diffusion_worker.memory.host_mirror import HostMirror
from diffusion_worker.memory.placeholders import Contents
from diffusion_worker.memory.slabs import Slab, blank
from diffusion_worker.memory.weight_files import StoredTensor, WeightFile


class Whole(NamedTuple):
    """The whole tensor that a placed one is a part of: its shape, and the function that cuts the part from it."""

    shape: torch.Size
    cut: Callable[[torch.Tensor], torch.Tensor]


class PlacedTensor:
    """A module's tensor in a slab, `offset` bytes from the slab's start. A wake fills it from a file, or from the copy `kept` here."""

    def __init__(self, like: torch.Tensor, offset: int, whole: Whole) -> None:
        self.view = blank(like.shape, like.dtype)
        self.offset = offset
        self.whole = whole
        self.fill: Fill | RandomFill | None = None
        self.kept: torch.Tensor | None = None

    def part_of(self, slab: torch.Tensor) -> torch.Tensor:
        """Return this tensor's part of a slab's bytes, in its dtype and shape."""
        return slab[self.offset : self.offset + nbytes_of(self.view)].view(self.view.dtype).view(self.view.shape)

    def fill_from(self, contents: Contents) -> Fill | RandomFill:
        """Have each wake take the contents from a file, or from random numbers. Return the fill for now, which is not run here."""
        cut = None if self.whole.shape == self.view.shape else self.whole.cut
        self.fill = Fill(self.view, contents, cut) if isinstance(contents, StoredTensor) else RandomFill(self.view, contents, cut)
        return self.fill


class ComponentWeights:
    """The tensors of one slab. Call `keep` before it is first released, so that each of them has a fill, is kept or is mirrored."""

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self.mirror: HostMirror | None = None
        self.placed: list[PlacedTensor] = []

    def add(self, placed: PlacedTensor, tensor: torch.Tensor) -> None:
        """Make a module's tensor a view of its place in the slab, now or when the slab gets memory. No contents are copied."""
        tensor.data = placed.view
        self.slab.lend(placed.view, placed.part_of)
        self.slab.lend(tensor, placed.part_of)
        self.placed.append(placed)

    def replace(self, placed: PlacedTensor, values: torch.Tensor) -> None:
        """Give a tensor other contents, cut from `values`, the whole tensor. Host memory keeps a copy, because no file has them.

        The slab must have memory. The copy is in the mirror if there is one.
        """
        placed.view.copy_(placed.whole.cut(values))
        placed.fill = None
        if self.mirror is None:
            placed.kept = placed.view.to("cpu", copy=True)
        else:
            self.mirror.take(placed.view.view(-1).view(torch.uint8), start=placed.offset)

    def files(self) -> list[WeightFile]:
        """List the open weight files from which a wake fills this component's tensors, without duplicates."""
        return files_of([self])

    def discard(self) -> None:
        """Drop the host mirror, and keep from it only contents that no fill can bring; without a mirror do nothing."""
        if self.mirror is not None:
            for placed in self.placed:
                if placed.fill is None:
                    placed.kept = self._mirrored(placed, self.mirror)
            self.mirror = None

    def keep(self) -> None:
        """Copy contents that neither a fill nor a mirror can bring to host memory; call it before the slab is first released."""
        for placed in self.placed:
            if self.mirror is None and placed.fill is None and placed.kept is None:
                placed.kept = placed.view.to("cpu", copy=True)

    def have_mirror(self, mirror: HostMirror) -> None:
        """Use a mirror of the slab's contents at wakes, and drop the copies of single tensors. The mirror is not filled here."""
        self.mirror = mirror
        for placed in self.placed:
            placed.kept = None

    def mirror_bytes(self) -> tuple[int, int, int]:
        """Return three numbers of bytes that a wake takes its contents from.

        They are bytes in files or of random numbers, this process's host memory, and host memory shared by ranks. With a mirror, only the
        number for the mirror is not 0.
        """
        if self.mirror is not None:
            return (0, self.mirror.nbytes, 0) if self.mirror.shared is None else (0, 0, self.mirror.nbytes)
        in_files = sum(nbytes_of(placed.view) for placed in self.placed if placed.fill is not None)
        return in_files, sum(nbytes_of(placed.kept) for placed in self.placed if placed.kept is not None), 0

    def _mirrored(self, placed: PlacedTensor, mirror: HostMirror) -> torch.Tensor:
        found = torch.empty(placed.view.shape, dtype=placed.view.dtype)
        mirror.read(found.view(-1).view(torch.uint8), start=placed.offset)
        return found


def files_of(components: Iterable[ComponentWeights]) -> list[WeightFile]:
    """List the distinct weight files that fill tensors of components; kept and random contents have none."""
    fills = [placed.fill for component in components for placed in component.placed]
    stored = [fill.stored for fill in fills if isinstance(fill, Fill)]
    return list({id(each.file): each.file for each in stored}.values())


def fill_again(placed: Iterable[PlacedTensor]) -> None:
    """Fill the tensors of a restored slab that has no host mirror: from their files, from random numbers, or from `kept`.

    Raises:
        ConfigError: a file is shorter than expected, or was changed since it was opened; the contents are then undefined.
    """
    found = list(placed)
    fill_tensors(each.fill for each in found if each.fill is not None)
    for each in found:
        if each.kept is not None:
            each.view.copy_(each.kept)


def nbytes_of(tensor: torch.Tensor) -> int:
    """Multiply the number of elements by their size; storage that views share counts for each view."""
    return tensor.numel() * tensor.element_size()
