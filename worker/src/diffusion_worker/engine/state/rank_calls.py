# SPDX-License-Identifier: Apache-2.0
"""Calls to all ranks, and one result from their replies: an error that names each failed rank, and true only if all say true."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from diffusion_worker.engine.state.rank_protocol import RankGroup
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.messages import RpcReply


class CallAll(Protocol):
    """The type of `RankCalls.call_all`, for code that needs no more than calls to the ranks."""

    async def __call__(self, method: str, *, timeout_s: float, **kwargs: object) -> list[RpcReply]:
        """Call `method` with `kwargs` on all ranks, and wait up to `timeout_s` seconds; return and raise as `RankCalls.call_all` does."""


class RankCalls:
    """The calls to one rank group."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks

    async def call_all(self, method: str, *, timeout_s: float, **kwargs: object) -> list[RpcReply]:
        """Run a method on all ranks at once; return a reply of each, in rank order and without errors.

        Raises:
            RequestError: Timeout; the error of all ranks, if it is the same; otherwise RankFailed, with the ranks that failed in `details`.
        """
        replies = await self._ranks.call(method, timeout_s=timeout_s, output_rank=None, exec_all_ranks=False, **kwargs)
        require_success(method, replies)
        return replies


def require_success(method: str, replies: Sequence[RpcReply]) -> None:
    """Raise RequestError if any reply has an error: that error if all ranks agree on it, otherwise RankFailed with every message."""
    failed = [(reply.rank, reply.error) for reply in replies if reply.error is not None]
    if not failed:
        return
    codes = {error.code for _, error in failed}
    messages = {error.message for _, error in failed}
    # The same error on every rank is about the call. Anything else is about the ranks.
    if len(failed) == len(replies) and len(codes) == 1 and len(messages) == 1:
        raise RequestError(ErrorCode(codes.pop()), messages.pop())
    text = "; ".join(f"rank {rank}: {error.message}" for rank, error in failed)
    raise RequestError(ErrorCode.RANK_FAILED, f"{method}: {text}", details={"ranks": [rank for rank, _ in failed]})


def all_true(replies: Sequence[RpcReply]) -> bool:
    """Return whether every result is true; replies without a result do not count, so it is True if none has one."""
    return all(msgspec.msgpack.decode(reply.result) is True for reply in replies if reply.result is not None)
