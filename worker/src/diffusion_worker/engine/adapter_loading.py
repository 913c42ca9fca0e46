# SPDX-License-Identifier: Apache-2.0
"""Loads and unloads adapters: on all ranks or on none, beside the ones that run, never in the middle of a step.

Files are fetched side by side; the ranks are told of one adapter after the other. Whoever wants an adapter waits for its one
load. The newest call for a name wins: a load that it makes needless ends with Conflict, and leaves nothing behind.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from diffusion_worker.engine.adapter_ranks import AdapterLoads, AdapterRanks
from diffusion_worker.engine.adapter_table import AdapterTable
from diffusion_worker.engine.adapters import Adapter, Load
from diffusion_worker.engine.documents import AdapterCall, AdapterDocument, AdapterState, Problem, Residency
from diffusion_worker.engine.rank_answers import require_success
from diffusion_worker.engine.rank_group import RankGroup
from diffusion_worker.errors import ErrorCode, GroupFailed, RequestError
from diffusion_worker.messages import LoadedLoRA, RpcReply
from diffusion_worker.sources.fetching import Fetcher

log = logging.getLogger(__name__)

# A replaced adapter's running requests may finish this long.
REPLACE_DRAIN_S = 120.0
# To load an adapter on a new generation of ranks, from a file that is here.
RELOAD_TIMEOUT_S = 120.0

Abort = Callable[[list[str], ErrorCode, str], None]


class AdapterLoader:
    """Keeps the ranks' adapters as the table says.

    `settled` returns when no new generation of ranks is being started, and `require_serving` raises where none can load.
    """

    def __init__(
        self,
        table: AdapterTable,
        ranks: RankGroup,
        fetcher: Fetcher,
        *,
        ranks_total: int,
        abort: Abort,
        settled: Callable[[], Awaitable[None]],
        require_serving: Callable[[str], None],
    ) -> None:
        self.loads = AdapterLoads()
        self._table = table
        self._ranks = ranks
        self._fetcher = fetcher
        self._ranks_total = ranks_total
        self._abort = abort
        self._settled = settled
        self._require_serving = require_serving
        self._tell = AdapterRanks(table, self.loads, self.call_all, in_background=self._in_background)
        self._in_order = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()

    async def put(self, name: str, call: AdapterCall) -> AdapterDocument:
        """Have an adapter under a name, loaded unless it is for the first request that wants it.

        What is there with the same content takes over scale, residency and priority. Other content is loaded beside it and
        then replaces it.

        Raises:
            RequestError: InvalidAdapter and the other codes of files and sources, CapacityExceeded, RankFailed, Timeout,
                Conflict with a newer call. A loaded adapter of the name stays as it was; without one the name is kept as
                Failed, with the reason.
        """
        self._table.require_place(name, call)
        adapter = self._wanted(name, call)
        if adapter.state is not AdapterState.LOADED and not (adapter.state is AdapterState.CACHED and _is_for_requests(call)):
            await asyncio.shield(self.begin(adapter, call.deadline_seconds, asked=True).done)
        return adapter.document(self._ranks_total)

    def begin(self, adapter: Adapter, deadline_s: float, *, asked: bool = False) -> Load:
        """Begin to load an adapter of the table; the load that runs where one does. Its `done` raises as `put` does."""
        if adapter.load is not None:
            adapter.load.asked |= asked
            return adapter.load
        load = adapter.load = Load(deadline_s=asyncio.get_running_loop().time() + deadline_s, asked=asked)
        adapter.error = adapter.progress = None
        adapter.state = AdapterState.FETCHING if adapter.fetched is None else AdapterState.LOADING
        adapter.lora_int_id = self._table.next_id()
        load.task = self._in_background(self._run(adapter, load))
        return load

    async def reload(self) -> None:
        """Load on a new generation of ranks what was loaded on the last one, under the same ids and with the same bytes.

        One that cannot be loaded any more becomes Failed, and the requests that use it end with AdapterNotLoaded.

        Raises:
            GroupFailed: the new generation is lost as well.
        """
        async with self._in_order:
            for adapter in list(self._table):
                if adapter.state in (AdapterState.LOADED, AdapterState.DRAINING) and not adapter.unloading:
                    await self._load_again(adapter)

    async def delete(self, name: str, *, drain_s: float) -> None:
        """Make a name unknown at once, then unload what it stood for when nobody uses it or the time is over.

        Raises:
            RequestError: NotFound, RankFailed, Timeout.
        """
        arriving = self._table.drop_arriving(name)
        adapter = self._table.take_out(name)
        if adapter is None:
            raise RequestError(ErrorCode.NOT_FOUND, f"adapter {name!r} is not known here")
        for loading in (arriving, adapter):
            self._give_up(loading, f"adapter {name!r} was removed while it was loading")
        await self._retired(adapter, drain_s)
        log.info("adapter=%s unloaded", name)

    def stop(self, reason: RequestError) -> None:
        """End all loads, and those who wait for them, with an error."""
        for adapter in self._table:
            if adapter.load is not None:
                adapter.load.give_up(reason)

    async def call_all(self, method: str, *, timeout_s: float, **kwargs: object) -> list[RpcReply]:
        """Run a method on every rank; raises one RequestError that names the ranks that failed."""
        replies = await self._ranks.call(method, timeout_s=timeout_s, output_rank=None, exec_all_ranks=False, **kwargs)
        require_success(method, replies)
        return replies

    # --- names ----------------------------------------------------------------------------------------------------------

    def _wanted(self, name: str, call: AdapterCall) -> Adapter:
        """The adapter of a call: the newest of its name, the one that has the name, or a new one beside them."""
        newest, current = self._table.newest(name), self._table.get(name)
        if newest is None or not newest.is_content(call):
            self._give_up(self._table.drop_arriving(name), f"adapter {name!r}: a newer call asks for another one")
            newest = current if current is not None and current.is_content(call) else self._added(name, call)
        newest.describe(call)
        return newest

    def _added(self, name: str, call: AdapterCall) -> Adapter:
        adapter, current = self._table.new(name, call), self._table.get(name)
        if current is not None and current.state is AdapterState.LOADED:
            self._table.arrive(adapter)
            return adapter
        self._table.put(adapter)
        if current is not None:
            self._give_up(current, f"adapter {name!r}: a newer call asks for another one")
            self._release(current)
        if _is_for_requests(call):
            adapter.state = AdapterState.CACHED
        return adapter

    def _give_up(self, adapter: Adapter | None, why: str) -> None:
        if adapter is not None and adapter.load is not None:
            adapter.load.give_up(RequestError(ErrorCode.CONFLICT, why))

    # --- one load -------------------------------------------------------------------------------------------------------

    async def _run(self, adapter: Adapter, load: Load) -> None:
        """From the source to all ranks, and what becomes of the adapter by it."""
        started = time.monotonic()
        try:
            loaded = await self._brought(adapter, load)
        except asyncio.CancelledError:
            self._failed(adapter, load, load.superseded or RequestError(ErrorCode.TERMINATING, "the server is shutting down"))
        except GroupFailed as error:
            message = f"adapter {adapter.name!r}: the rank group was lost while it was loading: {error}"
            self._failed(adapter, load, RequestError(ErrorCode.RANK_FAILED, message))
        except RequestError as error:
            self._failed(adapter, load, error)
        except Exception as error:
            log.exception("adapter=%s the load broke", adapter.name)
            self._failed(adapter, load, RequestError(ErrorCode.RANK_FAILED, f"adapter {adapter.name!r}: {type(error).__name__}: {error}"))
        else:
            self._succeeded(adapter, load, loaded)
            self.loads.durations.observe(time.monotonic() - started)
        self._table.move()

    async def _brought(self, adapter: Adapter, load: Load) -> LoadedLoRA:
        """Fetch, wait for the turn and for room, tell the ranks; all within the deadline."""
        try:
            async with asyncio.timeout_at(load.deadline_s) as limit:
                await self._fetch(adapter, load)
                while True:
                    await self._settled()
                    async with self._in_order:
                        self._require_serving(f"adapter {adapter.name!r}")
                        victims = self._table.room_for(adapter)
                        if victims is not None:
                            load.registering = True
                            limit.reschedule(None)  # the call has a deadline of its own
                            return await self._tell.add_for(adapter, victims, timeout_s=max(0.001, _left_s(load)))
                    load.waits_for_room = True
                    await self._table.moved()
        except TimeoutError:
            raise self._too_late(adapter, load) from None

    async def _fetch(self, adapter: Adapter, load: Load) -> None:
        if adapter.fetched is None:
            started = time.monotonic()

            def report(done: int, total: int | None) -> None:
                adapter.progress = done, total

            adapter.fetched = await self._fetcher.fetch_adapter(
                adapter.call.source, digest=adapter.pinned, deadline_s=_left_s(load), report=report, name=adapter.name
            )
            if adapter.progress is not None:
                self.loads.fetch_durations.observe(time.monotonic() - started)
                self.loads.fetched_bytes += adapter.progress[0]
        adapter.state = AdapterState.LOADING

    # --- what becomes of it ---------------------------------------------------------------------------------------------

    def _succeeded(self, adapter: Adapter, load: Load, loaded: LoadedLoRA) -> None:
        adapter.load = None
        if load.superseded is not None or adapter not in self._table:
            self._in_background(self._tell.undo(adapter, adapter.lora_int_id))
            self._release(adapter)
            load.end(RequestError(ErrorCode.CONFLICT, f"adapter {adapter.name!r}: nobody wants it any more"))
            return
        adapter.loaded, adapter.state = loaded, AdapterState.LOADED
        self._table.touch(adapter)
        self.loads.codes["OK"] += 1
        if self._table.get(adapter.name) is not adapter:
            previous = self._table.put(adapter)
            # It may have been evicted, and be on its way back for a request.
            self._give_up(previous, f"adapter {adapter.name!r}: a newer call replaced it")
            if previous is not None:
                self._in_background(self._retired(previous, REPLACE_DRAIN_S))
        log.info("adapter=%s loaded digest=%s rank=%d", adapter.name, loaded.digest, loaded.rank)
        load.end()

    def _failed(self, adapter: Adapter, load: Load, error: RequestError) -> None:
        """The name keeps what it had; one that had nothing is Failed, or where the reason passes may be tried by a request."""
        adapter.load = None
        load.end(error)
        problem = Problem(error.code, error.message, error.retryable)
        current = self._table.get(adapter.name)
        if load.superseded is not None:
            if current is not adapter:
                self._release(adapter)
                return
            problem = Problem(load.superseded.code, load.superseded.message, load.superseded.retryable)
        self.loads.codes[problem.code] += 1
        if current is not adapter:
            self._table.drop_arriving(adapter.name)
            self._release(adapter)
            if current is not None:
                current.error = problem
            return
        adapter.error = problem
        passes = problem.retryable or problem.code == ErrorCode.CAPACITY_EXCEEDED
        if passes and (adapter.loaded is not None or not load.asked):
            adapter.state = AdapterState.CACHED
        else:
            self._mark_failed(adapter, problem)

    def _mark_failed(self, adapter: Adapter, problem: Problem) -> None:
        adapter.state, adapter.error, adapter.loaded = AdapterState.FAILED, problem, None
        self._release(adapter)

    def _release(self, adapter: Adapter) -> None:
        """Nobody reads its file any more."""
        fetched, adapter.fetched = adapter.fetched, None
        if fetched is not None:
            self._fetcher.release(fetched)

    def _too_late(self, adapter: Adapter, load: Load) -> RequestError:
        if load.waits_for_room:
            holders = ", ".join(self._table.holders())
            message = f"adapter {adapter.name!r}: expected room in the ranks' memory within its deadline, found it held by {holders}"
            return RequestError(ErrorCode.CAPACITY_EXCEEDED, message)
        what = "fetched" if adapter.state is AdapterState.FETCHING else "loaded, behind other loads,"
        return RequestError(ErrorCode.TIMEOUT, f"adapter {adapter.name!r}: expected it {what} within its deadline")

    async def _load_again(self, adapter: Adapter) -> None:
        started = time.monotonic()
        try:
            await self._tell.add(adapter, timeout_s=RELOAD_TIMEOUT_S)
            self.loads.codes["OK"] += 1
            self.loads.durations.observe(time.monotonic() - started)
        except RequestError as error:
            log.error("adapter=%s not loaded again code=%s: %s", adapter.name, error.code, error.message)
            self._in_background(self._tell.undo(adapter, adapter.lora_int_id))
            self.loads.codes[error.code] += 1
            if adapter.state is AdapterState.LOADED:
                self._mark_failed(adapter, Problem(error.code, error.message, error.retryable))
            why = f"adapter {adapter.name!r} could not be loaded again after the rank group was lost: {error.message}"
            self._abort(sorted(adapter.users), ErrorCode.ADAPTER_NOT_LOADED, why)

    # --- the end of one -------------------------------------------------------------------------------------------------

    async def _retired(self, adapter: Adapter, drain_s: float) -> None:
        """Wait until nobody uses a leaving adapter, end those who still do, unload it."""
        if adapter.state is not AdapterState.DRAINING:
            if adapter.load is None:
                self._release(adapter)
            return
        try:
            async with asyncio.timeout(drain_s):
                await adapter.unused.wait()
        except TimeoutError:
            self._abort(sorted(adapter.users), ErrorCode.ADAPTER_REMOVED, f"adapter {adapter.name!r} was removed while in use")
            await adapter.unused.wait()
        adapter.unloading = True
        try:
            await self._tell.remove(adapter.lora_int_id)
        except GroupFailed:
            pass  # the ranks that had it are gone
        finally:
            adapter.registered = False
            self._table.forget(adapter)
            self._release(adapter)
            self._table.move()

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
