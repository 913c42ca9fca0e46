# SPDX-License-Identifier: Apache-2.0
"""The adapters that a server knows from its options and from the mounted files: at its start, and again when it wakes.

All are known from then on, and the most wanted ones are loaded: as many as the ranks' memory has room for.

Files and calls do not fight: mounted files lag behind the calls of their writer, and the newer of both counts. Files that were read
before count only for adapters that changed in them and that no later call named. So an adapter that only a call brought stays, and one
that a call removed stays away.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diffusion_worker.config import WorkerConfig
from diffusion_worker.engine.adapters.desired_files import mounted_adapters
from diffusion_worker.engine.adapters.runner import AdapterRunner
from diffusion_worker.engine.adapters.table import AdapterTable
from diffusion_worker.engine.state.state_document import AdapterCall, DesiredAdapter
from diffusion_worker.errors import ConfigError, ErrorCode, RequestError
from diffusion_worker.sources.parsing import parse_source

log = logging.getLogger(__name__)

# Sources that are read side by side.
FETCHES = 4

Call = tuple[str, AdapterCall]


class Changes(NamedTuple):
    """The names of adapters that left the mounted files since they were last read, and the adapters that are new or changed in them."""

    removed: list[str]
    put: list[DesiredAdapter]


def changes(before: Sequence[DesiredAdapter], after: Sequence[DesiredAdapter]) -> Changes:
    """Return the names removed between two versions of the files, and the adapters added or changed. Pure."""
    old, new = ({adapter.name: adapter for adapter in adapters} for adapters in (before, after))
    return Changes([name for name in old if name not in new], [adapter for name, adapter in new.items() if old.get(name) != adapter])


class DeclaredAdapters:
    """The adapters of a table, kept as options and the mounted file declare them."""

    def __init__(self, table: AdapterTable, runner: AdapterRunner, config: WorkerConfig) -> None:
        # Time of the last call of the control port about a name, on the clock of the files' times.
        self.called_at_s: dict[str, float] = {}
        self._table = table
        self._runner = runner
        self._config = config
        self._followed: dict[str, DesiredAdapter] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def load_at_start(self, deadline_s: float) -> None:
        """Make the adapters of options and mounted files known, and load the most wanted ones, for at most `deadline_s` seconds.

        A load that is not over then goes on while the model serves. A failed one is kept as Failed and does not stop the model from
        serving.

        Raises:
            ConfigError: an option's source cannot be read.
        """
        await self._follow({name: _call(self._config, source) for name, source in self._config.preload_loras.items()}, deadline_s)

    async def follow(self, deadline_s: float) -> None:
        """Apply the files where they changed, and wait for loads of new adapters, for at most `deadline_s` seconds; late ones go on."""
        await self._follow({}, deadline_s)

    def end(self) -> None:
        """Begin no further load; a load that runs goes on (see `AdapterRunner.stop`)."""
        for task in self._tasks:
            task.cancel()

    async def _follow(self, options: dict[str, AdapterCall], deadline_s: float) -> None:
        if (loading := await self._follow_file(options)) is not None:
            _, late = await asyncio.wait([loading], timeout=deadline_s)
            if late:
                log.error("not all declared adapters were loaded within %.1f s: the others are loaded while the model serves", deadline_s)

    async def _follow_file(self, options: dict[str, AdapterCall]) -> asyncio.Task[None] | None:
        """Apply the changes since the file was last read, and return the task that loads, if there is anything to load.

        A file that is missing or cannot be read changes nothing.
        """
        written_s, after = _written_s(self._config.desired_path), None
        try:
            after = mounted_adapters(self._config.desired_path)
        except ConfigError as error:
            log.error("the adapters of the desired files are not used, the last ones stay in force: %s", error)
        after = self._followed if after is None else after
        removed, put = changes([*self._followed.values()], [*after.values()])
        self._followed = after
        for name in removed:
            if self._is_older(name, written_s):
                await self._remove(name)
        calls = {each.name: _desired_call(each) for each in put if self._is_older(each.name, written_s)}
        self.called_at_s = {name: at_s for name, at_s in self.called_at_s.items() if at_s >= written_s}
        chosen = self._known(calls | {name: call for name, call in options.items() if name not in calls})
        return self._in_background(self._put(chosen, written_s)) if chosen else None

    def _is_older(self, name: str, written_s: float) -> bool:
        """Return whether the last call about a name is older than the files; True if there was none."""
        return self.called_at_s.get(name, -1.0) < written_s

    def _known(self, calls: dict[str, AdapterCall]) -> list[Call]:
        """Declare those of these adapters that are new, and return those to load now: of new ones the most wanted, then all known ones.

        A new one that cannot be declared, or has the base model's name, is logged and left out.
        """
        changed = [(name, call) for name, call in calls.items() if self._table.newest(name)]
        new = {name: call for name, call in calls.items() if self._may_be(name) and not self._table.newest(name)}
        wanted = [(name, new[name]) for name in self._table.most_wanted(new)]
        for name, call in new.items():
            try:
                self._runner.declare(name, call)
            except RequestError as error:
                log.error("adapter=%s not loaded code=%s: %s", name, error.code, error.message)
        return [(name, call) for name, call in wanted if self._table.newest(name)] + changed

    async def _remove(self, name: str) -> None:
        try:
            await self._runner.delete(name, drain_s=0.0)
        except RequestError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                log.error("adapter=%s removed, but not unloaded from every rank code=%s: %s", name, error.code, error.message)

    async def _put(self, calls: list[Call], written_s: float) -> None:
        """Load adapters, a few side by side; each failure is logged, and kept with its adapter in the state document."""
        turns, declared = iter(calls), {name: self._followed.get(name) for name, _ in calls}

        async def load() -> None:
            for name, call in turns:
                if not self._is_older(name, written_s) or self._followed.get(name) != declared.get(name):
                    continue  # a later call or later files ask for something else
                try:
                    await self._runner.put(name, call)
                except RequestError as error:
                    log.error("adapter=%s not loaded code=%s: %s", name, error.code, error.message)

        await asyncio.gather(*(load() for _ in range(FETCHES)))

    def _may_be(self, name: str) -> bool:
        if reserved := name in self._config.served_names:
            log.error("adapter=%s not loaded code=%s: its name is a served name of the base model", name, ErrorCode.CONFLICT)
        return not reserved

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task that loads the adapters of the desired files failed unexpectedly: %r", error)


def _written_s(path: str | None) -> float:
    """Return when the main file last changed, by this machine's clock; 0 without a file.

    The kubelet writes all files of a folder again when one of them changes.
    """
    try:
        return Path(path).stat().st_mtime if path is not None else 0.0
    except OSError:
        return 0.0


def _call(config: WorkerConfig, source: str) -> AdapterCall:
    return AdapterCall(operation_id="start", source=parse_source(source), deadline_seconds=config.lora_load_timeout_s)


def _desired_call(wanted: DesiredAdapter) -> AdapterCall:
    return AdapterCall(
        operation_id="desired",
        source=wanted.source,
        digest=wanted.digest,
        identity=wanted.identity,
        scale=wanted.scale,
        components=wanted.components,
        format=wanted.format,
        expected_rank=wanted.expected_rank,
        residency=wanted.residency,
        priority=wanted.priority,
        deadline_seconds=wanted.load_timeout_seconds,
    )
