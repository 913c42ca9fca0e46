# SPDX-License-Identifier: Apache-2.0
"""The protocol by which the engine speaks to its ranks; `ranks/executor.py` implements it with real processes."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from diffusion_worker.engine.state.state_document import RankDocument
from diffusion_worker.errors import Fault
from diffusion_worker.messages import ModelInfo, PreparedPart, RpcReply, Tick, TickDone


class TickReport(msgspec.Struct, frozen=True):
    """A `TickDone` with the frames it speaks of."""

    done: TickDone
    frames: list[bytes | memoryview]


class Loss(msgspec.Struct, frozen=True):
    """The cause of a group's loss: a sentence that names the rank, and the kind of fault."""

    reason: str
    fault: Fault


class PreparedAdapter(Protocol):
    """An adapter that was read, checked and laid out for each rank."""

    @property
    def parts(self) -> list[PreparedPart]:
        """The parts that ranks register it from."""

    def close(self) -> None:
        """Give back what the ranks have not taken; harmless when repeated."""


class Prepare(Protocol):
    """See `RankGroup.prepare_adapter`."""

    async def __call__(self, request: dict[str, object], options: dict[str, object], *, timeout_s: float) -> PreparedAdapter:
        """Have an adapter read, checked and laid out."""


class RankGroup(Protocol):
    """N ranks that live and die together, in one generation of processes after the other.

    Once a generation is lost every method raises `GroupFailed`, until `restart` has started the next one.
    """

    @property
    def generation(self) -> int:
        """The number of the processes that run, or ran last; the first is 1."""

    @property
    def loss(self) -> Loss | None:
        """Return the reason why the generation was lost; None while it lives."""

    @property
    def dropped_frames(self) -> tuple[int, int]:
        """Frames that were no message and were not acted on, at the server's end and at the ranks'."""

    async def start(self, *, asleep: bool = False) -> ModelInfo:
        """Start the processes and load the model; raises ConfigError where the model or an option is wrong.

        With `asleep` they know the model but hold no weights, as after a sleep of level Discard: the first wake loads them.
        """

    async def restart(self, *, asleep: bool = False) -> ModelInfo:
        """End what is left of a lost generation and start the next one; raises as `start` does."""

    def lose(self, reason: str, fault: Fault) -> None:
        """End this generation as lost, because what it would serve cannot be trusted; harmless where it is lost already."""

    def broadcast_tick(self, tick: Tick, frames: Sequence[bytes | memoryview] = ()) -> None:
        """Queue one tick for every rank, with the frames that `tick.frames` counts; does not wait."""

    async def next_report(self, timeout_s: float, *, phase: str = "a step") -> TickReport:
        """The next tick's outcome, in the order the ticks were sent; a missed deadline loses the group and names the phase.

        The time does not count while a rank is busy with a call.
        """

    async def call(
        self, method: str, *, timeout_s: float, output_rank: int | None = None, exec_all_ranks: bool = False, **kwargs: object
    ) -> list[RpcReply]:
        """Run a method between two ticks, on every rank or on `output_rank`: one reply a rank that ran it, in rank order.

        With `output_rank` and `exec_all_ranks` all run it, and only that rank's reply has a result.

        Raises:
            RequestError: code Timeout, naming the method, when a rank did not answer in time.
        """

    async def prepare_adapter(self, request: dict[str, object], options: dict[str, object], *, timeout_s: float) -> PreparedAdapter:
        """Have an adapter read, checked and laid out beside the ranks, which do not hear of it.

        Raises:
            RequestError: the adapter is wrong; Timeout.
        """

    async def failed(self) -> Loss:
        """Returns when this generation is lost."""

    def documents(self) -> list[RankDocument]:
        """The ranks as the state document shows them."""

    def load_progress(self) -> tuple[int, int]:
        """Bytes of weights loaded and in all, summed over the ranks; (0, 0) before anything is known."""

    async def stop(self) -> None:
        """End every rank, politely first; returns when all are gone. Harmless when called twice."""
