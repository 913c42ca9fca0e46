# SPDX-License-Identifier: Apache-2.0
"""The ranks of a group at work together: one process group, the rows of a merged call spread over it and gathered.

All ranks run the same fibers with the same seeds and reach the same calls in the same order, so nothing but the rows of
outputs is exchanged. An exception on one rank becomes the same exception on all of them, so that no rank waits in a
collective for one that has left.
"""

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from diffusion_worker.runner.calls import ModelCall, slice_rows, tensors_of, with_tensors


class CallFailed(Exception):
    """Raised on every rank when a model call failed on one; `message` names the rank."""


class Parallel:
    """This rank's part in its group. The device decides the back end: NCCL beside gloo on GPUs, gloo alone on CPUs."""

    def __init__(self, *, rank: int, world: int, device: torch.device, store: Store, timeout_s: float) -> None:
        self.rank = rank
        self.world = world
        self.device = device
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))

    def run(self, call: ModelCall, execute: Callable[[ModelCall, slice], Any]) -> Any:
        """Run a call with its rows spread over the ranks; `execute` runs some rows of it here.

        With fewer rows than ranks the spare ones repeat the last row: they would wait anyway, and so they know the shapes.
        """
        rows = call.rows
        if self.world == 1 or rows == 1:
            return self._agree(lambda: execute(call, slice(0, rows)))
        cuts = [rows * index // self.world for index in range(self.world + 1)]
        mine = slice(cuts[self.rank], cuts[self.rank + 1])
        used = mine if mine.start < mine.stop else slice(rows - 1, rows)
        output = self._agree(lambda: execute(slice_rows(call, used.start, used.stop), used))
        counts = [stop - start for start, stop in itertools.pairwise(cuts)]
        return with_tensors(output, [self._gather(tensor, counts) for tensor in tensors_of(output)])

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()

    def _agree(self, run: Callable[[], Any]) -> Any:
        """Run, and raise `CallFailed` on all ranks if it raised on any."""
        try:
            output, message = run(), b""
        except Exception as error:
            output, message = None, f"rank {self.rank}: {type(error).__name__}: {error}".encode()[:2000]
        if self.world > 1:
            message = self._first_message(message)
        if message:
            raise CallFailed(message.decode(errors="replace"))
        return output

    def _first_message(self, mine: bytes) -> bytes:
        """The message of the lowest rank that has one."""
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(lengths, torch.tensor([len(mine)]))
        longest = max(int(length) for length in lengths)
        if longest == 0:
            return b""
        padded = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8)
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(texts, padded)
        return next(bytes(text[: int(length)].tolist()) for text, length in zip(texts, lengths, strict=True) if int(length))

    def _gather(self, mine: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """The rows of all ranks in order. Parts are padded to one size: gloo gathers nothing else."""
        padded = mine.new_zeros(max(counts), *mine.shape[1:])
        padded[: mine.shape[0]] = mine
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
