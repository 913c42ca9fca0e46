# SPDX-License-Identifier: Apache-2.0
"""One answer out of those of all ranks: an error that names each rank that failed, and true only where all say so. Pure."""

from collections.abc import Sequence

import msgspec

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.messages import RpcReply


def require_success(method: str, replies: Sequence[RpcReply]) -> None:
    """Raises one RequestError for all ranks that failed, naming them."""
    failed = [(reply.rank, reply.error) for reply in replies if reply.error is not None]
    if not failed:
        return
    codes = {error.code for _, error in failed}
    messages = {error.message for _, error in failed}
    # The same complaint of every rank is about what was asked; anything else is about the ranks.
    if len(failed) == len(replies) and len(codes) == 1 and len(messages) == 1:
        raise RequestError(ErrorCode(codes.pop()), messages.pop())
    text = "; ".join(f"rank {rank}: {error.message}" for rank, error in failed)
    raise RequestError(ErrorCode.RANK_FAILED, f"{method}: {text}", details={"ranks": [rank for rank, _ in failed]})


def all_true(replies: Sequence[RpcReply]) -> bool:
    """Whether every rank that gave a result gave a true one."""
    return all(msgspec.msgpack.decode(reply.result) is True for reply in replies if reply.result is not None)
