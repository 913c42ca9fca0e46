# SPDX-License-Identifier: Apache-2.0
"""Choice of a request's adapters: exactly those it names, and an error while one of them is missing."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeVar

import msgspec

from diffusion_worker.config import OnMissing, WorkerConfig
from diffusion_worker.engine.adapters import machine
from diffusion_worker.engine.adapters.machine import passes
from diffusion_worker.engine.adapters.runner import AdapterRunner
from diffusion_worker.engine.adapters.table import LOADING, Adapter, AdapterTable
from diffusion_worker.engine.requests.admission import AdapterChoice, GenerationParams
from diffusion_worker.engine.requests.holding import NoLongerServing
from diffusion_worker.engine.state.lifecycle import EngineLife
from diffusion_worker.engine.state.request_events import AppliedAdapter
from diffusion_worker.engine.state.state_document import AdapterState, EngineState, ProblemReport, Residency
from diffusion_worker.errors import ErrorCode, RequestError, refused
from diffusion_worker.messages import LoRAUse

# Suggested wait for an adapter: a load of a local file is a matter of seconds.
RETRY_AFTER_S = 5.0
# States of adapters that are in memory, or will be before the model serves again.
THERE = (AdapterState.LOADED, AdapterState.DEFERRED)
# Errors of a load that concern the whole server, not its adapter.
OF_THE_SERVER = (ErrorCode.ASLEEP, ErrorCode.BUSY, ErrorCode.STARTING, ErrorCode.TERMINATING, ErrorCode.ENGINE_FAILED)

T = TypeVar("T")


def chosen(params: GenerationParams, *, served_names: Sequence[str], most: int) -> list[AdapterChoice]:
    """List a request's adapters, `model` first unless it is the base model; `lora_scale`, if set, goes to the only one without a scale.

    Raises:
        RequestError: InvalidRequest for a repeated name, for more than `most`, or if not exactly one could take `lora_scale`.
    """
    named = [] if params.model in (None, *served_names) else [AdapterChoice(str(params.model), field="model")]
    choices = [*named, *params.loras]
    names = [choice.name for choice in choices]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise refused("lora", "every adapter once", f"{twice!r} {names.count(twice)} times")
    if len(choices) > most:
        raise refused("lora", f"at most {most} adapters in a request", len(choices))
    if params.lora_scale is None:
        return choices
    bare = [choice for choice in choices if choice.scale is None]
    if len(bare) != 1:
        found = f"{len(bare)} of {len(choices)} adapters without one" if choices else "no adapter, only the base model"
        raise refused("lora_scale", "exactly one adapter without a scale of its own", found)
    return [choice if choice.scale is not None else msgspec.structs.replace(choice, scale=params.lora_scale) for choice in choices]


class TakenAdapter(NamedTuple):
    """An adapter that a request holds, and how strongly it is used."""

    adapter: Adapter
    scale: float

    @property
    def use(self) -> LoRAUse:
        """Return the use in the ranks' terms."""
        return LoRAUse(self.adapter.lora_int_id, self.scale)

    @property
    def applied(self) -> AppliedAdapter:
        """Return the use in the terms of an image's provenance."""
        return AppliedAdapter(self.adapter.name, self.adapter.digest, self.scale, self.adapter.identity)


class AdapterWait:
    """The longest time that a request waits for adapters in all, including restarts."""

    def __init__(self) -> None:
        self._until_s: float | None = None

    def until(self, timeout_s: float) -> float:
        """Return the end of a request's waits, in seconds of the event loop; the first call sets it, and later calls cannot move it."""
        if self._until_s is None:
            self._until_s = asyncio.get_running_loop().time() + timeout_s
        return self._until_s


class AdapterSelection:
    """The choice of adapters for requests. Adapters that are not in memory are loaded first, if the options or the adapter allow it."""

    def __init__(self, table: AdapterTable, runner: AdapterRunner, config: WorkerConfig, life: EngineLife) -> None:
        # Number of requests that wait for their adapters.
        self.waiting = 0
        self._table = table
        self._runner = runner
        self._life = life
        self._served_name = config.served_name
        self._on_missing = config.lora_on_missing
        self._timeout_s = config.lora_load_timeout_s
        self._numbers = itertools.count()

    def resolve(self, name: str, field: str = "model") -> Adapter:
        """Return the adapter of a name in this field of a request; it may still have to be loaded.

        Raises:
            RequestError: model_not_found for a name nobody declared, AdapterNotLoaded with the reason for one that is not served.
        """
        adapter = self._table.get(name)
        if adapter is None:
            adapters = ", ".join(self._table.names()) or "none"
            message = f"model {name!r} is not known to this worker: expected {self._served_name!r} or one of its adapters: {adapters}"
            raise RequestError(ErrorCode.MODEL_NOT_FOUND, message, details={"field": field})
        if adapter.state in THERE or (self._is_loaded_for_requests(adapter) and adapter.state is not AdapterState.FAILED):
            return adapter
        why = f": {_reason(adapter, adapter.error)}" if adapter.error else ""
        failed = adapter.state is AdapterState.FAILED
        lasting = failed and adapter.error is not None and not passes(adapter.error)
        message = f"adapter {name!r} is {adapter.state.value}, not Loaded{why}"
        raise RequestError(ErrorCode.ADAPTER_NOT_LOADED, message, retry_after_s=None if failed else RETRY_AFTER_S, lasting=lasting)

    def require_known(self, choices: Sequence[AdapterChoice]) -> None:
        """Raise RequestError for the first adapter that is unknown (model_not_found) or failed (AdapterNotLoaded), without a wait."""
        for choice in choices:
            adapter = self._table.get(choice.name)
            if adapter is None or adapter.state is AdapterState.FAILED:
                self.resolve(choice.name, choice.field)

    def served(self) -> list[Adapter]:
        """List by name the adapters that are loaded, or that a request would load; those on their way into memory are left out."""
        return [adapter for name in self._table.names() if (adapter := self._served(name)) is not None]

    @asynccontextmanager
    async def taken(self, choices: Sequence[AdapterChoice], request_id: str, wait: AdapterWait) -> AsyncIterator[list[TakenAdapter]]:
        """Hold all adapters of a request at once while entered; first wait for those that have to be loaded, no longer than `wait`.

        Raises:
            RequestError: model_not_found, AdapterNotLoaded. NoLongerServing: the model stopped serving during the wait.
        """
        self._require_serving()
        adapters = [self.resolve(choice.name, choice.field) for choice in choices]
        if not all(adapter.usable for adapter in adapters):
            adapters = await self._waited_for(choices, wait)
        machine.taken(self._table, adapters, request_id, time.monotonic())
        try:
            yield [
                TakenAdapter(adapter, adapter.call.scale if choice.scale is None else choice.scale)
                for adapter, choice in zip(adapters, choices, strict=True)
            ]
        finally:
            self._runner.perform(machine.given_back(self._table, adapters, request_id))

    async def _waited_for(self, choices: Sequence[AdapterChoice], wait: AdapterWait) -> list[Adapter]:
        """Load the adapters that are missing, again if one goes meanwhile, until all are usable at the same moment; return them as chosen.

        Raises:
            RequestError: model_not_found; AdapterNotLoaded, also at the end of `wait`; an error of the server itself. NoLongerServing: the
                model went to sleep or ends.
        """
        number = next(self._numbers)
        self.waiting += 1
        try:
            async with asyncio.timeout_at(wait.until(self._timeout_s)):
                while True:
                    self._require_serving()
                    adapters = [self.resolve(choice.name, choice.field) for choice in choices]
                    machine.awaited(self._table, adapters, number)
                    missing = [adapter for adapter in adapters if not adapter.usable]
                    if not missing:
                        return adapters
                    await self._bring(missing)
        except TimeoutError:
            raise self._too_late(choices) from None
        finally:
            self.waiting -= 1
            machine.awaited(self._table, [], number)

    async def _bring(self, missing: list[Adapter]) -> None:
        """Begin to load all of these, and wait until the load of the first ends; with none to begin, until some adapter moves.

        Raises:
            RequestError: AdapterNotLoaded, or an error of the server itself. NoLongerServing: the model stopped serving.
        """
        loads = [self._runner.load(adapter, self._timeout_s) for adapter in missing if not adapter.going]
        if not loads:
            await self._unless_cold(self._runner.moved())
            return
        error = await self._unless_cold(asyncio.shield(loads[0]))
        if error is None or error.code is ErrorCode.CONFLICT:
            return  # after a Conflict the adapter of the newer call is next
        self._require_serving()
        if error.code in OF_THE_SERVER:
            raise error
        message = f"adapter {missing[0].name!r} could not be loaded: {_reason(missing[0], error)}"
        details, lasting = {"code": error.code}, not passes(error)
        raise RequestError(ErrorCode.ADAPTER_NOT_LOADED, message, retry_after_s=RETRY_AFTER_S, details=details, lasting=lasting)

    async def _unless_cold(self, moved: Awaitable[T]) -> T:
        """Await something; raise NoLongerServing if the model stops serving first."""
        waiting, cold = asyncio.ensure_future(moved), asyncio.create_task(self._cold())
        try:
            await asyncio.wait({waiting, cold}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise NoLongerServing
            return waiting.result()
        finally:
            waiting.cancel()
            cold.cancel()

    async def _cold(self) -> None:
        while self._life.state_after_restart is EngineState.READY:
            await self._life.wait_for_change()

    def _require_serving(self) -> None:
        """Raise NoLongerServing unless the model serves, or will once its ranks are started again."""
        if self._life.state_after_restart is not EngineState.READY:
            raise NoLongerServing

    def _too_late(self, choices: Sequence[AdapterChoice]) -> RequestError:
        found = [adapter for choice in choices if (adapter := self._table.get(choice.name)) is not None and not adapter.usable]
        states = (f"{adapter.name!r}, which is {adapter.state.value}{_bytes_of(adapter)}" for adapter in found)
        missing = ", ".join(states) or "a moment with all of them in memory"
        message = f"expected all adapters of the request in memory within {self._timeout_s:g} s, still waiting for {missing}"
        return RequestError(ErrorCode.ADAPTER_NOT_LOADED, message, retry_after_s=RETRY_AFTER_S)

    def _is_loaded_for_requests(self, adapter: Adapter) -> bool:
        return self._on_missing is OnMissing.LOAD or adapter.call.residency is Residency.ON_DEMAND

    def _served(self, name: str) -> Adapter | None:
        try:
            adapter = self.resolve(name)
        except RequestError:
            return None
        return None if adapter.state in LOADING else adapter


def _reason(adapter: Adapter, error: ProblemReport | RequestError) -> str:
    """Describe a load's failure without the worker's file paths, which only the control port may show."""
    message = error.message
    for path in (adapter.call.source.path, adapter.fetched and adapter.fetched.path):
        if path:
            message = message.replace(path, "its source")
    return f"{error.code}: {message}"


def _bytes_of(adapter: Adapter) -> str:
    if adapter.progress is None or adapter.state is not AdapterState.FETCHING:
        return ""
    done, total = adapter.progress
    return f" ({done} of {total or 'an unknown number of'} bytes)"
