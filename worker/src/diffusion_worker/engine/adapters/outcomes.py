# SPDX-License-Identifier: Apache-2.0
"""Outcomes for adapters: a load that succeeded, failed or came too late for sleeping ranks, and a removal."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from diffusion_worker.engine.adapters.adapter import Adapter, Load
from diffusion_worker.engine.adapters.on_ranks import AdapterLoads, AdapterRanks
from diffusion_worker.engine.adapters.table import AdapterTable
from diffusion_worker.engine.state.lifecycle import ENDING, EngineLife
from diffusion_worker.engine.state.state_document import AdapterState, EngineState, ProblemReport
from diffusion_worker.errors import ErrorCode, GroupFailed, RequestError
from diffusion_worker.messages import LoadedLoRA
from diffusion_worker.sources.fetching import Fetcher

log = logging.getLogger(__name__)

# A replaced adapter's running requests may finish this long.
REPLACE_DRAIN_S = 120.0
# While the ranks are in one of these they take no adapter and let none go.
DEFERRING = (EngineState.SLEEPING, EngineState.ASLEEP, EngineState.WAKING)

Abort = Callable[[list[str], ErrorCode, str], None]
InBackground = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


def passes(problem: ProblemReport | RequestError) -> bool:
    """Return True where a load that failed so may succeed without a change of its file or its call."""
    return problem.retryable or problem.code == ErrorCode.CAPACITY_EXCEEDED


class AdapterOutcomes:
    """Ends loads and adapters, and keeps the table right about both."""

    def __init__(
        self,
        table: AdapterTable,
        tell: AdapterRanks,
        loads: AdapterLoads,
        fetcher: Fetcher,
        life: EngineLife,
        *,
        abort: Abort,
        in_background: InBackground,
    ) -> None:
        self._table = table
        self._tell = tell
        self._loads = loads
        self._fetcher = fetcher
        self._life = life
        self._abort = abort
        self._in_background = in_background

    @property
    def deferring(self) -> bool:
        """Return whether the ranks sleep or are still waking: additions and removals wait until they serve."""
        return self._life.state_after_restart in DEFERRING

    # --- the end of a load ----------------------------------------------------------------------------------------------

    def succeeded(self, adapter: Adapter, load: Load, loaded: LoadedLoRA) -> None:
        """All ranks have it: from now on it is what its name stands for."""
        adapter.load = None
        if self._unwanted(adapter, load):
            self._tell.undo(adapter)
            return
        adapter.loaded, adapter.state = loaded, AdapterState.LOADED
        self._table.touch(adapter)
        self._loads.codes["OK"] += 1
        self.take_name(adapter)
        log.info("adapter=%s loaded digest=%s rank=%d", adapter.name, loaded.digest, loaded.rank)
        load.end()

    def deferred(self, adapter: Adapter, load: Load) -> None:
        """Keep an adapter's file while the ranks sleep, and load it before they serve."""
        adapter.load = None
        if not self._unwanted(adapter, load):
            adapter.state = AdapterState.DEFERRED
            self._table.touch(adapter)
            log.info("adapter=%s deferred, as the model sleeps", adapter.name)
            load.end()

    def failed(self, adapter: Adapter, load: Load, error: RequestError) -> None:
        """The name keeps what it had; one that had nothing is Failed, or where the reason passes may be tried by a request."""
        adapter.load = None
        load.end(error)
        problem = ProblemReport(error.code, error.message, error.retryable)
        current = self._table.get(adapter.name)
        if load.superseded is not None:
            if current is not adapter:
                self.release(adapter)
                return
            problem = ProblemReport(load.superseded.code, load.superseded.message, load.superseded.retryable)
        self._loads.codes[problem.code] += 1
        if current is not adapter:
            self._table.drop_arriving(adapter.name)
            self.release(adapter)
            if current is not None:
                current.error = problem
            return
        adapter.error = problem
        if passes(problem) and (adapter.loaded is not None or not load.asked):
            adapter.state = AdapterState.CACHED
        else:
            self.mark_failed(adapter, problem)

    def mark_failed(self, adapter: Adapter, problem: ProblemReport) -> None:
        """It is in no memory, and nobody but a call tries it again."""
        adapter.state, adapter.error, adapter.loaded = AdapterState.FAILED, problem, None
        self.release(adapter)
        self._table.failed.add(adapter)

    def _unwanted(self, adapter: Adapter, load: Load) -> bool:
        """Return whether a newer call made a finished load needless; then nothing of it stays."""
        if load.superseded is None and adapter in self._table:
            return False
        self.release(adapter)
        load.end(RequestError(ErrorCode.CONFLICT, f"adapter {adapter.name!r}: nobody wants it any more"))
        return True

    # --- names ----------------------------------------------------------------------------------------------------------

    def take_name(self, adapter: Adapter) -> None:
        """Give a name to the adapter loaded beside its old one; requests that use the old one may finish."""
        if self._table.get(adapter.name) is adapter:
            return
        previous = self._table.put(adapter)
        if previous is not None:
            # It may have been evicted, and be on its way back for a request.
            self.give_up(previous, f"adapter {adapter.name!r}: a newer call replaced it")
            self._in_background(self.retired(previous, REPLACE_DRAIN_S))

    def give_up(self, adapter: Adapter | None, why: str) -> None:
        """Nobody wants a load any more; harmless where none runs."""
        if adapter is not None and adapter.load is not None:
            adapter.load.give_up(RequestError(ErrorCode.CONFLICT, why))

    def discard(self, adapter: Adapter | None, why: str) -> None:
        """Nobody wants an adapter that no rank has: its load ends, and its file is given back."""
        self.give_up(adapter, why)
        if adapter is not None and adapter.load is None:
            self.release(adapter)

    # --- the end of one -------------------------------------------------------------------------------------------------

    async def retired(self, adapter: Adapter, drain_s: float) -> None:
        """Wait until nobody uses a leaving adapter, end those who still do, unload it; from ranks that sleep at their wake."""
        if adapter.state is not AdapterState.DRAINING:
            if adapter.load is None:
                self.release(adapter)
            return
        try:
            async with asyncio.timeout(drain_s):
                await adapter.unused.wait()
        except TimeoutError:
            self._abort(sorted(adapter.users), ErrorCode.ADAPTER_REMOVED, f"adapter {adapter.name!r} was removed while in use")
            await adapter.unused.wait()
        await self._awake()
        await self.unloaded(adapter)

    async def unloaded(self, adapter: Adapter) -> None:
        """Take a leaving adapter that nobody uses out of the ranks' memory; raises RequestError."""
        if adapter.unloading or self._life.state_after_restart in ENDING:
            return
        adapter.unloading = True
        try:
            await self._tell.remove(adapter.lora_int_id)
        except GroupFailed:
            pass  # the ranks that had it are gone
        finally:
            self.forget(adapter)

    def forget(self, adapter: Adapter) -> None:
        """A leaving adapter is on no rank any more."""
        adapter.registered, adapter.unloading = False, True
        self._table.forget(adapter)
        self.release(adapter)
        self._table.move()

    async def _awake(self) -> None:
        """Wait until the ranks accept calls about adapters, or the end is near."""
        while self.deferring:
            await self._life.wait_for_change()

    def release(self, adapter: Adapter) -> None:
        """Nobody reads its file any more."""
        fetched, adapter.fetched = adapter.fetched, None
        if fetched is not None:
            self._fetcher.release(fetched)
