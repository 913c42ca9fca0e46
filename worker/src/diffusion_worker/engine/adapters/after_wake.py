# SPDX-License-Identifier: Apache-2.0
"""The adapters of ranks that come back: after a sleep the changes meanwhile, in a new generation all adapters.

Sleeping ranks receive no calls about adapters. An adapter put then, or lost by a sleep that discards loaded ones, is `Deferred`. It is
known and its file is kept here, so nothing is fetched a second time.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection

from diffusion_worker.engine.adapters.adapter import Adapter, Load
from diffusion_worker.engine.adapters.on_ranks import AdapterLoads, AdapterRanks
from diffusion_worker.engine.adapters.outcomes import Abort, AdapterOutcomes, InBackground
from diffusion_worker.engine.adapters.table import AdapterTable, is_wanted_more
from diffusion_worker.engine.state.lifecycle import ENDING, EngineLife
from diffusion_worker.engine.state.state_document import AdapterState, EngineState, ProblemReport, Residency
from diffusion_worker.errors import ErrorCode, RequestError

log = logging.getLogger(__name__)

# Deadline of a load from a local file, on a new generation of ranks or after a wake that it came too late for.
RELOAD_TIMEOUT_S = 120.0
# Parts of the wake's remaining time by which fetches of newly desired adapters, and then their loads, must be over. The rest is for the
# verification, so that a source that stalls cannot fail the wake.
FOLLOW_SHARE = 0.5
APPLY_SHARE = 0.75


class AdapterWaking:
    """The adapter work after a wake and after a restart of the ranks.

    `in_order` is held during calls to the ranks about an adapter; `begin` starts a load as a put does. `follow` does what the desired file
    asks for now, within so many seconds.
    """

    def __init__(
        self,
        table: AdapterTable,
        tell: AdapterRanks,
        loads: AdapterLoads,
        outcomes: AdapterOutcomes,
        life: EngineLife,
        *,
        in_order: asyncio.Lock,
        begin: Callable[[Adapter], object],
        follow: Callable[[float], Awaitable[None]],
        abort: Abort,
        in_background: InBackground,
    ) -> None:
        self._table = table
        self._tell = tell
        self._loads = loads
        self._outcomes = outcomes
        self._life = life
        self._in_order = in_order
        self._begin = begin
        self._follow = follow
        self._abort = abort
        self._in_background = in_background
        self._late: asyncio.Task[None] | None = None

    def defer_loaded(self) -> None:
        """Record that the ranks hold no adapters: loaded ones become Deferred, or Cached if on demand, and leaving ones are dropped."""
        for adapter in list(self._table):
            adapter.registered = False
            if adapter.state is AdapterState.LOADED:
                on_demand = adapter.call.residency is Residency.ON_DEMAND
                adapter.state = AdapterState.CACHED if on_demand else AdapterState.DEFERRED
            elif adapter in self._table.leaving():
                self._outcomes.forget(adapter)

    def load_when_serving(self) -> None:
        """Load adapters that were deferred too late for a wake, once the wake is over."""
        if self._late is None or self._late.done():
            self._late = self._in_background(self._when_serving())

    async def reload(self) -> None:
        """Load the adapters of the last generation of ranks on a new one, under the same ids and with the same bytes.

        An adapter that cannot be loaded any more becomes Failed, and the requests that use it end with AdapterNotLoaded. Deferred adapters
        are loaded as well.

        Raises:
            GroupFailed: the new generation is lost as well.
        """
        async with self._in_order:
            for adapter in self._table.leaving():
                self._outcomes.forget(adapter)
            for adapter in list(self._table):
                if adapter.state in (AdapterState.LOADED, AdapterState.DRAINING) and not adapter.unloading:
                    await self._load_again(adapter, RELOAD_TIMEOUT_S)
        await self._apply_all(RELOAD_TIMEOUT_S)

    async def apply_deferred(self, deadline_s: float) -> None:
        """Follow the desired file, unload adapters that left the table, and load all deferred ones, the most wanted first.

        If there is no room for all, the least wanted become `Cached`, as if they had been evicted. An adapter that cannot be
        loaded in time is Failed with the reason. A name whose new content fails keeps its old one.

        Raises:
            GroupFailed: the ranks are lost.
        """
        until_s = asyncio.get_running_loop().time() + APPLY_SHARE * deadline_s
        await self._follow(FOLLOW_SHARE * deadline_s)
        await self._apply_all(until_s - asyncio.get_running_loop().time())

    async def load_again(self, lora_int_ids: Collection[int], timeout_s: float) -> None:
        """Unload adapters from awake ranks by their ids, and load those that the table still has from their files again.

        All are unloaded first, as some may share a copy. An adapter that cannot be loaded becomes Failed.

        Raises:
            RequestError: the ranks cannot unload an adapter. GroupFailed: the ranks are lost.
        """
        until_s = asyncio.get_running_loop().time() + timeout_s
        async with self._in_order:
            for lora_int_id in lora_int_ids:
                await self._tell.remove(lora_int_id)
            for adapter in list(self._table):
                if adapter.registered and adapter.lora_int_id in lora_int_ids:
                    self._loads.codes[ErrorCode.VERIFICATION_FAILED] += 1
                    adapter.found_wrong_s = time.monotonic()
                    await self._load_again(adapter, max(0.001, until_s - asyncio.get_running_loop().time()))
            await self._tell.undone()

    async def _apply_all(self, deadline_s: float) -> None:
        deadline_s += asyncio.get_running_loop().time()
        async with self._in_order:
            while True:
                await self._let_go()
                deferred = self._table.deferred()
                if not deferred:
                    break
                await self._apply(deferred[0], deadline_s)
            await self._tell.undone()

    async def _let_go(self) -> None:
        """Unload leaving adapters, to make room."""
        for adapter in self._table.leaving():
            try:
                await self._outcomes.unloaded(adapter)
            except RequestError as error:
                log.error("adapter=%s could not be unloaded: %s", adapter.name, error.message)

    async def _apply(self, adapter: Adapter, deadline_s: float) -> None:
        victims = self._table.room_for(adapter)
        replaces = self._table.get(adapter.name) is not adapter
        on_demand = adapter.call.residency is Residency.ON_DEMAND and not replaces
        if on_demand or victims is None or any(is_wanted_more(victim, adapter) for victim in victims):
            adapter.state = AdapterState.CACHED
            self._outcomes.take_name(adapter)
            return
        load = adapter.load = Load(deadline_s=deadline_s, asked=True)
        load.registering = True
        adapter.state, adapter.lora_int_id = AdapterState.LOADING, self._table.next_id()
        started = time.monotonic()
        try:
            left_s = deadline_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                raise RequestError(ErrorCode.TIMEOUT, f"adapter {adapter.name!r}: expected its load to end within the wake's deadline")
            loaded = await self._tell.add_for(adapter, victims, timeout_s=left_s)
        except RequestError as error:
            log.error("adapter=%s not loaded after the sleep code=%s: %s", adapter.name, error.code, error.message)
            adapter.loaded = None  # so that any error makes it Failed, like an adapter that never loaded
            self._outcomes.failed(adapter, load, error)
        except BaseException as error:
            adapter.load, adapter.state = None, AdapterState.DEFERRED
            load.end(RequestError(ErrorCode.RANK_FAILED, f"adapter {adapter.name!r}: the load was broken off: {error}"))
            raise
        else:
            self._outcomes.succeeded(adapter, load, loaded)
            self._loads.took(adapter, time.monotonic() - started)

    async def _when_serving(self) -> None:
        while self._life.state not in (EngineState.READY, EngineState.DRAINING):
            if self._life.state_after_restart in ENDING:
                return
            await self._life.wait_for_change()
        for adapter in self._table.deferred():
            self._begin(adapter)

    async def _load_again(self, adapter: Adapter, timeout_s: float) -> None:
        started = time.monotonic()
        try:
            await self._tell.add(adapter, timeout_s=timeout_s)
            self._loads.codes["OK"] += 1
            self._loads.took(adapter, time.monotonic() - started)
        except RequestError as error:
            log.error("adapter=%s not loaded again code=%s: %s", adapter.name, error.code, error.message)
            self._tell.undo(adapter)
            self._loads.codes[error.code] += 1
            if adapter.state is AdapterState.LOADED:
                self._outcomes.mark_failed(adapter, ProblemReport(error.code, error.message, error.retryable))
            why = f"adapter {adapter.name!r} could not be loaded again: {error.message}"
            self._abort(sorted(adapter.users), ErrorCode.ADAPTER_NOT_LOADED, why)
