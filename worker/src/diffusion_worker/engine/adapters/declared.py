# SPDX-License-Identifier: Apache-2.0
"""The adapters that a server knows from its options and from the desired file: at its start, and again when it wakes.

The file and calls do not fight. Of a file that was read before only what changed in it counts, and of that only what no call
spoke of after the file was written: a mounted file lags behind the calls of whoever writes it, and whichever is newer is right.
So what only a call brought stays, and what a call took away does not come back by a file that has it still.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from diffusion_worker.config import WorkerConfig
from diffusion_worker.engine.adapters.loading import AdapterLoader
from diffusion_worker.engine.state.state_document import AdapterCall, DesiredAdapter, DesiredState, Residency
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.sources.parsing import parse_source

log = logging.getLogger(__name__)

# Sources that are asked side by side.
FETCHES = 4

Call = tuple[str, AdapterCall]


class Changes(NamedTuple):
    """What a file says that the one before it did not."""

    removed: list[str]
    put: list[DesiredAdapter]


def changes(before: Sequence[DesiredAdapter], after: Sequence[DesiredAdapter]) -> Changes:
    """What became of the adapters of a file. Pure."""
    old, new = ({adapter.name: adapter for adapter in adapters} for adapters in (before, after))
    return Changes([name for name in old if name not in new], [adapter for name, adapter in new.items() if old.get(name) != adapter])


class DeclaredAdapters:
    """Keeps a loader's adapters as options and file declare them; `desired` is what the file says now."""

    def __init__(
        self,
        loader: AdapterLoader,
        config: WorkerConfig,
        desired: Callable[[], DesiredState],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._loader = loader
        self._config = config
        self._desired = desired
        self._clock = clock
        self._followed: list[DesiredAdapter] = []
        # When a call last spoke of a name, on the clock of the file's time.
        self._called_at_s: dict[str, float] = {}

    def called(self, name: str) -> None:
        """A call of the control port speaks of a name."""
        if self._config.desired_path is not None:
            self._called_at_s[name] = self._clock()

    async def load_at_start(self) -> None:
        """Try every adapter once; one that fails is kept as Failed and keeps nothing else from serving.

        Where there are more than fit in memory, the most wanted ones come last and so are there in the end.

        Raises:
            ConfigError: an option's source cannot be read.
        """
        self._followed = self._desired().adapters
        calls = [(name, _call(self._config, source)) for name, source in self._config.preload_loras.items()]
        calls += [(wanted.name, _desired_call(wanted, wanted.load_timeout_seconds)) for wanted in self._followed]
        calls.sort(key=lambda each: (each[1].residency is Residency.RESIDENT, each[1].priority))
        await self._put(calls)

    async def follow(self, deadline_s: float) -> None:
        """Do what the file says by now, where it changed; what is new in it is fetched within the deadline."""
        written_s = _written_s(self._config.desired_path)
        after = self._desired().adapters
        removed, put = changes(self._followed, after)
        self._followed = after
        for name in removed:
            if self._is_older(name, written_s):
                await self._remove(name)
        calls = [(each.name, _desired_call(each, each.load_timeout_seconds)) for each in put if self._is_older(each.name, written_s)]
        self._called_at_s = {name: at_s for name, at_s in self._called_at_s.items() if at_s >= written_s}
        try:
            async with asyncio.timeout(deadline_s):
                await self._put(calls)
        except TimeoutError:
            # Their fetches go on, and what they bring is loaded beside what serves then.
            log.error("adapters of the desired file are not all here after %.1f s", deadline_s)

    def _is_older(self, name: str, written_s: float) -> bool:
        """Whether what calls said of a name is older than the file."""
        return self._called_at_s.get(name, -1.0) < written_s

    async def _remove(self, name: str) -> None:
        try:
            await self._loader.delete(name, drain_s=0.0)
        except RequestError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                log.error("adapter=%s not unloaded code=%s: %s", name, error.code, error.message)

    async def _put(self, calls: Iterable[Call]) -> None:
        """Side by side; whatever fails is logged, and with the adapter in the state document."""
        turns = asyncio.Semaphore(FETCHES)

        async def put(name: str, call: AdapterCall) -> None:
            async with turns:
                try:
                    await self._loader.put(name, call)
                except RequestError as error:
                    log.error("adapter=%s not loaded code=%s: %s", name, error.code, error.message)

        await asyncio.gather(*(put(name, call) for name, call in calls if self._may_be(name)))

    def _may_be(self, name: str) -> bool:
        if name == self._config.served_name:
            log.error("adapter=%s not loaded code=%s: the name is that of the base model", name, ErrorCode.CONFLICT)
        return name != self._config.served_name


def _written_s(path: str | None) -> float:
    """When the file became what it is, by the clock of this machine; never, where there is none."""
    try:
        return Path(path).stat().st_mtime if path is not None else 0.0
    except OSError:
        return 0.0


def _call(config: WorkerConfig, source: str) -> AdapterCall:
    return AdapterCall(operation_id="start", source=parse_source(source), deadline_seconds=config.lora_load_timeout_s)


def _desired_call(wanted: DesiredAdapter, deadline_s: float) -> AdapterCall:
    return AdapterCall(
        operation_id="desired",
        source=wanted.source,
        digest=wanted.digest,
        scale=wanted.scale,
        components=wanted.components,
        format=wanted.format,
        expected_rank=wanted.expected_rank,
        residency=wanted.residency,
        priority=wanted.priority,
        deadline_seconds=deadline_s,
    )
