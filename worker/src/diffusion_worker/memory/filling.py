# SPDX-License-Identifier: Apache-2.0
"""Tensors filled from files, or with random numbers.

For files several threads read large pieces, in the order of the file, straight to where they belong.

Tensors of the file's dtype in host memory are read into place. All others pass through a buffer of one piece per thread, so a load needs no
further memory.
"""

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from diffusion_worker.memory.random_weights import RandomTensor
from diffusion_worker.memory.weight_files import StoredTensor

# Large enough for a disk's full speed, small enough for a cache: from 4 to 16 MiB there was no difference.
PIECE_BYTES = 8 << 20
# Converted bytes are read twice; the second time they should still be in a core's own cache.
CONVERTED_PIECE_BYTES = 1 << 20
# A read fills this many tensors at most; the kernel takes 1,024.
MOST_BUFFERS = 512
BUFFER_ALIGNMENT = 64
FEWEST_READERS, MOST_READERS = 4, 16

# Bytes requested from the system ahead: more than a disk delivers while a model is built, but few enough to stay in memory.
AHEAD_BYTES = 1 << 30

ReportBytes = Callable[[int], None]


class Fill(NamedTuple):
    """A contiguous tensor to be filled with a stored one, or with the part that `cut` makes of it."""

    view: torch.Tensor
    stored: StoredTensor
    cut: Callable[[torch.Tensor], torch.Tensor] | None = None


class RandomFill(NamedTuple):
    """A contiguous tensor to be filled with random numbers, or with the part of them that `cut` takes."""

    view: torch.Tensor
    random: RandomTensor
    cut: Callable[[torch.Tensor], torch.Tensor] | None = None


class _Piece(NamedTuple):
    """Consecutive bytes of a file, from `start` on, and the flat tensors that they fill in this order."""

    stored: list[StoredTensor]
    targets: list[torch.Tensor]
    start: int


class _Cut(NamedTuple):
    fill: Fill


def fill_tensors(fills: Iterable[Fill | RandomFill], report: ReportBytes = lambda count: None) -> None:
    """Fill all tensors; `report` is called on this thread with each count of bytes that are in place, in the tensors' dtypes.

    Raises:
        ConfigError: a file ends early, or was written to since it was opened; the tensors' contents are undefined then.
    """
    from_files: list[Fill] = []
    for fill in fills:
        if isinstance(fill, Fill):
            from_files.append(fill)
        else:
            fill.random.fill(fill.view, fill.cut)
            report(fill.view.nbytes)
    ordered = sorted(from_files, key=lambda fill: (str(fill.stored.file.path), fill.stored.start))
    readers = min(MOST_READERS, max(FEWEST_READERS, torch.get_num_threads()))
    with _one_core_each(), ThreadPoolExecutor(readers, "read-weights") as pool:
        for count in pool.map(_run, list(_jobs(ordered))):
            report(count)
    for file in {id(fill.stored.file): fill.stored.file for fill in ordered}.values():
        file.check_unchanged()
        file.unmap()


@contextlib.contextmanager
def _one_core_each() -> Iterator[None]:
    """Keep conversions in the readers' threads from starting threads of their own, which made a load a quarter longer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def read_ahead(stored: Iterable[StoredTensor]) -> None:
    """Ask the system to start reading the files of some tensors, up to `AHEAD_BYTES`; return at once."""
    files = list({id(tensor.file): tensor.file for tensor in stored}.values())

    def ask() -> None:
        left = AHEAD_BYTES
        for file in files:
            asked = min(left, file.size)
            os.posix_fadvise(file.descriptor, 0, asked, os.POSIX_FADV_WILLNEED)
            left -= asked
            if not left:
                return

    # The call itself waits for a busy disk.
    threading.Thread(target=ask, name="read-ahead", daemon=True).start()


def read_tensor(stored: StoredTensor) -> torch.Tensor:
    """Read a stored tensor into new host memory and return it; raises ConfigError as `fill_tensors`."""
    whole = torch.empty(stored.shape, dtype=stored.dtype)
    fill_tensors([Fill(whole, stored)])
    return whole


def _jobs(fills: Sequence[Fill]) -> Iterator[_Piece | _Cut]:
    """Split fills, sorted by their place in files, into jobs for the readers.

    Adjacent small tensors share a read; each fill with a `cut` is a job.
    """
    pending: list[tuple[StoredTensor, torch.Tensor, int]] = []
    for fill in fills:
        if fill.cut is not None:
            yield _Cut(fill)
            continue
        for stored, target, start in _pieces_of(fill):
            if pending and not _goes_on(pending, stored, target, start):
                yield _joined(pending)
                pending = []
            pending.append((stored, target, start))
    if pending:
        yield _joined(pending)


def _pieces_of(fill: Fill) -> Iterator[tuple[StoredTensor, torch.Tensor, int]]:
    flat, itemsize = fill.view.view(-1), fill.stored.dtype.itemsize
    each = _most_bytes(fill.stored, flat) // itemsize
    for begin in range(0, flat.numel(), each):
        yield fill.stored, flat[begin : begin + each], fill.stored.start + begin * itemsize


def _goes_on(pending: list[tuple[StoredTensor, torch.Tensor, int]], stored: StoredTensor, target: torch.Tensor, start: int) -> bool:
    last, last_target, last_start = pending[-1]
    end = last_start + last_target.numel() * last.dtype.itemsize
    size = end - pending[0][2] + target.numel() * stored.dtype.itemsize
    return last.file is stored.file and end == start and size <= _most_bytes(stored, target) and len(pending) < MOST_BUFFERS


def _most_bytes(stored: StoredTensor, target: torch.Tensor) -> int:
    return PIECE_BYTES if target.dtype == stored.dtype or target.device.type != "cpu" else min(PIECE_BYTES, CONVERTED_PIECE_BYTES)


def _joined(pending: list[tuple[StoredTensor, torch.Tensor, int]]) -> _Piece:
    stored, targets, starts = zip(*pending, strict=True)
    return _Piece(list(stored), list(targets), starts[0])


def _run(job: "_Piece | _Cut") -> int:
    """Read one job's tensors into their places, on a reader's thread; return the number of bytes there, in the dtypes of the tensors."""
    if isinstance(job, _Cut):
        view, stored, cut = job.fill
        assert cut is not None
        view.copy_(cut(_mapped(stored)))
        return view.nbytes
    buffers = _buffers_for(job)
    job.stored[0].file.read_exactly([_bytes_of(buffer) for buffer in buffers], job.start)
    for buffer, target in zip(buffers, job.targets, strict=True):
        if buffer is not target:
            target.copy_(buffer, non_blocking=True)
    if (device := job.targets[0].device).type == "cuda":
        # This thread's next job writes to the same staging memory.
        torch.cuda.current_stream(device).synchronize()
    return sum(target.nbytes for target in job.targets)


_staging = threading.local()


def _buffers_for(job: _Piece) -> list[torch.Tensor]:
    """Return the buffers that a piece is read into: its tensors, or this thread's staging memory for what is converted or moved."""
    buffers, used = [], 0
    for stored, target in zip(job.stored, job.targets, strict=True):
        if target.dtype == stored.dtype and target.device.type == "cpu":
            buffers.append(target)
            continue
        size = target.numel() * stored.dtype.itemsize
        buffers.append(_staging_memory(target.device)[used : used + size].view(stored.dtype))
        used += -(-size // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT
    return buffers


def _staging_memory(device: torch.device) -> torch.Tensor:
    pinned = device.type == "cuda"
    memory = getattr(_staging, "memory", None)
    if memory is None or (pinned and not memory.is_pinned()):
        memory = torch.empty(PIECE_BYTES + MOST_BUFFERS * BUFFER_ALIGNMENT, dtype=torch.uint8, pin_memory=pinned)
        _staging.memory = memory
    return memory


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's memory as writable bytes. A view by numpy would keep the storage from being resized later."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))


def _mapped(stored: StoredTensor) -> torch.Tensor:
    """Return a stored tensor as it lies in its mapped file, of which only touched pages are read; copy it if it is not aligned."""
    content = stored.file.mapped()[stored.start : stored.start + stored.nbytes]
    if stored.start % stored.dtype.itemsize:
        content = content.clone()
    return content.view(stored.dtype).view(stored.shape)
