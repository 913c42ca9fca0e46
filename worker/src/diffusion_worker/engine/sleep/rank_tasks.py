# SPDX-License-Identifier: Apache-2.0
"""The tasks of a sleep and a wake for the ranks, and the meaning of their answers: success on all of them, or failure."""

import asyncio
from collections.abc import Sequence

import msgspec

from diffusion_worker.engine.state.rank_calls import CallAll
from diffusion_worker.engine.state.rank_protocol import RankGroup
from diffusion_worker.engine.state.state_document import RankDocument
from diffusion_worker.errors import ErrorCode, Fault, RequestError
from diffusion_worker.messages import MemoryTag, SleepLevel, SleepTask, TaskAck, TaskStatus, WakeTask

# The share of a rank's weights that may stay on its device during a sleep.
KEPT_SHARE = 0.02
# Pause before a second look: the kernel frees memory within milliseconds, but a driver may take longer.
SECOND_LOOK_S = 1.0


class SleepingRanks:
    """The ranks of one group for a sleep and a wake; each call has `call_timeout_s` unless another time is given."""

    def __init__(self, ranks: RankGroup, call_all: CallAll, *, call_timeout_s: float) -> None:
        self.call_timeout_s = call_timeout_s
        self._ranks = ranks
        self._call_all = call_all

    @property
    def level(self) -> SleepLevel | None:
        """Level of their sleep; None if they are awake."""
        return next((rank.memory.level for rank in self._ranks.documents() if rank.memory.level is not None), None)

    @property
    def whole(self) -> bool:
        """Return whether all memory of all ranks is there."""
        return not any(rank.memory.asleep for rank in self._ranks.documents())

    @property
    def partly_awake(self) -> bool:
        """Return whether some rank has part or all of its memory; also true for awake ranks."""
        return any(set(rank.memory.asleep) != set(MemoryTag) for rank in self._ranks.documents())

    async def mirror(self) -> None:
        """Have all ranks mirror their weights in host memory, as far as they have not yet.

        Raises:
            RequestError: InsufficientMemory; that of a rank that failed. GroupFailed.
        """
        await self._call_all("mirror_weights", timeout_s=self.call_timeout_s)

    async def tell(self, task: SleepTask | WakeTask, *, timeout_s: float | None = None) -> list[TaskAck]:
        """Give a task to all ranks and return their answers; raise one RequestError that names the failed ranks, or GroupFailed."""
        kind, method = ("sleep", "handle_sleep_task") if isinstance(task, SleepTask) else ("wake", "handle_wake_task")
        limit_s = self.call_timeout_s if timeout_s is None else timeout_s
        replies = await self._call_all(method, timeout_s=limit_s, task=task)
        acks = [msgspec.msgpack.decode(reply.result or b"", type=TaskAck) for reply in replies]
        failed = [ack for ack in acks if ack.status is TaskStatus.ERROR]
        if failed:
            message = "; ".join(f"rank {ack.rank}: {ack.error_msg}" for ack in failed)
            raise RequestError(_code(failed), f"{kind}: {message}", details={"ranks": [ack.rank for ack in failed]})
        return acks

    async def require_released(self) -> None:
        """Raise RequestError (MemoryNotReleased) with a rank that still keeps its weights after a second look, or GroupFailed."""
        if unreleased(self._ranks.documents()) is None:
            return
        await asyncio.sleep(SECOND_LOOK_S)
        await self._call_all("synchronize", timeout_s=self.call_timeout_s)
        if (problem := unreleased(self._ranks.documents())) is not None:
            raise RequestError(ErrorCode.MEMORY_NOT_RELEASED, problem)

    def lose(self, error: RequestError) -> None:
        """End the ranks as lost, because their state is unknown after an error."""
        self._ranks.lose(error.message, Fault.STALLED if error.code is ErrorCode.TIMEOUT else Fault.DEFECT)


def _code(failed: Sequence[TaskAck]) -> ErrorCode:
    """Return the code that all failed ranks share, or RankFailed. A wake is retried only if all lack memory."""
    codes = {ack.error_code for ack in failed}
    only = codes.pop() if len(codes) == 1 else None
    return ErrorCode(only) if only in set(ErrorCode) else ErrorCode.RANK_FAILED


def unreleased(ranks: Sequence[RankDocument]) -> str | None:
    """Return a message with the numbers about the first rank that keeps too much on its device during a sleep; None without one.

    Weights and adapter slots together may be `KEPT_SHARE` of the weights. Pure.
    """
    for rank in ranks:
        weights = rank.memory.weights_bytes
        held = rank.memory.weights_resident_bytes + rank.memory.adapter_slots_resident_bytes
        most = KEPT_SHARE * weights
        if held > most:
            return (
                f"sleep: rank {rank.rank}: expected at most {most:.0f} bytes left on the device, {KEPT_SHARE:.0%} of its weights, "
                f"found {held} bytes"
            )
    return None
