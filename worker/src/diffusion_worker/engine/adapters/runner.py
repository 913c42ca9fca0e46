# SPDX-License-Identifier: Apache-2.0
"""The runner of the state machine of adapters: it performs effects on sources and ranks, and feeds their results back.

An adapter is loaded on all ranks or on none, beside running requests, never in the middle of a step. Files are fetched side by side; the
ranks load one adapter after the other. All waiters for an adapter share its load. Sleeping ranks receive no calls about adapters.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import closing
from typing import Any

import msgspec

from diffusion_worker.engine.adapters import machine
from diffusion_worker.engine.adapters.effects import Abort, Answer, Cancel, Effect, Expire, Moved, Release, Retire, Start, Undo
from diffusion_worker.engine.adapters.table import Adapter, AdapterTable, Load
from diffusion_worker.engine.state.lifecycle import ENDING, EngineLife
from diffusion_worker.engine.state.rank_calls import RankCalls
from diffusion_worker.engine.state.rank_protocol import PreparedAdapter, RankGroup
from diffusion_worker.engine.state.state_document import AdapterCall, AdapterState, EngineState
from diffusion_worker.errors import ErrorCode, GroupFailed, RequestError
from diffusion_worker.messages import LoadedLoRA
from diffusion_worker.sources.fetching import Fetched, Fetcher

log = logging.getLogger(__name__)

# States in which the ranks neither load nor unload adapters.
DEFERRING = (EngineState.SLEEPING, EngineState.ASLEEP, EngineState.WAKING)
# Deadline of a load from a local file, on a new generation of ranks or after a wake that it came too late for.
RELOAD_TIMEOUT_S = 120.0
# Unloading is quick; past this time a rank is stuck, which its step deadline detects.
UNLOAD_TIMEOUT_S = 30.0
# Seconds for which the record of a failure that only a call brought is shown.
FAILED_S = 3600.0


class AdapterRunner:
    """The runner of one engine. `abort` ends requests with an error: they belong to the step loop, which knows nothing of adapters."""

    def __init__(
        self,
        table: AdapterTable,
        ranks: RankGroup,
        fetcher: Fetcher,
        life: EngineLife,
        *,
        abort: Callable[[Sequence[str], ErrorCode, str], None],
    ) -> None:
        self._table = table
        self._ranks = ranks
        self._call_all = RankCalls(ranks).call_all
        self._fetcher = fetcher
        self._life = life
        self._abort = abort
        # Held during calls to the ranks about an adapter.
        self._in_order = asyncio.Lock()
        self._moved = asyncio.Event()
        self._outcomes: dict[int, asyncio.Future[RequestError | None]] = {}
        self._loads: dict[int, asyncio.Task[None]] = {}
        self._retiring: dict[Adapter, asyncio.Task[None]] = {}
        self._undoing: set[asyncio.Task[None]] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._late: asyncio.Task[None] | None = None

    @property
    def deferring(self) -> bool:
        """Return whether the ranks sleep or are still waking: additions and removals wait until they serve."""
        return self._life.state_after_restart in DEFERRING

    # --- calls ----------------------------------------------------------------------------------------------------------

    async def put(self, name: str, call: AdapterCall) -> Adapter:
        """Put an adapter under a name, load it unless its residency is OnDemand, and return it.

        An adapter with the same content takes over scale, residency and priority. A call that names its digest and identity
        needs no source; for any other call the source is looked at. Other content is loaded beside the old one and then replaces it. While
        the model sleeps an adapter is fetched and checked, and loaded before the model serves: Deferred.

        Raises:
            RequestError: InvalidAdapter and the other codes of files and sources, CapacityExceeded, RankFailed, Timeout,
                Conflict with a newer call. A loaded adapter of the name stays as it was; without one the name is kept as
                Failed, with the reason.
        """
        self._table.require_place(name, call)
        changed = await self._changed(name, call)
        deadline_s = self._now_s() + call.deadline_seconds
        self.perform(machine.put(self._table, name, call, deadline_s=deadline_s, changed=changed, deferring=self.deferring))
        adapter = self._table.newest(name)
        assert adapter is not None, "it was put just now"
        if adapter.load is not None and (error := await asyncio.shield(self._outcome(adapter.load))) is not None:
            raise error
        return adapter

    def declare(self, name: str, call: AdapterCall) -> None:
        """Put a new adapter under a name without loading it: a request or a later call does. Raises RequestError (CapacityExceeded)."""
        self._table.require_place(name, call)
        self.perform(machine.put(self._table, name, call, deadline_s=None))

    def load(self, adapter: Adapter, timeout_s: float) -> "asyncio.Future[RequestError | None]":
        """Begin to load an adapter for a request, or join the load that runs, and return the future of the outcome: an error or None.

        Errors are those of `put`; for a Deferred adapter of a sleeping model it is Asleep, and no load begins.
        """
        if adapter.state is AdapterState.DEFERRED and self.deferring:
            outcome = asyncio.get_running_loop().create_future()
            message = f"adapter {adapter.name!r}: the model is asleep, and loads the adapter when it wakes"
            outcome.set_result(RequestError(ErrorCode.ASLEEP, message))
            return outcome
        self.perform(machine.wanted(self._table, adapter, self._now_s() + timeout_s))
        assert adapter.load is not None
        return self._outcome(adapter.load)

    async def delete(self, name: str, *, drain_s: float) -> None:
        """Remove a name at once, and wait until its adapter is unloaded, once no request uses it.

        Requests that still use it after `drain_s` seconds end with AdapterRemoved. Sleeping ranks unload it when they wake, before they
        serve; this call does not wait for that.

        Raises:
            RequestError: NotFound, RankFailed, Timeout.
        """
        adapter = self._table.get(name)
        if adapter is None:
            raise RequestError(ErrorCode.NOT_FOUND, f"adapter {name!r} is not known to this worker")
        self.perform(machine.removed(self._table, name, drain_s))
        if adapter in self._retiring and not self.deferring:
            await asyncio.shield(self._retiring[adapter])
        log.info("adapter=%s removed", name)

    def stop(self, reason: RequestError) -> None:
        """Give `reason` as error to the waiters of all loads, and cancel the loads that have not reached the ranks."""
        self.perform(machine.ended(self._table, reason))

    async def moved(self) -> None:
        """Wait until an adapter comes, goes or becomes unused."""
        await self._moved.wait()

    async def _changed(self, name: str, call: AdapterCall) -> Fetched | None:
        """Return the source's current content if it may differ from a loaded adapter's; None if it does not or need not be looked at.

        Raises:
            RequestError: the source cannot be read; Conflict, a newer call came meanwhile.
        """
        adapter = self._table.newest(name)
        earlier = adapter.fetched if adapter is not None else None
        if adapter is None or earlier is None or call.read_again or not adapter.may_be_behind(call):
            return None
        fetched = await self._fetcher.fetch_adapter(
            call.source,
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

    # --- effects --------------------------------------------------------------------------------------------------------

    def perform(self, effects: Iterable[Effect]) -> None:
        """Perform the effects of a transition, in order and without waiting: loads and unloads run in the background."""
        for effect in effects:
            match effect:
                case Start(adapter, load):
                    self._loads[load.number] = self._in_background(self._run(adapter, load))
                case Cancel(load):
                    # A task that is cancelled before its first step would not record its end.
                    asyncio.get_running_loop().call_soon(self._loads[load.number].cancel)
                case Answer(load, error):
                    if (outcome := self._outcomes.pop(load.number, None)) is not None:
                        outcome.set_result(error)
                case Release(fetched):
                    self._fetcher.release(fetched)
                case Retire(adapter, drain_s):
                    self._retiring[adapter] = retiring = self._in_background(self._retire(adapter, drain_s))
                    retiring.add_done_callback(functools.partial(self._retired, adapter))
                case Undo(adapter, number, victims):
                    undoing = self._in_background(self._undo(adapter, number, victims))
                    self._undoing.add(undoing)
                    undoing.add_done_callback(self._undoing.discard)
                case Abort(request_ids, code, message):
                    self._abort(request_ids, code, message)
                case Expire(adapter):
                    asyncio.get_running_loop().call_later(FAILED_S, machine.expired, self._table, adapter)
                case Moved():
                    moved, self._moved = self._moved, asyncio.Event()
                    moved.set()

    def _outcome(self, load: Load) -> "asyncio.Future[RequestError | None]":
        """Return the outcome of a load, which all its waiters share."""
        return self._outcomes.setdefault(load.number, asyncio.get_running_loop().create_future())

    def _retired(self, adapter: Adapter, retiring: asyncio.Task[None]) -> None:
        del self._retiring[adapter]

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task that loads or unloads an adapter failed unexpectedly: %r", error)

    # --- one load -------------------------------------------------------------------------------------------------------

    async def _run(self, adapter: Adapter, load: Load) -> None:
        """Load an adapter from its source to all ranks, or record the error."""
        error, undo = None, False
        try:
            await self._bring(adapter, load)
        except asyncio.CancelledError:
            error = load.superseded or RequestError(ErrorCode.TERMINATING, "the worker is shutting down")
        except GroupFailed as lost:
            message = f"adapter {adapter.name!r}: the rank group was lost while the adapter was loading: {lost}"
            error = RequestError(ErrorCode.RANK_FAILED, message)
        except RequestError as failed:
            error, undo = failed, load.registering
        except Exception as defect:
            log.exception("adapter=%s its load failed unexpectedly", adapter.name)
            message = f"adapter {adapter.name!r}: its load failed unexpectedly: {type(defect).__name__}: {defect}"
            error, undo = RequestError(ErrorCode.RANK_FAILED, message), load.registering
        del self._loads[load.number]
        if error is not None:
            self.perform(machine.load_failed(self._table, adapter, error, undo=undo))
        elif adapter.state is AdapterState.DEFERRED and (self._late is None or self._late.done()):
            self._late = self._in_background(self._load_when_serving())

    async def _bring(self, adapter: Adapter, load: Load) -> None:
        """Fetch, prepare, wait for turn and room, and load on the ranks, all within the deadline; while they sleep, check the file."""
        started_s, waited = time.monotonic(), False
        try:
            async with asyncio.timeout_at(load.deadline_s) as limit:
                await self._fetch(adapter, load)
                while True:
                    if self.deferring and await self._deferred(adapter, load):
                        return
                    await self._settled()
                    if self.deferring:
                        continue
                    if machine.room_for(self._table, adapter) is not None:
                        # It is released while the load waits, which takes no memory then.
                        with closing(await self._prepare(adapter, load.deadline_s)) as prepared:
                            async with self._in_order:
                                if self.deferring:
                                    continue
                                self._require_serving(adapter)
                                if machine.prepared(self._table, adapter):
                                    limit.reschedule(None)  # the call has a deadline of its own
                                    await self._add(adapter, load.deadline_s, started_s, prepared=prepared, victims=load.victims)
                                    return
                    waited = True
                    await self.moved()
        except TimeoutError:
            raise self._too_late(adapter, waited=waited) from None

    async def _fetch(self, adapter: Adapter, load: Load) -> None:
        if adapter.fetched is None:
            started_s = time.monotonic()

            def report(done: int, total: int | None) -> None:
                adapter.progress = done, total

            fetched = await self._fetcher.fetch_adapter(
                adapter.call.source,
                digest=adapter.pinned,
                deadline_s=load.deadline_s - self._now_s(),
                report=report,
                name=adapter.name,
                public_only=adapter.call.public_only,
            )
            machine.file_came(self._table, adapter, fetched, time.monotonic() - started_s)

    async def _deferred(self, adapter: Adapter, load: Load) -> bool:
        """Check a file as far as it can be without ranks, and end the load if they still sleep then; return whether it ended."""
        if not load.asked:
            self._require_serving(adapter)
        assert adapter.fetched is not None
        left_s = load.deadline_s - self._now_s()
        fetched = await self._fetcher.check_adapter(adapter.fetched, digest=adapter.pinned, deadline_s=left_s, name=adapter.name)
        if deferring := self.deferring:
            self.perform(machine.slept(self._table, adapter, fetched))
        return deferring

    async def _settled(self) -> None:
        """Wait until no generation of ranks is being started again; raise GroupFailed if none comes any more."""
        life = self._life
        while life.state is not EngineState.STARTING and life.failure is None and (life.restarting or self._ranks.loss is not None):
            await life.wait_for_change()
        if life.failure is not None:
            raise GroupFailed(life.failure)

    def _require_serving(self, adapter: Adapter) -> None:
        """Raise RequestError if the ranks cannot load an adapter now."""
        if self._life.state not in (EngineState.STARTING, EngineState.DRAINING):
            self._life.require_ready(f"adapter {adapter.name!r}", restarting_too=False)

    def _too_late(self, adapter: Adapter, *, waited: bool) -> RequestError:
        if waited:
            holders = ", ".join(sorted({each.name for each in self._table if each.registered}))
            expected = "expected room in the ranks' memory within the time limit of its load"
            message = f"adapter {adapter.name!r}: {expected}, found it held by the adapters {holders}"
            return RequestError(ErrorCode.CAPACITY_EXCEEDED, message)
        fetching = adapter.state is AdapterState.FETCHING
        end = "to be fetched" if fetching else "to be loaded, after the loads before it,"
        return RequestError(ErrorCode.TIMEOUT, f"adapter {adapter.name!r}: expected it {end} within the time limit of its load")

    # --- calls to the ranks ---------------------------------------------------------------------------------------------

    async def _prepare(self, adapter: Adapter, until_s: float) -> PreparedAdapter:
        """Have an adapter's files read, checked and laid out, beside the ranks; raise RequestError."""
        return await self._ranks.prepare_adapter(_request(adapter), _options(adapter), timeout_s=self._left_s(until_s))

    async def _add(
        self,
        adapter: Adapter,
        until_s: float,
        started_s: float,
        *,
        prepared: PreparedAdapter | None = None,
        victims: Sequence[Adapter] = (),
    ) -> None:
        """Load an adapter on all ranks, evict the victims for it once its file was found right, and check that the ranks agree.

        Raises:
            RequestError. GroupFailed.
        """
        with closing(prepared or await self._prepare(adapter, until_s)) as taken:
            replies = await self._call_all(
                "add_lora",
                timeout_s=self._left_s(until_s),
                request=_request(adapter),
                options=_options(adapter) | {"evict": [victim.lora_int_id for victim in victims]},
                parts=taken.parts,
            )
        results = [msgspec.msgpack.decode(reply.result or b"", type=LoadedLoRA) for reply in replies]
        if len({(result.identity, *result.evicted) for result in results}) != 1:
            raise RequestError(
                ErrorCode.RANK_FAILED,
                f"adapter {adapter.name!r}: expected every rank to load the same content and to evict the same adapters, found differences",
            )
        kept = [f"{result.identity} {result.checksum}" for result in results]
        self.perform(machine.loaded(self._table, adapter, results[0], kept, time.monotonic() - started_s))

    async def _remove(self, lora_int_id: int) -> None:
        """Unload an adapter from the ranks; harmless if it is not loaded. Raises RequestError, GroupFailed."""
        await self._call_all("remove_lora", timeout_s=UNLOAD_TIMEOUT_S, lora_int_id=lora_int_id)

    async def _undo(self, adapter: Adapter, number: int, victims: Sequence[Adapter]) -> None:
        """Unload an adapter whose load failed or is not wanted any more, and the victims that some rank has evicted for it.

        This runs behind a load that is late, and does nothing on ranks that did not load.
        """
        gone: list[Adapter] = []
        try:
            await self._remove(number)
            if victims:
                gone = await self._evict_everywhere([victim for victim in victims if victim.state is AdapterState.LOADED])
        except GroupFailed:
            pass  # the ranks that had it are gone
        finally:
            self.perform(machine.undone(self._table, adapter, number, victims, gone))

    async def _evict_everywhere(self, victims: Sequence[Adapter]) -> list[Adapter]:
        """Remove victims from all ranks that some rank evicted for a load that failed on another; return them."""
        replies = await self._call_all("list_loras", timeout_s=UNLOAD_TIMEOUT_S)
        held = [msgspec.msgpack.decode(reply.result or b"", type=list[int]) for reply in replies]
        gone = [victim for victim in victims if not all(victim.lora_int_id in ids for ids in held)]
        for victim in gone:
            if any(victim.lora_int_id in ids for ids in held):
                await self._remove(victim.lora_int_id)
        return gone

    # --- the end of one -------------------------------------------------------------------------------------------------

    async def _retire(self, adapter: Adapter, drain_s: float) -> None:
        """Wait until no request uses a leaving adapter, end requests past the time, and unload it once the ranks are awake."""
        try:
            async with asyncio.timeout(drain_s):
                await self._unused(adapter)
        except TimeoutError:
            self._abort(
                sorted(adapter.users),
                ErrorCode.ADAPTER_REMOVED,
                f"adapter {adapter.name!r} was removed or replaced while this request still used it",
            )
            await self._unused(adapter)
        while self.deferring:
            await self._life.wait_for_change()
        await self._unload(adapter)

    async def _unused(self, adapter: Adapter) -> None:
        while adapter.users:
            await self.moved()

    async def _unload(self, adapter: Adapter) -> None:
        """Unload a leaving adapter that nobody uses from the ranks; raise RequestError. No effect if it is being unloaded or all ends."""
        if adapter.unloading or self._life.state_after_restart in ENDING:
            return
        adapter.unloading = True
        try:
            await self._remove(adapter.lora_int_id)
        except GroupFailed:
            pass  # the ranks that had it are gone
        finally:
            self.perform(machine.unloaded(self._table, adapter))

    # --- ranks that come back -------------------------------------------------------------------------------------------

    def ranks_emptied(self) -> None:
        """Record that the ranks hold no adapters any more, after a sleep that discards or a start asleep.

        Loaded ones become Deferred, or Cached if on demand. Their files are kept, so nothing is fetched a second time.
        """
        self.perform(machine.ranks_emptied(self._table, asleep=True))

    async def reload(self) -> None:
        """Load the adapters of the last generation of ranks on a new one, under the same ids and with the same bytes.

        An adapter that cannot be loaded any more becomes Failed, and the requests that use it end with AdapterNotLoaded. Deferred adapters
        are loaded as well.

        Raises:
            GroupFailed: the new generation is lost as well.
        """
        async with self._in_order:
            self.perform(machine.ranks_emptied(self._table, asleep=False))
            for adapter in self._table:
                if adapter.state in (AdapterState.LOADED, AdapterState.DRAINING) and not adapter.unloading:
                    await self._load_again(adapter, self._now_s() + RELOAD_TIMEOUT_S)
        await self.apply_deferred(self._now_s() + RELOAD_TIMEOUT_S)

    async def apply_deferred(self, until_s: float) -> None:
        """Unload adapters that left the table from awake ranks before they serve, and load all deferred ones, the most wanted first.

        If there is no room for all, the least wanted become `Cached`, as if they had been evicted. An adapter that cannot be
        loaded in time is Failed with the reason. A name whose new content fails keeps its old one.

        Raises:
            GroupFailed: the ranks are lost.
        """
        async with self._in_order:
            while True:
                for adapter in self._table.unused_leaving():
                    try:
                        await self._unload(adapter)
                    except RequestError as error:
                        log.error("adapter=%s could not be unloaded: %s", adapter.name, error.message)
                deferred = self._table.deferred()
                if not deferred:
                    break
                await self._load_deferred(deferred[0], until_s)
            await self._undone()

    async def load_again(self, lora_int_ids: Collection[int], timeout_s: float) -> None:
        """Unload adapters from awake ranks by their ids, and load those that the table still has from their files again.

        All are unloaded first, as some may share a copy. An adapter that cannot be loaded becomes Failed.

        Raises:
            RequestError: the ranks cannot unload an adapter. GroupFailed: the ranks are lost.
        """
        until_s = self._now_s() + timeout_s
        async with self._in_order:
            for lora_int_id in lora_int_ids:
                await self._remove(lora_int_id)
            for adapter in self._table:
                if adapter.registered and adapter.lora_int_id in lora_int_ids:
                    machine.found_wrong(self._table, adapter, time.monotonic())
                    await self._load_again(adapter, until_s)
            await self._undone()

    async def _load_deferred(self, adapter: Adapter, until_s: float) -> None:
        self.perform(machine.wake_reached(self._table, adapter, until_s))
        if (load := adapter.load) is None:
            return
        in_time = until_s > self._now_s()
        try:
            if not in_time:
                raise RequestError(ErrorCode.TIMEOUT, f"adapter {adapter.name!r}: expected its load to end within the wake's deadline")
            await self._add(adapter, until_s, time.monotonic(), victims=load.victims)
        except RequestError as error:
            log.error("adapter=%s not loaded at the wake code=%s: %s", adapter.name, error.code, error.message)
            self.perform(machine.load_failed(self._table, adapter, error, undo=in_time, lasting=True))
        except BaseException as error:
            broken = RequestError(
                ErrorCode.RANK_FAILED, f"adapter {adapter.name!r}: its load was broken off, and is due again at the next wake: {error}"
            )
            self.perform(machine.load_failed(self._table, adapter, broken, due=True))
            raise

    async def _load_again(self, adapter: Adapter, until_s: float) -> None:
        try:
            await self._add(adapter, until_s, time.monotonic())
        except RequestError as error:
            log.error("adapter=%s not loaded again into the ranks code=%s: %s", adapter.name, error.code, error.message)
            self.perform(machine.reload_failed(self._table, adapter, error))

    async def _load_when_serving(self) -> None:
        """Wait until the model serves, and begin to load adapters that were deferred too late for a wake; give up if the engine ends."""
        while self._life.state not in (EngineState.READY, EngineState.DRAINING):
            if self._life.state_after_restart in ENDING:
                return
            await self._life.wait_for_change()
        for adapter in self._table.deferred():
            self.perform(machine.wanted(self._table, adapter, self._now_s() + RELOAD_TIMEOUT_S, asked=True))

    async def _undone(self) -> None:
        """Wait until all failed loads are undone on the ranks."""
        if self._undoing:
            await asyncio.wait(self._undoing)

    def _left_s(self, until_s: float) -> float:
        return max(0.001, until_s - self._now_s())

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


def _request(adapter: Adapter) -> dict[str, object]:
    fetched = adapter.fetched
    assert fetched is not None, "only what is here can be read"
    return {"lora_name": adapter.name, "lora_int_id": adapter.lora_int_id, "lora_path": fetched.path, "lora_root": fetched.root}


def _options(adapter: Adapter) -> dict[str, object]:
    call, fetched = adapter.call, adapter.fetched
    digest = adapter.pinned or (fetched.digest if fetched else None)
    content = {"digest": digest, "identity": adapter.pinned_identity, "components": call.components}
    return content | {"format": call.format, "expected_rank": call.expected_rank}
