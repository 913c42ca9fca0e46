# SPDX-License-Identifier: Apache-2.0
"""A sleep or a wake as the ranks are told of it, and what their answers mean: it succeeded on all of them, or it failed."""

from collections.abc import Sequence

import msgspec

from diffusion_worker.engine.adapter_ranks import CallAll
from diffusion_worker.engine.documents import RankDocument
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.messages import SleepTask, TaskAck, TaskStatus, WakeTask

# Of a rank's weights, what may still be on its device when it sleeps.
KEPT_SHARE = 0.02


async def run_task(call_all: CallAll, task: SleepTask | WakeTask, *, timeout_s: float) -> list[TaskAck]:
    """The answers of all ranks; raises one RequestError that names the ranks that failed, GroupFailed."""
    kind = "sleep" if isinstance(task, SleepTask) else "wake"
    replies = await call_all(f"handle_{kind}_task", timeout_s=timeout_s, task=task)
    acks = [msgspec.msgpack.decode(reply.result or b"", type=TaskAck) for reply in replies]
    failed = [ack for ack in acks if ack.status is TaskStatus.ERROR]
    if failed:
        message = "; ".join(f"rank {ack.rank}: {ack.error_msg}" for ack in failed)
        raise RequestError(_code(failed), f"{kind}: {message}", details={"ranks": [ack.rank for ack in failed]})
    return acks


def _code(failed: Sequence[TaskAck]) -> ErrorCode:
    """That of all ranks that failed, where they agree: a wake is only tried again where memory is all that is missing."""
    codes = {ack.error_code for ack in failed}
    only = codes.pop() if len(codes) == 1 else None
    return ErrorCode(only) if only in set(ErrorCode) else ErrorCode.RANK_FAILED


def unreleased(ranks: Sequence[RankDocument]) -> str | None:
    """The first rank that keeps more of its weights than it may while it sleeps, with the numbers. Pure."""
    for rank in ranks:
        weights = rank.memory.weights_bytes
        held = rank.memory.weights_resident_bytes + rank.memory.adapter_slots_resident_bytes
        if held > KEPT_SHARE * weights:
            return (
                f"sleep: rank {rank.rank}: expected at most {KEPT_SHARE:.0%} of its {weights} bytes of weights on the device, found {held}"
            )
    return None
