# SPDX-License-Identifier: Apache-2.0
"""A sleep or a wake in the ranks' terms, and the meaning of their answers: success on all of them, or failure."""

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
# The kernel gives memory back within milliseconds, and a driver may take its time.
SECOND_LOOK_S = 1.0


class SleepingRanks:
    """The ranks of one group as a sleep and a wake see them; each call has `call_timeout_s` where nothing else is said."""

    def __init__(self, ranks: RankGroup, call_all: CallAll, *, call_timeout_s: float) -> None:
        self.call_timeout_s = call_timeout_s
        self._ranks = ranks
        self._call_all = call_all

    @property
    def level(self) -> SleepLevel | None:
        """Return the level of their sleep; None if they are awake."""
        return next((rank.memory.level for rank in self._ranks.documents() if rank.memory.level is not None), None)

    @property
    def whole(self) -> bool:
        """Return whether none lacks anything."""
        return not any(rank.memory.asleep for rank in self._ranks.documents())

    @property
    def partly_awake(self) -> bool:
        """Return whether a sleeping rank has something back already."""
        return any(set(rank.memory.asleep) != set(MemoryTag) for rank in self._ranks.documents())

    async def tell(self, task: SleepTask | WakeTask, *, timeout_s: float | None = None) -> list[TaskAck]:
        """The answers of all ranks; raises one RequestError that names the ranks that failed, GroupFailed."""
        kind = "sleep" if isinstance(task, SleepTask) else "wake"
        limit_s = self.call_timeout_s if timeout_s is None else timeout_s
        replies = await self._call_all(f"handle_{kind}_task", timeout_s=limit_s, task=task)
        acks = [msgspec.msgpack.decode(reply.result or b"", type=TaskAck) for reply in replies]
        failed = [ack for ack in acks if ack.status is TaskStatus.ERROR]
        if failed:
            message = "; ".join(f"rank {ack.rank}: {ack.error_msg}" for ack in failed)
            raise RequestError(_code(failed), f"{kind}: {message}", details={"ranks": [ack.rank for ack in failed]})
        return acks

    async def require_released(self) -> None:
        """Raises RequestError (MemoryNotReleased) that names a rank which keeps its weights, at the second look; GroupFailed."""
        if unreleased(self._ranks.documents()) is None:
            return
        await asyncio.sleep(SECOND_LOOK_S)
        await self._call_all("synchronize", timeout_s=self.call_timeout_s)
        if (problem := unreleased(self._ranks.documents())) is not None:
            raise RequestError(ErrorCode.MEMORY_NOT_RELEASED, problem)

    def lose(self, error: RequestError) -> None:
        """Nothing is known of them any more because of an error: they are lost."""
        self._ranks.lose(error.message, Fault.STALLED if error.code is ErrorCode.TIMEOUT else Fault.DEFECT)


def _code(failed: Sequence[TaskAck]) -> ErrorCode:
    """Return the code that all failed ranks agree on: a wake is retried only if memory alone is missing."""
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
