# SPDX-License-Identifier: Apache-2.0
"""Loads and unloads of adapters: on all ranks or on none, beside running requests, never in the middle of a step.

Files are fetched side by side; the ranks load one adapter after the other. All waiters for an adapter share its load. The newest call for a
name wins: a load that it makes needless ends with Conflict, and leaves nothing behind.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any

from diffusion_worker.engine.adapters.adapter import Adapter, Load
from diffusion_worker.engine.adapters.after_wake import RELOAD_TIMEOUT_S, AdapterWaking
from diffusion_worker.engine.adapters.on_ranks import AdapterLoads, AdapterRanks
from diffusion_worker.engine.adapters.outcomes import Abort, AdapterOutcomes
from diffusion_worker.engine.adapters.table import AdapterTable
from diffusion_worker.engine.state.lifecycle import EngineLife
from diffusion_worker.engine.state.rank_calls import CallAll
from diffusion_worker.engine.state.rank_protocol import Prepare, PreparedAdapter
from diffusion_worker.engine.state.state_document import AdapterCall, AdapterDocument, AdapterState, Residency
from diffusion_worker.errors import ErrorCode, GroupFailed, RequestError
from diffusion_worker.messages import LoadedLoRA
from diffusion_worker.sources.fetching import Fetched, Fetcher

log = logging.getLogger(__name__)


class AdapterLoader:
    """The loader that keeps the ranks' adapters as the table has them.

    `settled` returns when no new generation of ranks is being started, and `require_serving` raises if the engine can load none.
    `follow` applies the desired file as it is now.
    """

    def __init__(
        self,
        table: AdapterTable,
        call_all: CallAll,
        prepare: Prepare,
        fetcher: Fetcher,
        life: EngineLife,
        *,
        ranks_total: int,
        abort: Abort,
        settled: Callable[[], Awaitable[None]],
        require_serving: Callable[[str], None],
        follow: Callable[[float], Awaitable[None]],
    ) -> None:
        self.loads = AdapterLoads()
        self._table = table
        self._fetcher = fetcher
        self._ranks_total = ranks_total
        self._settled = settled
        self._require_serving = require_serving
        self._in_order = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()
        self._tell = AdapterRanks(table, self.loads, call_all, prepare, in_background=self._in_background)
        self._outcomes = AdapterOutcomes(table, self._tell, self.loads, fetcher, life, abort=abort, in_background=self._in_background)
        self._waking = AdapterWaking(
            table,
            self._tell,
            self.loads,
            self._outcomes,
            life,
            in_order=self._in_order,
            begin=lambda adapter: self.begin(adapter, RELOAD_TIMEOUT_S, asked=True),
            follow=follow,
            abort=abort,
            in_background=self._in_background,
        )

    async def put(self, name: str, call: AdapterCall) -> AdapterDocument:
        """Put an adapter under a name, and load it unless its residency is OnDemand.

        An adapter with the same content takes over scale, residency and priority. A call that names its digest and identity
        needs no source; for any other call the source is looked at. Other content is loaded beside the old one and then replaces it. While
        the model sleeps an adapter is fetched and checked, and loaded before the model serves: Deferred.

        Raises:
            RequestError: InvalidAdapter and the other codes of files and sources, CapacityExceeded, RankFailed, Timeout,
                Conflict with a newer call. A loaded adapter of the name stays as it was; without one the name is kept as
                Failed, with the reason.
        """
        self._table.require_place(name, call)
        adapter = self._wanted(name, call, await self._changed(name, call))
        if not self._is_done(adapter, call):
            await asyncio.shield(self.begin(adapter, call.deadline_seconds, asked=True).done)
        return adapter.document(self._ranks_total)

    def knows(self, name: str) -> bool:
        """Return whether a name has an adapter, in any state."""
        return self._table.newest(name) is not None

    def most_wanted(self, calls: Mapping[str, AdapterCall]) -> list[str]:
        """Return the names in `calls` to load now, the most wanted first; see `AdapterTable.most_wanted` for those left out."""
        return self._table.most_wanted(calls)

    def know(self, name: str, call: AdapterCall) -> None:
        """Put a new adapter under a name without loading it: a request or a later call does.

        Raises:
            RequestError: CapacityExceeded.
        """
        self._table.require_place(name, call)
        adapter = self._table.new(name, call)
        adapter.state = AdapterState.CACHED
        self._table.put(adapter)

    def begin(self, adapter: Adapter, deadline_s: float, *, asked: bool = False) -> Load:
        """Begin to load an adapter, and return the load, or the one that runs already. The load's `done` raises as `put` does."""
        if adapter.load is not None:
            adapter.load.asked |= asked
            return adapter.load
        load = Load(deadline_s=asyncio.get_running_loop().time() + deadline_s, asked=asked)
        if adapter.state is AdapterState.DEFERRED and self._outcomes.deferring:
            load.end(RequestError(ErrorCode.ASLEEP, f"adapter {adapter.name!r}: the model is asleep, and loads the adapter when it wakes"))
            return load
        adapter.load = load
        adapter.error = adapter.progress = None
        adapter.state = AdapterState.FETCHING if adapter.fetched is None else AdapterState.LOADING
        adapter.lora_int_id = self._table.next_id()
        load.task = self._in_background(self._run(adapter, load))
        return load

    async def reload(self) -> None:
        """Give a new generation of ranks its adapters; see `AdapterWaking.reload`."""
        await self._waking.reload()

    def defer_loaded(self) -> None:
        """Record that the ranks hold no adapters any more, after a sleep that discards or a start asleep."""
        self._waking.defer_loaded()

    async def apply_deferred(self, deadline_s: float) -> None:
        """Apply all changes of adapters to awake ranks before they serve; see `AdapterWaking.apply_deferred`."""
        await self._waking.apply_deferred(deadline_s)

    async def load_again(self, lora_int_ids: Collection[int], timeout_s: float) -> None:
        """Load adapters by id again from their files, on ranks that just woke; see `AdapterWaking.load_again`."""
        await self._waking.load_again(lora_int_ids, timeout_s)

    def held(self) -> dict[int, list[str]]:
        """Return the ranks' reports of each adapter at its load, by id, for all adapters that the ranks should hold."""
        return {adapter.lora_int_id: adapter.kept for adapter in self._table if adapter.registered and adapter.loaded}

    async def delete(self, name: str, *, drain_s: float) -> None:
        """Remove a name at once, then unload its adapter when no request uses it or the time is over.

        Sleeping ranks unload it when they wake, before they serve; this call does not wait for that.

        Raises:
            RequestError: NotFound, RankFailed, Timeout.
        """
        arriving = self._table.drop_arriving(name)
        adapter = self._table.take_out(name)
        if adapter is None:
            raise RequestError(ErrorCode.NOT_FOUND, f"adapter {name!r} is not known to this worker")
        why = f"adapter {name!r} was removed while it was loading"
        self._outcomes.discard(arriving, why)
        self._outcomes.give_up(adapter, why)
        retiring = self._in_background(self._outcomes.retired(adapter, drain_s))
        if adapter.state is not AdapterState.DRAINING or not self._outcomes.deferring:
            await asyncio.shield(retiring)
        log.info("adapter=%s removed", name)

    def stop(self, reason: RequestError) -> None:
        """End all loads with an error for their waiters."""
        for adapter in self._table:
            if adapter.load is not None:
                adapter.load.give_up(reason)

    # --- names ----------------------------------------------------------------------------------------------------------

    def _is_done(self, adapter: Adapter, call: AdapterCall) -> bool:
        if adapter.state is AdapterState.CACHED:
            return _is_for_requests(call)
        return adapter.state is AdapterState.LOADED or (adapter.state is AdapterState.DEFERRED and self._outcomes.deferring)

    async def _changed(self, name: str, call: AdapterCall) -> Fetched | None:
        """Return the source's current content if it may differ from a loaded adapter's; None if it does not or need not be looked at.

        Raises:
            RequestError: the source cannot be read; Conflict, a newer call came meanwhile.
        """
        adapter = self._table.newest(name)
        if adapter is None or call.read_again or not adapter.may_be_behind(call):
            return None
        earlier, source = adapter.fetched, call.source
        assert earlier is not None, "it is read by nobody else"
        fetched = await self._fetcher.fetch_adapter(
            source,
            digest=call.digest,
            deadline_s=call.deadline_seconds,
            report=lambda done, total: None,
            name=name,
            public_only=call.public_only,
        )
        newest = self._table.newest(name)
        if newest is adapter and fetched.may_differ(earlier):
            return fetched
        self._fetcher.release(fetched)
        if newest is not adapter and (newest is None or not newest.is_content(call)):
            raise RequestError(ErrorCode.CONFLICT, f"adapter {name!r}: a newer call came while its source was read")
        return None

    def _wanted(self, name: str, call: AdapterCall, changed: Fetched | None) -> Adapter:
        """Return the adapter of a call: the newest of its name, the current one, or a new one beside it."""
        newest, current = self._table.newest(name), self._table.get(name)
        again = changed is not None or call.read_again
        if again or newest is None or not newest.is_content(call):
            self._outcomes.discard(self._table.drop_arriving(name), f"adapter {name!r}: a newer call asks for other content")
            same = not again and current is not None and current.is_content(call)
            newest = current if same and current is not None else self._added(name, call)
        if changed is not None:
            newest.fetched = changed
        newest.describe(call)
        return newest

    def _added(self, name: str, call: AdapterCall) -> Adapter:
        adapter, current = self._table.new(name, call), self._table.get(name)
        if current is not None and current.serves:
            self._table.arrive(adapter)
            return adapter
        self._table.put(adapter)
        if current is not None:
            self._outcomes.give_up(current, f"adapter {name!r}: a newer call asks for other content")
            self._outcomes.release(current)
        if _is_for_requests(call):
            adapter.state = AdapterState.CACHED
        return adapter

    # --- one load -------------------------------------------------------------------------------------------------------

    async def _run(self, adapter: Adapter, load: Load) -> None:
        """Load an adapter from its source to all ranks, and record the outcome."""
        started = time.monotonic()
        try:
            loaded = await self._brought(adapter, load)
        except asyncio.CancelledError:
            self._outcomes.failed(adapter, load, load.superseded or RequestError(ErrorCode.TERMINATING, "the worker is shutting down"))
        except GroupFailed as error:
            message = f"adapter {adapter.name!r}: the rank group was lost while it was loading: {error}"
            self._outcomes.failed(adapter, load, RequestError(ErrorCode.RANK_FAILED, message))
        except RequestError as error:
            self._outcomes.failed(adapter, load, error)
        except Exception as error:
            log.exception("adapter=%s the load failed unexpectedly", adapter.name)
            self._outcomes.failed(
                adapter, load, RequestError(ErrorCode.RANK_FAILED, f"adapter {adapter.name!r}: {type(error).__name__}: {error}")
            )
        else:
            if loaded is None:
                self._outcomes.deferred(adapter, load)
                self._waking.load_when_serving()
            else:
                self._outcomes.succeeded(adapter, load, loaded)
                self.loads.took(adapter, time.monotonic() - started)
        self._table.move()

    async def _brought(self, adapter: Adapter, load: Load) -> LoadedLoRA | None:
        """Fetch, prepare, wait for turn and room, and load on the ranks, all within the deadline; return None while they sleep."""
        prepared: PreparedAdapter | None = None
        try:
            async with asyncio.timeout_at(load.deadline_s) as limit:
                await self._fetch(adapter, load)
                while True:
                    if self._outcomes.deferring and await self._is_right_unread(adapter, load):
                        return None
                    await self._settled()
                    if self._outcomes.deferring:
                        continue
                    if self._table.room_for(adapter) is not None:
                        prepared = await self._tell.prepare(adapter, timeout_s=max(0.001, _left_s(load)))
                        async with self._in_order:
                            if self._outcomes.deferring:
                                continue
                            self._require_serving(f"adapter {adapter.name!r}")
                            victims = self._table.room_for(adapter)
                            if victims is not None:
                                load.registering = True
                                limit.reschedule(None)  # the call has a deadline of its own
                                left_s = max(0.001, _left_s(load))
                                return await self._tell.add_for(adapter, victims, timeout_s=left_s, prepared=prepared)
                        # Release it while waiting, as a load that waits takes no memory.
                        prepared.close()
                    load.waits_for_room = True
                    await self._table.moved()
        except TimeoutError:
            raise self._too_late(adapter, load) from None
        finally:
            if prepared is not None:
                prepared.close()

    async def _fetch(self, adapter: Adapter, load: Load) -> None:
        if adapter.fetched is None:
            started = time.monotonic()

            def report(done: int, total: int | None) -> None:
                adapter.progress = done, total

            adapter.fetched = await self._fetcher.fetch_adapter(
                adapter.call.source,
                digest=adapter.pinned,
                deadline_s=_left_s(load),
                report=report,
                name=adapter.name,
                public_only=adapter.call.public_only,
            )
            if adapter.progress is not None:
                self.loads.fetch_durations.observe(time.monotonic() - started)
                self.loads.fetched_bytes += adapter.progress[0]
        adapter.state = AdapterState.LOADING

    async def _is_right_unread(self, adapter: Adapter, load: Load) -> bool:
        """Return whether the ranks still sleep, and the file passes every check that needs no rank."""
        if not load.asked:
            self._require_serving(f"adapter {adapter.name!r}")
        assert adapter.fetched is not None
        adapter.fetched = await self._fetcher.check_adapter(
            adapter.fetched, digest=adapter.pinned, deadline_s=_left_s(load), name=adapter.name
        )
        return self._outcomes.deferring

    def _too_late(self, adapter: Adapter, load: Load) -> RequestError:
        if load.waits_for_room:
            holders = ", ".join(self._table.holders())
            message = f"adapter {adapter.name!r}: expected room in the ranks' memory within its deadline, found it held by {holders}"
            return RequestError(ErrorCode.CAPACITY_EXCEEDED, message)
        what = "fetched" if adapter.state is AdapterState.FETCHING else "loaded, behind other loads,"
        return RequestError(ErrorCode.TIMEOUT, f"adapter {adapter.name!r}: expected it {what} within the time limit of its load")

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an adapter could not be unloaded: %s", error)


def _left_s(load: Load) -> float:
    return load.deadline_s - asyncio.get_running_loop().time()


def _is_for_requests(call: AdapterCall) -> bool:
    return call.residency is Residency.ON_DEMAND
