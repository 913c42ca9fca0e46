# SPDX-License-Identifier: Apache-2.0
"""The state document and error body of a worker's control API, as the operator reads them; unknown members are ignored.

The worker owns its own structs; tests/contract drives the worker's real server with these.
"""

from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated

import msgspec
from msgspec import Meta

from diffusion_operator.api.adapter import Residency
from diffusion_operator.api.deployment_spec import SleepLevel, SleepPolicy
from diffusion_operator.api.foreign_text import Count, OpenWord, Seconds, SmallCount, plain_text
from diffusion_operator.api.source import AdapterSource

CODE_LENGTH = 64
MESSAGE_LENGTH = 1024
ID_LENGTH = 128
DIGEST_LENGTH = 71
IDENTITY_LENGTH = 80
MOST_RECORDS = 8192
"""Adapters or ranks in one document: more than fit into its 4 MiB, if each tells what a worker tells of one."""


class _Wire(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Base of the parts of a worker's answer.

    Parts with free text make it plain, and short enough for a status, in `__post_init__`.
    """


def _make_plain(struct: msgspec.Struct, **limits: int) -> None:
    """Escape and cut, in place, each named field whose text is longer than its limit or not printable. A field with None stays."""
    for name, limit in limits.items():
        text = getattr(struct, name)
        if text is not None and (len(text) > limit or not text.isprintable()):
            msgspec.structs.force_setattr(struct, name, plain_text(text, limit))


class WorkerPhase(OpenWord):
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
    """An error of a worker: the body of a refused call, or the error inside a record."""

    code: str
    message: str = ""
    retryable: bool = False
    retry_after_seconds: Seconds | None = None

    def __post_init__(self) -> None:
        _make_plain(self, code=CODE_LENGTH, message=MESSAGE_LENGTH)


CODES = frozenset(
    {
        "AdapterNotLoaded", "AdapterRemoved", "Asleep", "Busy", "CacheFull", "Cancelled", "CapacityExceeded", "Conflict", "DigestMismatch",
        "EngineFailed", "Forbidden", "IdentityMismatch", "InsufficientMemory", "InvalidAdapter", "InvalidRequest", "Managed",
        "MemoryNotReleased",
        "ModulesOutsideEnvelope", "NetworkError", "NoMatchingModules", "NotFound", "Overloaded", "RankFailed", "RankTooLarge",
        "RequestFailed", "SecretMissing", "SourceNotFound", "SourceUnauthorized", "StaleEpoch", "Starting", "Terminating", "Timeout",
        "TooLarge", "Unauthorized", "UnsupportedFormat", "VerificationFailed", "WrongBoot", "model_not_found",
    }
)  # fmt: skip
"""Error codes that a worker of this version has. A worker may answer with any other text."""

NO_FAILURES = frozenset({"Cancelled", "Conflict", "Busy"})
"""Codes of a sleep or wake that did not happen because something else came first."""


class Operation(_Wire, frozen=True):
    operation_id: str
    kind: str
    error: WireError | None = None
    seconds: Seconds = 0.0
    freed_bytes: Count | None = None
    level: SleepLevel | None = None

    def __post_init__(self) -> None:
        _make_plain(self, operation_id=ID_LENGTH, kind=16)

    @property
    def failed(self) -> bool:
        return self.error is not None and self.error.code not in NO_FAILURES


class HeldReport(_Wire, frozen=True):
    """Requests that wait until the model can serve them."""

    current: SmallCount = 0
    oldest_age_seconds: Seconds | None = None


class LoadReport(_Wire, frozen=True):
    stage: str = ""
    bytes_done: Count = 0
    bytes_total: Count = 0

    def __post_init__(self) -> None:
        _make_plain(self, stage=32)


class DesiredReport(_Wire, frozen=True):
    """A worker's report on its mounted files."""

    problem: WireError | None = None
    """The reason why some of their adapters may be missing: they come by calls only."""


class ModelReport(_Wire, frozen=True):
    digest: str | None = None
    revision: str | None = None
    size_bytes: Count | None = None
    pipeline: str | None = None

    def __post_init__(self) -> None:
        _make_plain(self, digest=DIGEST_LENGTH, revision=ID_LENGTH, pipeline=128)


class MemoryReport(_Wire, frozen=True):
    """A rank's memory; `level` is the level of its sleep."""

    level: SleepLevel | None = None


class RankReport(_Wire, frozen=True):
    rank: int
    state: str
    memory: MemoryReport = MemoryReport()


class RecordState(OpenWord):
    """The phase of an adapter on its worker.

    `Cached`: the worker knows the adapter and has its file, but no rank has it in memory. `Deferred`: the worker sleeps, and will load the
    adapter when it wakes, before it serves requests.
    """

    FETCHING = "Fetching"
    LOADING = "Loading"
    LOADED = "Loaded"
    CACHED = "Cached"
    DEFERRED = "Deferred"
    DRAINING = "Draining"
    FAILED = "Failed"


class AdapterRecord(_Wire, frozen=True):
    """A worker's report about an adapter. `components` and `format` have the worker's names; api/adapter_load.py translates them."""

    name: str
    state: RecordState
    digest: Annotated[str, Meta(max_length=DIGEST_LENGTH)] | None = None
    source: AdapterSource = AdapterSource()
    scale: float = 1.0
    rank: SmallCount | None = None
    modules: SmallCount | None = None
    size_bytes: Count | None = None
    ranks_loaded: SmallCount = 0
    ranks_total: SmallCount = 0
    refs: SmallCount = 0
    error: WireError | None = None
    revision: str | None = None
    components: Annotated[tuple[str, ...], Meta(max_length=64)] = ()
    format: Annotated[str, Meta(max_length=32)] | None = None
    alpha: float | None = None
    base_model: str | None = None
    residency: Residency = Residency.CACHED
    priority: int = 0
    fetched_bytes: Count | None = None
    total_bytes: Count | None = None
    requests_total: Count = 0
    last_request_age_seconds: Seconds | None = None
    verification_failed: bool = False
    """A wake within the last ten minutes found it wrong; it was loaded again before anything was made with it."""
    load_seconds: Seconds | None = None
    """Duration of the last successful load, including the fetch."""
    identity: Annotated[str, Meta(max_length=IDENTITY_LENGTH)] | None = None

    def __post_init__(self) -> None:
        # Once: a document may have thousands of records.
        words = f"{self.name}{self.digest}{self.revision}{self.format}{self.base_model}{self.identity}"
        if len(words) > ID_LENGTH + DIGEST_LENGTH + len(self.identity or "") or not words.isprintable():
            _make_plain(self, name=253, digest=DIGEST_LENGTH, revision=ID_LENGTH, format=32, base_model=256, identity=IDENTITY_LENGTH)


class LossReport(_Wire, frozen=True):
    """The loss of a rank group and its cause."""

    fault: str
    message: str = ""
    generation: SmallCount = 1

    def __post_init__(self) -> None:
        _make_plain(self, fault=CODE_LENGTH, message=MESSAGE_LENGTH)


class WorkerState(_Wire, frozen=True, gc=True, dict=True):
    """The response to GET /v1/state.

    `generation` is 1 for the first rank group of a server process, and rises with each restart of the group.
    """

    boot_id: str
    state: WorkerPhase
    generation: SmallCount = 1
    operation: Operation | None = None
    last_operation: Operation | None = None
    in_flight: SmallCount = 0
    queued: SmallCount = 0
    load: LoadReport = LoadReport()
    model: ModelReport = ModelReport()
    ranks: Annotated[tuple[RankReport, ...], Meta(max_length=MOST_RECORDS)] = ()
    adapters: Annotated[tuple[AdapterRecord, ...], Meta(max_length=MOST_RECORDS)] = ()
    failure: WireError | None = None
    last_loss: LossReport | None = None
    last_request_age_seconds: Seconds | None = None
    state_age_seconds: Seconds = 0.0
    policy: SleepPolicy = SleepPolicy.ALWAYS_AWAKE
    held: HeldReport = HeldReport()
    desired: DesiredReport = DesiredReport()
    operator_epoch: Count = 0
    """The highest epoch of a leader that called it; 0 before the first, and of a worker that knows of none."""
    draining: bool = False
    """True once it accepts nothing any more because of a drain by call."""
    revision: str = ""
    """Another one after each change."""
    pod_uid: str = ""
    adapters_since: str | None = None
    """Adapters of names that did not change after this revision are left out."""
    adapters_removed: Annotated[tuple[str, ...], Meta(max_length=MOST_RECORDS)] = ()
    """Names that are gone since then."""
    adapters_continue: str | None = None
    """There are more adapters, to be asked for with this."""

    def __post_init__(self) -> None:
        _make_plain(self, boot_id=64, revision=ID_LENGTH, pod_uid=64, adapters_since=ID_LENGTH, adapters_continue=ID_LENGTH)

    @property
    def busy(self) -> bool:
        """Return whether requests run or wait."""
        return bool(self.in_flight or self.queued or self.held.current)

    @property
    def sleeps_at(self) -> SleepLevel | None:
        """The level of the worker's sleep, from the first rank that reports a level; None if no rank does, as while it is awake."""
        return next((rank.memory.level for rank in self.ranks if rank.memory.level is not None), None)

    @cached_property
    def named(self) -> Mapping[str, tuple[AdapterRecord, ...]]:
        """The records of each adapter's name, found at the first access and kept.

        A name may have several records, as versions of it may coexist.
        """
        found: dict[str, tuple[AdapterRecord, ...]] = {}
        for record in self.adapters:
            found[record.name] = (*found.get(record.name, ()), record)
        return found

    @cached_property
    def record_states(self) -> Mapping[RecordState, int]:
        """The number of adapters in each state."""
        return Counter(record.state for record in self.adapters)

    @property
    def in_memory(self) -> int:
        """Number of adapters that take a place in memory, or will: all but Cached and Failed ones."""
        return len(self.adapters) - self.record_states.get(RecordState.CACHED, 0) - self.record_states.get(RecordState.FAILED, 0)
