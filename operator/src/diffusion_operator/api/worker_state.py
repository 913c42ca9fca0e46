# SPDX-License-Identifier: Apache-2.0
"""The state document and error body of a worker's control API, as the operator reads them; unknown members are ignored.

The worker owns its own structs; tests/contract drives the worker's real server with these.
"""

from collections.abc import Mapping
from enum import StrEnum
from functools import cached_property

import msgspec

from diffusion_operator.api.adapter import Residency
from diffusion_operator.api.deployment_spec import SleepLevel, SleepPolicy
from diffusion_operator.api.source import AdapterSource


class _Wire(msgspec.Struct, frozen=True, rename="camel"):
    pass


class WorkerPhase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    SLEEPING = "sleeping"
    ASLEEP = "asleep"
    WAKING = "waking"
    RESTARTING = "restarting"
    FAILED = "failed"
    TERMINATING = "terminating"


class WireError(_Wire, frozen=True):
    """The error body, and the error inside records."""

    code: str
    message: str = ""
    retryable: bool = False
    retry_after_seconds: float | None = None


NO_FAILURES = frozenset({"Cancelled", "Conflict", "Busy"})
"""Codes of a sleep or wake that did not happen because something else came first."""


class Operation(_Wire, frozen=True):
    operation_id: str
    kind: str
    error: WireError | None = None
    seconds: float = 0.0
    freed_bytes: int | None = None
    level: SleepLevel | None = None

    @property
    def failed(self) -> bool:
        return self.error is not None and self.error.code not in NO_FAILURES


class HeldReport(_Wire, frozen=True):
    """Requests that wait until the model can serve them."""

    current: int = 0
    oldest_age_seconds: float | None = None


class LoadReport(_Wire, frozen=True):
    stage: str = ""
    bytes_done: int = 0
    bytes_total: int = 0


class ModelReport(_Wire, frozen=True):
    digest: str | None = None
    revision: str | None = None
    size_bytes: int | None = None
    pipeline: str | None = None


class MemoryReport(_Wire, frozen=True):
    """Of a rank; `level` is how deep it sleeps."""

    level: SleepLevel | None = None


class RankReport(_Wire, frozen=True):
    rank: int
    state: str
    memory: MemoryReport = MemoryReport()


class RecordState(StrEnum):
    """An adapter as its worker says. A `Cached` one is known and its file is there, but in no rank's memory.

    A `Deferred` one is loaded before its sleeping worker serves again.
    """

    FETCHING = "Fetching"
    LOADING = "Loading"
    LOADED = "Loaded"
    CACHED = "Cached"
    DEFERRED = "Deferred"
    DRAINING = "Draining"
    FAILED = "Failed"


class AdapterRecord(_Wire, frozen=True):
    """Components and format are in the worker's words; see api/adapter_load.py."""

    name: str
    state: RecordState
    digest: str | None = None
    source: AdapterSource = AdapterSource()
    scale: float = 1.0
    rank: int | None = None
    modules: int | None = None
    size_bytes: int | None = None
    ranks_loaded: int = 0
    ranks_total: int = 0
    refs: int = 0
    error: WireError | None = None
    revision: str | None = None
    components: tuple[str, ...] = ()
    format: str | None = None
    alpha: float | None = None
    base_model: str | None = None
    residency: Residency = Residency.CACHED
    priority: int = 0
    fetched_bytes: int | None = None
    total_bytes: int | None = None
    requests_total: int = 0
    last_request_age_seconds: float | None = None
    verification_failed: bool = False
    """A wake within the last ten minutes found it wrong; it was loaded again before anything was made with it."""
    load_seconds: float | None = None
    """Of its last load that succeeded, the fetch included."""


class LossReport(_Wire, frozen=True):
    """How a rank group was lost."""

    fault: str
    message: str = ""
    generation: int = 1


class WorkerState(_Wire, frozen=True, dict=True):
    """GET /v1/state. `generation` counts the lives of the rank group in this one of the server process."""

    boot_id: str
    state: WorkerPhase
    generation: int = 1
    operation: Operation | None = None
    last_operation: Operation | None = None
    in_flight: int = 0
    queued: int = 0
    load: LoadReport = LoadReport()
    model: ModelReport = ModelReport()
    ranks: tuple[RankReport, ...] = ()
    adapters: tuple[AdapterRecord, ...] = ()
    failure: WireError | None = None
    last_loss: LossReport | None = None
    last_request_age_seconds: float | None = None
    state_age_seconds: float = 0.0
    policy: SleepPolicy = SleepPolicy.ALWAYS_AWAKE
    held: HeldReport = HeldReport()

    @property
    def sleeps_at(self) -> SleepLevel | None:
        """The level of its sleep; None while it is awake, and where it does not say."""
        return next((rank.memory.level for rank in self.ranks if rank.memory.level is not None), None)

    @cached_property
    def named(self) -> Mapping[str, tuple[AdapterRecord, ...]]:
        """Adapters by name, found once: every one of hundreds is looked up on every replica in every pass."""
        found: dict[str, tuple[AdapterRecord, ...]] = {}
        for record in self.adapters:
            found[record.name] = (*found.get(record.name, ()), record)
        return found
