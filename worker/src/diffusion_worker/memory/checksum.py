# SPDX-License-Identifier: Apache-2.0
"""A checksum of tensors in place, at the speed of memory and on their device, so that a copy can be compared with its original.

Every block of bytes is summed as 64-bit numbers, which wrap around. The checksum is the SHA-256 of these sums and of the tensors' shapes
and dtypes. Any flipped bit changes a sum, and a block in the place of another one changes their order. It is no proof against somebody who
means to deceive: words of one block that changed places have the same sum.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

# The sums are 1/8192 of the bytes: few to copy from a device and to hash. A reduction of this length is as fast as any.
BLOCK_BYTES = 1 << 16
WORD_BYTES = 8


class _Run(NamedTuple):
    """Consecutive bytes of a storage, all of them contents of tensors: what lies between tensors may be anything."""

    storage: torch.UntypedStorage
    first: int
    last: int


def checksum(tensors: Iterable[torch.Tensor]) -> str:
    """The checksum of tensors in this order, in hexadecimal digits; the same wherever they are.

    Needs memory for the sums, and for a copy of a tensor that is not contiguous.
    """
    found = [tensor.detach() for tensor in tensors]
    digest = hashlib.sha256("".join(f"{tensor.dtype} {tuple(tensor.shape)}\n" for tensor in found).encode())
    # All sums are begun before the first is waited for.
    for sums in [_sums(run) for run in _runs(found)]:
        digest.update(sums.cpu().numpy().tobytes())
    return digest.hexdigest()


def _runs(tensors: Iterable[torch.Tensor]) -> Iterator[_Run]:
    """Tensors that lie side by side share a run, as nearly all of a slab do. A sum for each of a thousand would cost more than summing."""
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
    """Return a sum for each block, the last of which may be shorter."""
    flat = torch.empty(0, dtype=torch.uint8, device=run.storage.device).set_(run.storage, run.first, (run.last - run.first,), (1,))
    if run.first % WORD_BYTES:
        flat = flat.clone()
    whole = flat.numel() // BLOCK_BYTES * BLOCK_BYTES
    rest = flat[whole:]
    padded = torch.nn.functional.pad(rest, (0, -rest.numel() % WORD_BYTES))
    return torch.cat([_words(flat[:whole]).view(-1, BLOCK_BYTES // WORD_BYTES).sum(dim=1), _words(padded).sum(dim=0, keepdim=True)])


def _words(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.int64)
