# SPDX-License-Identifier: Apache-2.0
"""Failures of requests between model calls, shared with all ranks so that none runs a request another has given up."""

import hashlib

import msgspec
import torch
import torch.distributed as dist

from diffusion_worker.main_thread import OWN
from diffusion_worker.messages import ErrorReport
from diffusion_worker.runner.parallel.rows import Parallel

Failures = dict[str, ErrorReport]

_decoder: msgspec.json.Decoder[Failures] = msgspec.json.Decoder(Failures)


def failures_of_all(parallel: Parallel, mine: Failures) -> Failures:
    """Return the failures of all ranks by request id; if several ranks have one, the lowest rank's counts. All ranks call this together.

    Without failures this costs one small collective.
    """
    OWN.passed()
    if parallel.world == 1:
        return mine
    found: Failures = {}
    for text in filter(None, texts_of_all(parallel, msgspec.json.encode(mine) if mine else b"")):
        found = _decoder.decode(text) | found
    return found


def texts_of_all(parallel: Parallel, mine: bytes) -> list[bytes]:
    """Return the texts of all ranks in order; a text has no zero byte. All ranks call this together.

    If all texts are empty, this costs one small collective.
    """
    if parallel.world == 1:
        return [mine]
    longest = torch.tensor([len(mine)])
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    if not (size := int(longest)):
        return [b""] * parallel.world
    # The padding can be recognised.
    flat = torch.frombuffer(bytearray(mine.ljust(size, b"\0")), dtype=torch.uint8)
    parts: list[torch.Tensor] = [torch.empty_like(flat) for _ in range(parallel.world)]
    dist.all_gather(parts, flat)
    return [bytes(part.tolist()).rstrip(b"\0") for part in parts]


def same_on_all(parallel: Parallel, word: str) -> bool:
    """Return whether every rank passes the same word. All ranks call this together, and get the same answer."""
    if parallel.world == 1:
        return True
    number = int.from_bytes(hashlib.sha256(word.encode()).digest()[:7])
    extremes = torch.tensor([number, -number])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    return int(extremes[0]) == number and int(extremes[1]) == -number
