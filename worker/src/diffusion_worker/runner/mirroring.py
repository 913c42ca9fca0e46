# SPDX-License-Identifier: Apache-2.0
"""Mirrors of the weights in host memory, made by all ranks together: ranks whose weights are alike share one.

All mirrors of the pod must fit into its memory before the first byte is allocated. The lowest of the ranks that share writes the mirror.
If the driver of one rank does not register shared memory, each rank has a mirror of its own.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import torch

from diffusion_worker.memory.checksum import checksum
from diffusion_worker.memory.host_memory import available_host_bytes
from diffusion_worker.memory.host_mirror import own_bytes, require_room, shared_bytes, shared_mirrors
from diffusion_worker.memory.shared_memory import SharedMemory, new_memory
from diffusion_worker.memory.weights import ModelWeights
from diffusion_worker.runner.parallel.agreement import texts_of_all
from diffusion_worker.runner.parallel.rows import Parallel

log = logging.getLogger(__name__)


class Need(msgspec.Struct, frozen=True):
    """The mirrors that a rank needs, by the sizes of its slabs, and the free host memory that it sees, in bytes.

    `key` is the checksum of its weights, or empty where it cannot share.
    """

    sizes: list[int]
    key: str
    free_bytes: int


def mirror_weights(weights: ModelWeights, parallel: Parallel, device: torch.device, *, alike: bool) -> None:
    """Copy the slabs that have no mirror yet to host memory; `alike` ranks with equal weights share one copy.

    Call it on all ranks together. Nothing happens on a CPU, or if no rank lacks a mirror.

    Raises:
        RequestError: InsufficientMemory, on all ranks. CallFailed: on all ranks, when an allocation or a copy failed on one.
    """
    if not weights.has_mirrors:
        return
    began = time.monotonic()
    sizes = weights.unmirrored
    key = checksum(weights.tensors()) if alike and sizes and parallel.world > 1 else ""
    needs = _needs_of_all(parallel, Need(sizes, key, available_host_bytes()))
    if not any(need.sizes for need in needs):
        return
    _require_room(needs)
    shared = _share(weights, parallel, device, needs)
    if not shared:
        if any(need.key for need in needs):
            # The ranks need more now, and the system has its memory of the attempt back.
            needs = _needs_of_all(parallel, Need(sizes, "", available_host_bytes()))
            _require_room(needs)
        _on_all(weights, parallel, weights.make_mirrors)
    log.info("mirrored the weights bytes=%d shared=%s seconds=%.3f", sum(sizes), shared, time.monotonic() - began)


def leaders_of(needs: Sequence[Need]) -> list[int]:
    """Return for each rank the lowest rank that it shares a mirror with, or itself. Pure."""
    first: dict[tuple[str, tuple[int, ...]], int] = {}
    return [first.setdefault((need.key, tuple(need.sizes)), rank) if need.key else rank for rank, need in enumerate(needs)]


def needed_bytes(needs: Sequence[Need]) -> int:
    """Return the host memory that the mirrors of all ranks take together. Pure."""
    leaders = leaders_of(needs)
    total = 0
    for rank, need in enumerate(needs):
        if leaders.count(leaders[rank]) == 1:
            total += own_bytes(need.sizes)
        elif leaders[rank] == rank:
            total += shared_bytes(need.sizes)
    return total


def _require_room(needs: Sequence[Need]) -> None:
    require_room(needed_bytes(needs), min(need.free_bytes for need in needs), ranks=len(needs))


def _needs_of_all(parallel: Parallel, mine: Need) -> list[Need]:
    return [msgspec.json.decode(text, type=Need) for text in texts_of_all(parallel, msgspec.json.encode(mine))]


def _share(weights: ModelWeights, parallel: Parallel, device: torch.device, needs: Sequence[Need]) -> bool:
    """Share mirrors among the ranks that can; return False, on all ranks, where nobody can or one cannot map or register the memory."""
    leaders = leaders_of(needs)
    if len(set(leaders)) == len(leaders):
        return False
    leader, sizes = leaders[parallel.rank], needs[parallel.rank].sizes
    shares = leaders.count(leader) > 1
    with _new_memory(shared_bytes(sizes) if shares and leader == parallel.rank else 0) as (mine, problem):
        paths = texts_of_all(parallel, mine.encode())
        memory = None
        try:
            memory = SharedMemory(paths[leader].decode(), shared_bytes(sizes), device) if shares else None
        except (OSError, RuntimeError) as error:
            problem = problem or f"{type(error).__name__}: {error}"
        problems = texts_of_all(parallel, problem.encode())
    if any(problems):
        words = "; ".join(f"rank {rank}: {text.decode()}" for rank, text in enumerate(problems) if text)
        log.warning("the ranks do not share a copy of the weights in host memory, each has its own: %s", words)
        return False

    def have() -> None:
        if memory is None:
            weights.make_mirrors()
        else:
            weights.have_mirrors(shared_mirrors(sizes, memory), fill=leader == parallel.rank)

    _on_all(weights, parallel, have)
    return True


@contextlib.contextmanager
def _new_memory(size: int) -> Iterator[tuple[str, str]]:
    """Yield the path of new shared memory and an empty problem, or an empty path and the problem; two empty texts if `size` is 0."""
    with contextlib.ExitStack() as stack:
        path = problem = ""
        try:
            path = stack.enter_context(new_memory(size)) if size else ""
        except OSError as error:
            problem = f"{type(error).__name__}: {error}"
        yield path, problem


def _on_all(weights: ModelWeights, parallel: Parallel, have: Callable[[], None]) -> None:
    """Run `have` on all ranks. If it fails on one, none keeps a mirror, as its writer may not have ended."""
    if parallel.world == 1:
        have()
        return
    try:
        parallel.agree(have)
    except BaseException:
        weights.drop_mirrors()
        raise
