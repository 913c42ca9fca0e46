# SPDX-License-Identifier: Apache-2.0
"""The rows of one call over some ranks: the part that each rank computes, and the gathering of all parts on every rank.

Tensors stay on their device: the group's back end for it (NCCL, gloo) moves them.
"""

import itertools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from diffusion_worker.runner.model_call.call import tensors_of, with_tensors


class Packed(NamedTuple):
    """The bytes of the rows computed here, a line for each, and the room for those of all parts."""

    mine: torch.Tensor
    everything: torch.Tensor


class RowGroup:
    """A group of `count` ranks, each with a part of the rows, this process with part `index`. None as group means all ranks."""

    def __init__(self, index: int, count: int, group: dist.ProcessGroup | None) -> None:
        self.index = index
        self.count = count
        self._group = group

    def part(self, rows: int) -> slice:
        """Return the rows that are computed here. With fewer rows than parts the spare parts repeat the last row.

        Spare ranks would only wait. With a row to compute they know the shapes of the output, and take part in collectives inside the call.
        """
        cuts = self._cuts(rows)
        mine = slice(cuts[self.index], cuts[self.index + 1])
        return mine if mine.start < mine.stop else slice(rows - 1, rows)

    def pack(self, output: Any, rows: int) -> Packed:
        """Join the tensors of an output computed here to one of bytes, a line for each row, and make the room that `gather` needs.

        Zeros fill it to the rows of the largest part, so that all ranks send the same size.

        Raises:
            TypeError: the length of a tensor is no multiple of the number of rows computed here.
        """
        count = self._computed(rows)
        tensors = tensors_of(output)
        for tensor in tensors:
            if tensor.dim() == 0 or tensor.shape[0] % count:
                raise TypeError(f"a model's output of shape {tuple(tensor.shape)} cannot be gathered from ranks by {count} rows")
        flat = [tensor.contiguous().reshape(count, -1).view(torch.uint8) for tensor in tensors]
        if len(flat) == 1 and count == max(self._counts(rows)):
            return self._with_room(flat[0])
        packed = tensors[0].new_zeros(max(self._counts(rows)), sum(part.shape[1] for part in flat), dtype=torch.uint8)
        torch.cat(flat, dim=1, out=packed[:count])
        return self._with_room(packed)

    def gather(self, output: Any, packed: Packed, rows: int) -> Any:
        """Return the output of all `rows` rows from the ranks' packed ones, by one collective for any number of tensors."""
        count, mine = self._computed(rows), tensors_of(output)
        everything = self._exchange(packed.mine.reshape(-1), packed.everything).reshape(self.count, *packed.mine.shape)
        counts = self._counts(rows)
        if min(counts) == max(counts):
            whole = everything.reshape(rows, -1)
        else:
            whole = torch.cat([part[:used] for part, used in zip(everything, counts, strict=True)])
        widths = [tensor.numel() // count * tensor.element_size() for tensor in mine]
        # Each column is copied, because a view at its offset may not be aligned for the tensor's dtype.
        columns = [column.contiguous() for column in torch.split(whole, widths, dim=1)]
        tensors = [
            column.view(tensor.dtype).reshape(rows * (tensor.shape[0] // count), *tensor.shape[1:])
            for column, tensor in zip(columns, mine, strict=True)
        ]
        return with_tensors(output, tensors)

    def gather_bytes(self, mine: torch.Tensor) -> torch.Tensor:
        """Return the flat uint8 tensors of all parts, which have equal sizes, one after the other."""
        return self._exchange(mine, mine.new_empty(self.count, mine.numel()))

    def _with_room(self, packed: torch.Tensor) -> Packed:
        return Packed(packed, packed.new_empty(self.count, packed.numel()))

    def _exchange(self, mine: torch.Tensor, everything: torch.Tensor) -> torch.Tensor:
        dist.all_gather(list(everything), mine, group=self._group)
        return everything.reshape(-1)

    def _computed(self, rows: int) -> int:
        mine = self.part(rows)
        return int(mine.stop - mine.start)

    def _counts(self, rows: int) -> list[int]:
        return [stop - start for start, stop in itertools.pairwise(self._cuts(rows))]

    def _cuts(self, rows: int) -> list[int]:
        return [rows * index // self.count for index in range(self.count + 1)]
