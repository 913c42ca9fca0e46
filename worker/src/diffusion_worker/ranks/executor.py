# SPDX-License-Identifier: Apache-2.0
"""The engine's `RankGroup` with real processes: one generation after the other, for the server's life."""

import asyncio
import time
from collections.abc import Sequence

import msgspec

from diffusion_worker.config import WorkerConfig
from diffusion_worker.engine.state.rank_calls import require_success
from diffusion_worker.engine.state.rank_protocol import Loss, TickReport
from diffusion_worker.engine.state.state_document import RankDocument, RankState
from diffusion_worker.errors import Fault, GroupFailed
from diffusion_worker.lora.request import LoadOptions, LoRARequest
from diffusion_worker.messages import MemoryReport, ModelInfo, RpcReply, Tick
from diffusion_worker.ranks.load_processes import LoadProcesses, PreparedAdapter
from diffusion_worker.ranks.rank_generation import RankGeneration
from diffusion_worker.ranks.standbys import Standbys

# Methods after which a rank has another model.
CHANGING_LAYERS = ("re_init_pipeline",)


class RankExecutor:
    """The ranks of one worker. Make and use it on the event loop of the server."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._number = 1
        self._current: RankGeneration | None = None
        self._dropped_before = (0, 0)
        self._stopped = False
        self._loads = LoadProcesses()
        self._standbys = Standbys(config)
        # The adapter tables of the current generation's model, each with the ranks that returned it.
        self._tables: dict[bytes, list[int]] = {}

    @property
    def generation(self) -> int:
        """The number of the current generation of processes, or of the last one."""
        return self._number

    @property
    def loss(self) -> Loss | None:
        """Reason and fault of the current generation's loss; None while it lives, or without a generation."""
        current = self._current
        return current.loss.result() if current is not None and current.loss.done() else None

    @property
    def dropped_frames(self) -> tuple[int, int]:
        """Frames that were no message, at this end and at the ranks', of all generations."""
        now = self._current.dropped_frames if self._current is not None else (0, 0)
        return self._dropped_before[0] + now[0], self._dropped_before[1] + now[1]

    @property
    def standbys(self) -> int:
        """Processes that are past their imports, to become ranks when the group is lost."""
        return self._standbys.ready

    def keep_standbys(self) -> None:
        """Make the missing standbys in the background, if memory suffices for all of them; do nothing after `end_standbys`."""
        self._standbys.keep()

    def end_standbys(self) -> None:
        """Kill the standbys without waiting for their end, and let no more be made."""
        self._standbys.kill()

    async def start(self, *, asleep: bool = False) -> ModelInfo:
        """Start the processes, standbys first, and return the model's description once all have loaded.

        With `asleep` they hold no weights before the first wake. Raises ConfigError, LoadTimeout or GroupFailed, also after `stop`.
        """
        if self._stopped:
            raise GroupFailed("the ranks were ended")
        self._tables = {}
        self._current = RankGeneration(self._config, self._number, asleep=asleep)
        return await self._current.start(await self._standbys.take())

    async def restart(self, *, asleep: bool = False) -> ModelInfo:
        """End the processes of the current generation, if any, then start the next one; results and errors are those of `start`."""
        if self._current is not None:
            self._dropped_before = self.dropped_frames
            ended, self._current = self._current, None
            await ended.end()
        self._number += 1
        return await self.start(asleep=asleep)

    def lose(self, reason: str, fault: Fault) -> None:
        """Kill the ranks of the current generation, and record its loss with this reason and fault. Do nothing if there is no generation.

        If a loss is recorded already, it stays.
        """
        if self._current is not None:
            self._current.lose(reason, fault)

    def broadcast_tick(self, tick: Tick, frames: Sequence[bytes | memoryview] = ()) -> None:
        """Queue a tick and its frames to all ranks, without waiting. GroupFailed if no generation runs."""
        self._running().send(tick, frames)

    async def next_report(self, timeout_s: float, *, phase: str = "a step") -> TickReport:
        """Wait for the next tick's results and return them with their frames. After `timeout_s` without any, the ranks are killed.

        GroupFailed then names the `phase` and the rank that hangs; it is raised for any other loss too. Time in which the ranks run a
        call does not count.
        """
        return await self._running().next_report(timeout_s, phase)

    async def call(
        self, method: str, *, timeout_s: float, output_rank: int | None = None, exec_all_ranks: bool = False, **kwargs: object
    ) -> list[RpcReply]:
        """Run a method on every rank, or on `output_rank` alone, and return the replies by rank; errors of the method are in these.

        With `exec_all_ranks` all ranks run it, and those other than `output_rank` reply without a result.

        Raises:
            RequestError: Timeout, a rank has not replied after `timeout_s`. GroupFailed: the ranks do not run, or are lost meanwhile.
        """
        if method in CHANGING_LAYERS:
            self._tables = {}
        return await self._running().call(method, kwargs, timeout_s=timeout_s, output_rank=output_rank, exec_all_ranks=exec_all_ranks)

    async def prepare_adapter(self, request: dict[str, object], options: dict[str, object], *, timeout_s: float) -> PreparedAdapter:
        """Have a process of its own read, check and lay out an adapter. The caller closes the result.

        The first load for a model also asks the ranks for their tables of its layers.

        Raises:
            RequestError: the adapter is wrong; Timeout; EngineFailed if that process was ended by something else. GroupFailed.
        """
        until_s = time.monotonic() + timeout_s
        if not self._tables:
            replies = await self.call("adapter_table", timeout_s=timeout_s)
            require_success("adapter_table", replies)
            for reply in replies:
                self._tables.setdefault(reply.result or b"", []).append(reply.rank)
        return await self._loads.prepare(
            self._tables,
            msgspec.convert(request, LoRARequest),
            msgspec.convert(options, LoadOptions),
            timeout_s=max(0.001, until_s - time.monotonic()),
        )

    async def failed(self) -> Loss:
        """Wait for the current generation's loss and return its reason and fault. Raises GroupFailed if no generation runs."""
        # A waiter that is cancelled must not cancel the loss for all others.
        return await asyncio.shield(self._running().loss)

    def documents(self) -> list[RankDocument]:
        """Return an entry for each configured rank, in order.

        A rank without a process is starting, with no pid and an empty memory report.
        """
        known = [rank.document() for rank in self._current.ranks] if self._current is not None else []
        unknown = [RankDocument(n, None, RankState.STARTING, None, MemoryReport()) for n in range(len(known), self._config.ranks)]
        return known + unknown

    def load_progress(self) -> tuple[int, int]:
        """Add up the ranks' latest `LoadProgress`: bytes of weights in place, and bytes expected. Both are 0 before the first."""
        ranks = self._current.ranks if self._current is not None else []
        return sum(rank.loaded[0] for rank in ranks), sum(rank.loaded[1] for rank in ranks)

    async def stop(self) -> None:
        """Ask the ranks to leave, kill those that have not after some seconds, and wait until they are gone; end the standbys first.

        Calling again is harmless; `start` raises GroupFailed afterwards.
        """
        self._stopped = True
        await self._standbys.end()
        if self._current is not None:
            self._dropped_before = self.dropped_frames
            ended, self._current = self._current, None
            await ended.end()

    def _running(self) -> RankGeneration:
        if self._current is None:
            raise GroupFailed("the ranks are not running")
        return self._current
