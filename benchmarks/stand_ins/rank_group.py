# SPDX-License-Identifier: Apache-2.0
"""The common part of the stand-ins that benchmarks have for a rank group.

A benchmark hands them to what takes a `RankGroup`, so mypy fails where that protocol changes and they do not.
"""

import asyncio
import os

import msgspec

from diffusion_worker.engine.state.rank_protocol import Loss, PreparedAdapter
from diffusion_worker.engine.state.state_document import RankDocument, RankState
from diffusion_worker.errors import ErrorCode, Fault, GroupFailed, RequestError
from diffusion_worker.messages import Fingerprint, MemoryReport, ModelInfo, PreparedPart, RpcReply

MODEL = ModelInfo(pipeline="Benchmark", dtype="none", size_multiple=8, weights_bytes=0)


class NothingPrepared:
    """A prepared adapter without parts, for ranks that keep nothing of it."""

    @property
    def parts(self) -> list[PreparedPart]:
        """An empty list: no rank has a part."""
        return []

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""


class StandInRanks:
    """The base of a stand-in with a single rank that holds nothing, is ready at once and is never lost by itself.

    Subclasses add what it does with ticks: `broadcast_tick` and `next_report`.
    """

    def __init__(self) -> None:
        self.generation = 1
        self.loss: Loss | None = None
        self.dropped_frames = (0, 0)
        self._lost = asyncio.Event()

    async def start(self, *, asleep: bool = False) -> ModelInfo:
        """Return the description of a model without weights, at once; `asleep` is ignored."""
        return MODEL

    async def restart(self, *, asleep: bool = False) -> ModelInfo:
        """Refuse to go on after a loss, since figures from then on would be of something else.

        Raises:
            GroupFailed: always, with the reason of the loss.
        """
        raise GroupFailed(f"the ranks of a benchmark were lost: {self.loss}")

    def lose(self, reason: str, fault: Fault) -> None:
        """Keep the first loss and wake all who wait in `failed`; later losses change nothing."""
        self.loss = self.loss or Loss(reason, fault)
        self._lost.set()

    async def call(
        self, method: str, *, timeout_s: float, output_rank: int | None = None, exec_all_ranks: bool = False, **kwargs: object
    ) -> list[RpcReply]:
        """Answer `fingerprint` with that of no weights, and `mirror_weights`, which has nothing to copy; refuse every other method.

        Raises:
            RequestError: RankFailed, another method.
        """
        if method == "mirror_weights":
            return [RpcReply(0, 0)]
        if method != "fingerprint":
            raise RequestError(ErrorCode.RANK_FAILED, f"{method}: expected ranks, found a benchmark")
        return [RpcReply(0, 0, msgspec.msgpack.encode(Fingerprint(weights="none", probe="none")))]

    async def prepare_adapter(self, request: dict[str, object], options: dict[str, object], *, timeout_s: float) -> PreparedAdapter:
        """Return `NothingPrepared`, because there are no ranks to keep an adapter."""
        return NothingPrepared()

    async def failed(self) -> Loss:
        """Wait until `lose` is called and return the first loss; at once if there was one."""
        await self._lost.wait()
        assert self.loss is not None, "it is set before the event is"
        return self.loss

    def documents(self) -> list[RankDocument]:
        """Return the document of the only rank: ready, without memory, and with the id of this process."""
        return [RankDocument(0, os.getpid(), RankState.READY, 0.0, MemoryReport())]

    standbys = 0

    def keep_standbys(self) -> None:
        """Do nothing: there are no standby processes to make."""

    def end_standbys(self) -> None:
        """Do nothing: there are no standby processes to end."""

    def load_progress(self) -> tuple[int, int]:
        """Return one of one: the load is done."""
        return 1, 1

    async def stop(self) -> None:
        """Do nothing: the stand-in has no processes to end."""
