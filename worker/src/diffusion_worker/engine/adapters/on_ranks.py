# SPDX-License-Identifier: Apache-2.0
"""Adapter calls to the ranks: all load an adapter or none does. Evictions are recorded in the table."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import msgspec

from diffusion_worker.engine.adapters.adapter import Adapter
from diffusion_worker.engine.adapters.table import AdapterTable
from diffusion_worker.engine.state.histogram import Durations
from diffusion_worker.engine.state.rank_calls import CallAll
from diffusion_worker.engine.state.rank_protocol import Prepare, PreparedAdapter
from diffusion_worker.engine.state.state_document import AdapterState
from diffusion_worker.errors import ErrorCode, GroupFailed, RequestError
from diffusion_worker.messages import LoadedLoRA

log = logging.getLogger(__name__)

# Unloading is quick; past this time a rank is stuck, which its step deadline detects.
UNLOAD_TIMEOUT_S = 30.0


class AdapterLoads:
    """Counters of loads since the start: codes with OK among them, durations of successes, and evictions."""

    def __init__(self) -> None:
        self.codes = Counter[str]()
        self.durations = Durations()
        # Durations of fetches from remote sources.
        self.fetch_durations = Durations()
        self.fetched_bytes = 0
        self.evictions = 0

    def took(self, adapter: Adapter, seconds: float) -> None:
        """Record the seconds of a load that succeeded."""
        adapter.load_s = seconds
        self.durations.observe(seconds)


class AdapterRanks:
    """The adapter calls to the ranks, with their effects on the table."""

    def __init__(
        self,
        table: AdapterTable,
        loads: AdapterLoads,
        call_all: CallAll,
        prepare: Prepare,
        *,
        in_background: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._table = table
        self._loads = loads
        self._call_all = call_all
        self._prepare = prepare
        self._in_background = in_background
        self._undoing: set[asyncio.Task[None]] = set()

    async def prepare(self, adapter: Adapter, *, timeout_s: float) -> PreparedAdapter:
        """Have an adapter's files read, checked and laid out, beside the ranks; raise RequestError."""
        return await self._prepare(self._request(adapter), self._options(adapter), timeout_s=timeout_s)

    async def add_for(
        self, adapter: Adapter, victims: Sequence[Adapter], *, timeout_s: float, prepared: PreparedAdapter | None = None
    ) -> LoadedLoRA:
        """Load an adapter, and evict the victims for it once its file was found right, or none. Raises RequestError, GroupFailed."""
        adapter.registered = True
        for victim in victims:
            victim.going = True
        try:
            evict = [victim.lora_int_id for victim in victims]
            loaded = await self.add(adapter, evict=evict, timeout_s=timeout_s, prepared=prepared)
        except RequestError:
            # Undo the load on all ranks; this does nothing on ranks that did not load, and runs behind a load that is late.
            self.undo(adapter, victims)
            raise
        except GroupFailed:
            adapter.registered = False
            _stay(victims)
            raise
        self._evicted(victim for victim in victims if victim.lora_int_id in loaded.evicted)
        _stay(victims)
        return loaded

    async def add(
        self, adapter: Adapter, *, evict: Sequence[int] = (), timeout_s: float, prepared: PreparedAdapter | None = None
    ) -> LoadedLoRA:
        """Load a prepared adapter on all ranks, and check that they agree; without `prepared` prepare it first.

        Raises:
            RequestError. GroupFailed.
        """
        until_s = time.monotonic() + timeout_s
        if prepared is None:
            prepared = await self.prepare(adapter, timeout_s=timeout_s)
        try:
            replies = await self._call_all(
                "add_lora",
                timeout_s=max(0.001, until_s - time.monotonic()),
                request=self._request(adapter),
                options=self._options(adapter) | {"evict": list(evict)},
                parts=prepared.parts,
            )
        finally:
            prepared.close()
        results = [msgspec.msgpack.decode(reply.result or b"", type=LoadedLoRA) for reply in replies]
        if len({(result.identity, *result.evicted) for result in results}) != 1:
            raise RequestError(
                ErrorCode.RANK_FAILED,
                f"adapter {adapter.name!r}: expected the same content and evictions on every rank, found different ones",
            )
        adapter.kept = [f"{result.identity} {result.checksum}" for result in results]
        return results[0]

    def _request(self, adapter: Adapter) -> dict[str, object]:
        fetched = adapter.fetched
        assert fetched is not None, "only what is here can be read"
        return {"lora_name": adapter.name, "lora_int_id": adapter.lora_int_id, "lora_path": fetched.path, "lora_root": fetched.root}

    def _options(self, adapter: Adapter) -> dict[str, object]:
        call, fetched = adapter.call, adapter.fetched
        digest = adapter.pinned or (fetched.digest if fetched else None)
        content = {"digest": digest, "identity": adapter.pinned_identity, "components": call.components}
        return content | {"format": call.format, "expected_rank": call.expected_rank}

    def _evicted(self, adapters: Iterable[Adapter]) -> None:
        for adapter in adapters:
            adapter.state, adapter.registered = AdapterState.CACHED, False
            self._loads.evictions += 1
            log.info("adapter=%s evicted", adapter.name)

    def undo(self, adapter: Adapter, victims: Sequence[Adapter] = ()) -> None:
        """Undo a failed load: unload it everywhere; mark as evicted only victims the ranks no longer hold."""
        undoing = self._in_background(self._undo(adapter, adapter.lora_int_id, victims))
        self._undoing.add(undoing)
        undoing.add_done_callback(self._undoing.discard)

    async def undone(self) -> None:
        """Wait until all failed loads are undone on the ranks."""
        if self._undoing:
            await asyncio.wait(self._undoing)

    async def _undo(self, adapter: Adapter, lora_int_id: int, victims: Sequence[Adapter]) -> None:
        try:
            await self.remove(lora_int_id)
            if victims:
                await self._evict_everywhere([victim for victim in victims if victim.state is AdapterState.LOADED])
        except GroupFailed:
            pass  # the ranks that had it are gone
        finally:
            if adapter.lora_int_id == lora_int_id:  # otherwise it is being loaded again
                adapter.registered = False
            _stay(victims)
            self._table.move()

    async def _evict_everywhere(self, victims: Sequence[Adapter]) -> None:
        """Remove victims from all ranks that some rank evicted for a load that failed on another."""
        replies = await self._call_all("list_loras", timeout_s=UNLOAD_TIMEOUT_S)
        held = [msgspec.msgpack.decode(reply.result or b"", type=list[int]) for reply in replies]
        gone = [victim for victim in victims if not all(victim.lora_int_id in ids for ids in held)]
        for victim in gone:
            if any(victim.lora_int_id in ids for ids in held):
                await self.remove(victim.lora_int_id)
        self._evicted(gone)

    async def remove(self, lora_int_id: int) -> None:
        """Unload an adapter from the ranks; harmless if it is not loaded. Raises RequestError, GroupFailed."""
        await self._call_all("remove_lora", timeout_s=UNLOAD_TIMEOUT_S, lora_int_id=lora_int_id)


def _stay(victims: Sequence[Adapter]) -> None:
    """Let requests use these victims again, as the load that might have evicted them is over."""
    for victim in victims:
        victim.going = False
