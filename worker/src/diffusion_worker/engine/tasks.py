# SPDX-License-Identifier: Apache-2.0
"""A sleep or a wake as the ranks are told of it, and what their answers mean: it succeeded on all of them, or it failed."""

import msgspec

from diffusion_worker.engine.adapter_ranks import CallAll
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.messages import SleepTask, TaskAck, TaskStatus, WakeTask


async def run_task(call_all: CallAll, method: str, task: SleepTask | WakeTask, *, timeout_s: float) -> list[TaskAck]:
    """The answers of all ranks; raises one RequestError that names the ranks that failed, GroupFailed."""
    replies = await call_all(method, timeout_s=timeout_s, task=task)
    acks = [msgspec.msgpack.decode(reply.result or b"", type=TaskAck) for reply in replies]
    failed = [ack for ack in acks if ack.status is TaskStatus.ERROR]
    if failed:
        kind = "sleep" if isinstance(task, SleepTask) else "wake"
        message = "; ".join(f"rank {ack.rank}: {ack.error_msg}" for ack in failed)
        raise RequestError(ErrorCode(failed[0].error_code or ErrorCode.RANK_FAILED), f"{kind}: {message}")
    return acks
