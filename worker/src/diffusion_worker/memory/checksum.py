# SPDX-License-Identifier: Apache-2.0
"""A checksum of tensors in place, at the speed of memory and on their device, so that a copy can be compared with its original.

Every block of bytes is summed as 64-bit numbers, which wrap around. The checksum is the SHA-256 of these sums and of the tensors' shapes
and dtypes. Any flipped bit changes a sum, and swapped blocks change the order of the sums. It is no protection against forgery: swapping
words within a block leaves the block's sum as it was.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

# The sums are 1/8192 of the bytes: few to copy from a device and to hash. A reduction of this length is as fast as any.
BLOCK_BYTES = 1 << 16
WORD_BYTES = 8


class _Run(NamedTuple):
    """Consecutive bytes of a storage that are all contents of tensors. Padding between tensors is left out, because it may be anything."""

    storage: torch.UntypedStorage
    first: int
    last: int


def checksum(tensors: Iterable[torch.Tensor]) -> str:
    """Return the SHA-256, in hexadecimal, of the dtypes, shapes and block sums of tensors. The device does not matter.

    Tensors that adjoin in memory are summed as one, so compare only equal layouts. Memory is needed for sums, and for copies of
    non-contiguous tensors.
    """
    found = [tensor.detach() for tensor in tensors]
    digest = hashlib.sha256("".join(f"{tensor.dtype} {tuple(tensor.shape)}\n" for tensor in found).encode())
    # All sums are started before the first is waited for.
    for sums in [_sums(run) for run in _runs(found)]:
        digest.update(sums.cpu().numpy().tobytes())
    return digest.hexdigest()


def _runs(tensors: Iterable[torch.Tensor]) -> Iterator[_Run]:
    """Join tensors that follow each other in memory into runs, in the given order. Most tensors of a slab form a single run.

    Thousands of small sums would otherwise take longer than adding up all the bytes.
    """
    current: _Run | None = None
    for tensor in tensors:
        run = _run_of(tensor.contiguous())
        if current is not None and run.first == current.last and run.storage.data_ptr() == current.storage.data_ptr():
            current = current._replace(last=run.last)
            continue
        if current is not None:
            yield current
        current = run
    if current is not None:
        yield current


def _run_of(tensor: torch.Tensor) -> _Run:
    first = int(tensor.storage_offset()) * tensor.element_size()
    return _Run(tensor.untyped_storage(), first, first + tensor.numel() * tensor.element_size())


def _sums(run: _Run) -> torch.Tensor:
    """Return int64 sums of the run's 64-bit words, one per block of `BLOCK_BYTES` and one for the rest, padded with zero bytes."""
    flat = torch.empty(0, dtype=torch.uint8, device=run.storage.device).set_(run.storage, run.first, (run.last - run.first,), (1,))
    if run.first % WORD_BYTES:
        flat = flat.clone()
    whole = flat.numel() // BLOCK_BYTES * BLOCK_BYTES
    rest = flat[whole:]
    padded = torch.nn.functional.pad(rest, (0, -rest.numel() % WORD_BYTES))
    return torch.cat([_words(flat[:whole]).view(-1, BLOCK_BYTES // WORD_BYTES).sum(dim=1), _words(padded).sum(dim=0, keepdim=True)])


def _words(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.int64)
