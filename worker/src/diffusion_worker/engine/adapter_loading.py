# SPDX-License-Identifier: Apache-2.0
"""Loads and unloads adapters: on all ranks or on none, beside the ones that run, never in the middle of a step."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from diffusion_worker.config import WorkerConfig
from diffusion_worker.engine.adapters import Adapter, AdapterTable
from diffusion_worker.engine.documents import AdapterCall, AdapterDocument, AdapterState, DesiredState, Problem
from diffusion_worker.engine.durations import Durations
from diffusion_worker.engine.rank_answers import require_success
from diffusion_worker.engine.rank_group import RankGroup
from diffusion_worker.errors import ErrorCode, GroupFailed, RequestError
from diffusion_worker.messages import LoadedLoRA, RpcReply
from diffusion_worker.sources.source import Source

log = logging.getLogger(__name__)

# Taking an adapter out of its slot is a memset; past this a rank is stuck, which its step deadline will notice.
UNLOAD_TIMEOUT_S = 30.0
# A replaced adapter's running requests may finish this long.
REPLACE_DRAIN_S = 120.0

Abort = Callable[[list[str], ErrorCode, str], None]


class AdapterLoads:
    """What became of the loads since the start: their codes, OK among them, and how long the successful ones took."""

    def __init__(self) -> None:
        self.codes = Counter[str]()
        self.durations = Durations()


class AdapterLoader:
    """Keeps the ranks' adapters as the table says."""

    def __init__(self, table: AdapterTable, ranks: RankGroup, *, ranks_total: int, abort: Abort) -> None:
        self.loads = AdapterLoads()
        self._table = table
        self._ranks = ranks
        self._ranks_total = ranks_total
        self._abort = abort
        self._loading = asyncio.Lock()
        self._cleaning: set[asyncio.Task[None]] = set()

    async def load_at_start(self, config: WorkerConfig, desired: DesiredState) -> None:
        """Try every adapter once; one that fails is kept as Failed and keeps nothing else from serving."""
        calls = [(name, AdapterCall(operation_id="start", source=Source(path=path))) for name, path in config.preload_loras.items()]
        for wanted in desired.adapters:
            call = AdapterCall(operation_id="start", source=wanted.source, digest=wanted.digest, scale=wanted.scale)
            calls.append((wanted.name, call))
        for name, call in calls:
            try:
                await self.put(name, call)
            except RequestError as error:
                log.error("adapter=%s not loaded code=%s: %s", name, error.code, error.message)

    async def put(self, name: str, call: AdapterCall) -> AdapterDocument:
        """Have an adapter loaded under a name. One with other bytes is loaded beside the old one and then replaces it.

        Raises:
            RequestError: InvalidAdapter, DigestMismatch, CapacityExceeded, RankFailed, Timeout. A loaded adapter of the name
                stays as it was; without one the name is kept as Failed, with the reason.
        """
        async with self._loading:
            existing = self._table.get(name)
            if existing is not None and _is_wanted(existing, call):
                existing.scale = call.scale
                return existing.document(self._ranks_total)
            adapter = self._table.new(name, call)
            replaces = existing is not None and existing.state is AdapterState.LOADED
            if not replaces:
                self._table.put(adapter)
            try:
                self._table.require_slot(adapter)
                loaded = await self._load(adapter, call)
                self._require_wanted(adapter, existing if replaces else adapter)
            except GroupFailed as error:
                lost = RequestError(ErrorCode.RANK_FAILED, f"adapter {name!r}: the rank group was lost while it was loading: {error}")
                self._mark_failed(adapter, lost)
                raise lost from error
            except RequestError as error:
                self._mark_failed(adapter, error)
                raise
            adapter.loaded = loaded
            adapter.state = AdapterState.LOADED
            self.loads.codes["OK"] += 1
            if replaces and (previous := self._table.put(adapter)) is not None:
                self._in_background(self._retire(previous, REPLACE_DRAIN_S))
            log.info("adapter=%s loaded digest=%s rank=%d", name, loaded.digest, loaded.rank)
            return adapter.document(self._ranks_total)

    async def reload(self) -> None:
        """Load on a new generation of ranks what was loaded on the last one, under the same ids and with the same bytes.

        One that cannot be loaded any more becomes Failed, and the requests that use it end with AdapterNotLoaded.

        Raises:
            GroupFailed: the new generation is lost as well.
        """
        async with self._loading:
            for adapter in list(self._table):
                if adapter.loaded is not None and not adapter.unloading:
                    await self._load_again(adapter, adapter.loaded)

    async def _load_again(self, adapter: Adapter, loaded: LoadedLoRA) -> None:
        call = AdapterCall(operation_id="restart", source=adapter.source, digest=loaded.digest)
        try:
            await self._load(adapter, call)
            self.loads.codes["OK"] += 1
        except RequestError as error:
            log.error("adapter=%s not loaded again code=%s: %s", adapter.name, error.code, error.message)
            adapter.loaded = None
            if adapter.state is AdapterState.LOADED:
                self._mark_failed(adapter, error)
            why = f"adapter {adapter.name!r} could not be loaded again after the rank group was lost: {error.message}"
            self._abort(sorted(adapter.users), ErrorCode.ADAPTER_NOT_LOADED, why)

    async def delete(self, name: str, *, drain_s: float) -> None:
        """Make a name unknown at once, then unload what it stood for when nobody uses it or the time is over.

        Raises:
            RequestError: NotFound, RankFailed, Timeout.
        """
        if self._table.get(name) is None:
            raise RequestError(ErrorCode.NOT_FOUND, f"adapter {name!r} is not known here")
        adapter = self._table.take_out(name)
        if adapter is not None:
            await self._retire(adapter, drain_s)
        log.info("adapter=%s unloaded", name)

    async def call_all(self, method: str, *, timeout_s: float, **kwargs: object) -> list[RpcReply]:
        """Run a method on every rank; raises one RequestError that names the ranks that failed."""
        replies = await self._ranks.call(method, timeout_s=timeout_s, output_rank=None, exec_all_ranks=False, **kwargs)
        require_success(method, replies)
        return replies

    async def _load(self, adapter: Adapter, call: AdapterCall) -> LoadedLoRA:
        started = time.monotonic()
        request = {"lora_name": adapter.name, "lora_int_id": adapter.lora_int_id, "lora_path": call.source.path}
        options = {"digest": call.digest, "components": call.components, "format": call.format, "expected_rank": call.expected_rank}
        try:
            replies = await self.call_all("add_lora", timeout_s=call.deadline_seconds, request=request, options=options)
            results = [msgspec.msgpack.decode(reply.result or b"", type=LoadedLoRA) for reply in replies]
            if len({result.digest for result in results}) != 1:
                raise RequestError(ErrorCode.RANK_FAILED, f"adapter {adapter.name!r}: the ranks read different files")
        except RequestError:
            # All ranks or none; where it was not loaded this does nothing. In order behind a load that is late.
            self._in_background(self._unload(adapter))
            raise
        self.loads.durations.observe(time.monotonic() - started)
        return results[0]

    def _mark_failed(self, adapter: Adapter, error: RequestError) -> None:
        self.loads.codes[error.code] += 1
        adapter.state = AdapterState.FAILED
        adapter.error = Problem(error.code, error.message, error.retryable)

    def _require_wanted(self, adapter: Adapter, holder: Adapter | None) -> None:
        """After a load: the name must still be held by whom it was, or somebody deleted it meanwhile."""
        if self._table.get(adapter.name) is not holder:
            if holder is not adapter:
                self._in_background(self._unload(adapter))
            raise RequestError(ErrorCode.CONFLICT, f"adapter {adapter.name!r} was removed while it was loading")

    async def _retire(self, adapter: Adapter, drain_s: float) -> None:
        """Wait until nobody uses a leaving adapter, end those who still do, unload it."""
        try:
            async with asyncio.timeout(drain_s):
                await adapter.unused.wait()
        except TimeoutError:
            self._abort(sorted(adapter.users), ErrorCode.ADAPTER_REMOVED, f"adapter {adapter.name!r} was removed while in use")
            await adapter.unused.wait()
        await self._unload(adapter)
        self._table.forget(adapter)

    async def _unload(self, adapter: Adapter) -> None:
        adapter.unloading = True
        with contextlib.suppress(GroupFailed):  # the ranks that had it are gone
            await self.call_all("remove_lora", timeout_s=UNLOAD_TIMEOUT_S, lora_int_id=adapter.lora_int_id)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._cleaning.add(task)
        task.add_done_callback(self._cleaned)

    def _cleaned(self, task: asyncio.Task[None]) -> None:
        self._cleaning.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an adapter could not be unloaded: %s", error)


def _is_wanted(adapter: Adapter, call: AdapterCall) -> bool:
    """Whether a loaded adapter is what a call asks for. Without a digest the source decides."""
    if adapter.state is not AdapterState.LOADED or adapter.loaded is None or adapter.source != call.source:
        return False
    return call.digest is None or call.digest == adapter.loaded.digest
