# SPDX-License-Identifier: Apache-2.0
"""The protocol by which the engine speaks to its ranks; `ranks/executor.py` implements it with real processes."""

from typing import Protocol

import msgspec

from diffusion_worker.engine.documents import RankDocument
from diffusion_worker.messages import ModelInfo, RpcReply, Tick, TickDone


class TickReport(msgspec.Struct, frozen=True):
    """A `TickDone` with the frames it speaks of."""

    done: TickDone
    frames: list[bytes | memoryview]


class RankGroup(Protocol):
    """N ranks that live and die together. Every method raises `GroupFailed` once the group is lost."""

    async def start(self) -> ModelInfo:
        """Start the processes and load the model; raises ConfigError where the model or an option is wrong."""

    def broadcast_tick(self, tick: Tick) -> None:
        """Queue one tick for every rank; does not wait."""

    async def next_report(self, timeout_s: float) -> TickReport:
        """The next tick's outcome, in the order the ticks were sent; a missed deadline loses the group."""

    async def call(self, method: str, *, timeout_s: float, **kwargs: object) -> list[RpcReply]:
        """Run a method on every rank between two ticks: one reply a rank, in rank order.

        Raises:
            RequestError: code Timeout, when a rank did not answer in time.
        """

    async def failed(self) -> str:
        """Returns, with the reason, when the group is lost."""

    def documents(self) -> list[RankDocument]:
        """The ranks as the state document shows them."""

    def load_progress(self) -> tuple[int, int]:
        """Bytes of weights loaded and in all, summed over the ranks; (0, 0) before anything is known."""

    async def stop(self) -> None:
        """End every rank, politely first; returns when all are gone. Harmless when called twice."""
