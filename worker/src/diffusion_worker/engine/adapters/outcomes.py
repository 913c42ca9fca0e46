# SPDX-License-Identifier: Apache-2.0
"""Outcomes of loads and removals: a load that succeeded, failed, or has to wait for sleeping ranks."""

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

# Seconds that running requests of a replaced adapter may take to finish.
REPLACE_DRAIN_S = 120.0
# States in which the ranks neither load nor unload adapters.
DEFERRING = (EngineState.SLEEPING, EngineState.ASLEEP, EngineState.WAKING)

Abort = Callable[[list[str], ErrorCode, str], None]
InBackground = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


def passes(problem: ProblemReport | RequestError) -> bool:
    """Return whether a load that failed so may succeed without a change of its file or its call."""
    return problem.retryable or problem.code == ErrorCode.CAPACITY_EXCEEDED


class AdapterOutcomes:
    """The ends of loads and of adapters, with their effects on the table."""

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
        """Record that all ranks hold an adapter: its name stands for it from now on."""
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
        """Keep an adapter's file while the ranks sleep; it is loaded before they serve."""
        adapter.load = None
        if not self._unwanted(adapter, load):
            adapter.state = AdapterState.DEFERRED
            self._table.touch(adapter)
            log.info("adapter=%s deferred, as the model sleeps", adapter.name)
            load.end()

    def failed(self, adapter: Adapter, load: Load, error: RequestError) -> None:
        """Record a failed load. The name keeps its former adapter, if it had one.

        Otherwise the adapter is Failed, or Cached if the reason may pass and requests may try again.
        """
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
        """Mark an adapter as Failed: it leaves memory, and only a call tries it again."""
        adapter.state, adapter.error, adapter.loaded = AdapterState.FAILED, problem, None
        self.release(adapter)
        self._table.failed.add(adapter)

    def _unwanted(self, adapter: Adapter, load: Load) -> bool:
        """Return whether a newer call made a finished load needless; then end and release it."""
        if load.superseded is None and adapter in self._table:
            return False
        self.release(adapter)
        load.end(RequestError(ErrorCode.CONFLICT, f"adapter {adapter.name!r} was replaced or removed while it was loading"))
        return True

    # --- names ----------------------------------------------------------------------------------------------------------

    def take_name(self, adapter: Adapter) -> None:
        """Give a name to the adapter loaded beside its old one; requests that use the old one may finish."""
        if self._table.get(adapter.name) is adapter:
            return
        previous = self._table.put(adapter)
        if previous is not None:
            # A request may be loading it again after an eviction.
            self.give_up(previous, f"adapter {adapter.name!r}: a newer call replaced it")
            self._in_background(self.retired(previous, REPLACE_DRAIN_S))

    def give_up(self, adapter: Adapter | None, why: str) -> None:
        """End an adapter's load, which nobody wants any more; harmless if none runs."""
        if adapter is not None and adapter.load is not None:
            adapter.load.give_up(RequestError(ErrorCode.CONFLICT, why))

    def discard(self, adapter: Adapter | None, why: str) -> None:
        """Drop an adapter that no rank holds: end its load, or release its file."""
        self.give_up(adapter, why)
        if adapter is not None and adapter.load is None:
            self.release(adapter)

    # --- the end of one -------------------------------------------------------------------------------------------------

    async def retired(self, adapter: Adapter, drain_s: float) -> None:
        """Wait until no request uses a leaving adapter, end requests past the time, and unload it once the ranks are awake."""
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
        """Unload a leaving adapter that nobody uses from the ranks; raise RequestError."""
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
        """Drop a leaving adapter that no rank holds any more."""
        adapter.registered, adapter.unloading = False, True
        self._table.forget(adapter)
        self.release(adapter)
        self._table.move()

    async def _awake(self) -> None:
        """Wait until the ranks accept calls about adapters, or the engine is ending."""
        while self.deferring:
            await self._life.wait_for_change()

    def release(self, adapter: Adapter) -> None:
        """Release an adapter's file, which is not read any more."""
        fetched, adapter.fetched = adapter.fetched, None
        if fetched is not None:
            self._fetcher.release(fetched)
