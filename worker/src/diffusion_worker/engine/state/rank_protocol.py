# SPDX-License-Identifier: Apache-2.0
"""The protocol by which the engine speaks to its ranks; `ranks/executor.py` implements it with real processes."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from diffusion_worker.engine.state.state_document import RankDocument
from diffusion_worker.errors import Fault
from diffusion_worker.messages import ModelInfo, PreparedPart, RpcReply, Tick, TickDone


class TickReport(msgspec.Struct, frozen=True):
    """A rank's report of a tick, with the pixels of the finished images and previews, to which it refers by index."""

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
        """The parts from which ranks register the adapter."""

    def close(self) -> None:
        """Release the parts that the ranks have not taken; harmless when repeated."""


class Prepare(Protocol):
    """The call `RankGroup.prepare_adapter`."""

    async def __call__(self, request: dict[str, object], options: dict[str, object], *, timeout_s: float) -> PreparedAdapter:
        """Have an adapter read, checked and laid out for each rank; see `RankGroup.prepare_adapter`."""


class RankGroup(Protocol):
    """A group of N rank processes, all of which end when one is lost; each start of the group is a new generation.

    After a loss, `broadcast_tick`, `next_report` and `call` raise `GroupFailed` until `restart` has started another generation.
    """

    @property
    def generation(self) -> int:
        """The number of the generation that runs, or ran last; the first is 1."""

    @property
    def loss(self) -> Loss | None:
        """The loss of the generation; None while it lives."""

    @property
    def dropped_frames(self) -> tuple[int, int]:
        """Numbers of frames that were no valid message and were dropped, at the server's end and at the ranks'."""

    async def start(self, *, asleep: bool = False) -> ModelInfo:
        """Start a process for each rank, have all load the model, and return its description.

        With `asleep` no weights are read before the first wake, just as after a sleep of level Discard.

        Raises:
            ConfigError: an option or the model is wrong. GroupFailed: the ranks did not come up.
        """

    async def restart(self, *, asleep: bool = False) -> ModelInfo:
        """Start the next generation in place of a lost one, whose processes are ended first; results and errors are those of `start`."""

    @property
    def standbys(self) -> int:
        """Processes that are past their imports, to become ranks when the group is lost."""

    def keep_standbys(self) -> None:
        """Have the missing standbys made in the background; harmless when repeated."""

    def end_standbys(self) -> None:
        """End the standbys at once, and have no more made."""

    def lose(self, reason: str, fault: Fault) -> None:
        """End this generation as lost, as its results cannot be trusted, for the given reason; no effect if it is lost already."""

    def broadcast_tick(self, tick: Tick, frames: Sequence[bytes | memoryview] = ()) -> None:
        """Queue one tick for every rank, with the frames that `tick.frames` counts; does not wait."""

    async def next_report(self, timeout_s: float, *, phase: str = "a step") -> TickReport:
        """Return the report of the oldest tick without one; a missed deadline loses the group and names the phase.

        Time does not count while a rank is busy with a call.
        """

    async def call(
        self, method: str, *, timeout_s: float, output_rank: int | None = None, exec_all_ranks: bool = False, **kwargs: object
    ) -> list[RpcReply]:
        """Run a method while no tick runs, and wait for its replies, which are sorted by rank.

        Every rank runs it, or only `output_rank`. With `exec_all_ranks` as well, others run it too but reply without a result.

        Raises:
            RequestError: Timeout with the method's name, if a rank is silent for `timeout_s` seconds.
        """

    async def prepare_adapter(self, request: dict[str, object], options: dict[str, object], *, timeout_s: float) -> PreparedAdapter:
        """Have an adapter read, checked and laid out beside the ranks, without a call to them. The result must be closed.

        `request` has its name, id and path, `options` the properties that its content must have.

        Raises:
            RequestError: the adapter is wrong; Timeout.
        """

    async def failed(self) -> Loss:
        """Block while this generation lives, and return the reason for its loss; many may wait, and each may be cancelled alone."""

    def documents(self) -> list[RankDocument]:
        """Describe every rank of `--ranks` for the state document, in order; one without a process is shown as starting."""

    def load_progress(self) -> tuple[int, int]:
        """Return (done, total) bytes of the load, summed over the ranks; (0, 0) until the first rank reports."""

    async def stop(self) -> None:
        """End every rank, politely first, and wait until all are gone. Harmless when called twice."""
