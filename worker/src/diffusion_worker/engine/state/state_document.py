# SPDX-License-Identifier: Apache-2.0
"""The state document of the control API (`GET /v1/state`) and the structs of its calls, as JSON with camelCase names."""

import enum

import msgspec

from diffusion_worker.errors import Fault
from diffusion_worker.messages import MemoryReport, MemoryTag, Recipe, SleepLevel, Task
from diffusion_worker.sources.source import Source


class EngineState(enum.StrEnum):
    """The state of the whole server; requests are served in `ready` only, and kept while it is `restarting`."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    SLEEPING = "sleeping"
    ASLEEP = "asleep"
    WAKING = "waking"
    RESTARTING = "restarting"
    FAILED = "failed"
    TERMINATING = "terminating"


class LoadStage(enum.StrEnum):
    """Stage of a start."""

    FETCHING = "Fetching"
    STARTING_RANKS = "StartingRanks"
    LOADING_WEIGHTS = "LoadingWeights"
    WARMUP = "Warmup"
    LOADING_ADAPTERS = "LoadingAdapters"
    DONE = "Done"


class AdapterState(enum.StrEnum):
    """An adapter's life; only a `Loaded` one is served. A `Cached` one is known and its file is here, but in no rank's memory.

    A `Deferred` one came, or was dropped from memory, while the model slept: it is loaded before the model serves again.
    """

    FETCHING = "Fetching"
    LOADING = "Loading"
    LOADED = "Loaded"
    CACHED = "Cached"
    DEFERRED = "Deferred"
    DRAINING = "Draining"
    FAILED = "Failed"


class RankState(enum.StrEnum):
    """A rank process."""

    STARTING = "starting"
    READY = "ready"
    ASLEEP = "asleep"
    DEAD = "dead"


class SleepMode(enum.StrEnum):
    """A sleep's handling of running requests: let them finish, or end them with code `Asleep`."""

    WAIT = "Wait"
    ABORT = "Abort"


class SleepPolicy(enum.StrEnum):
    """The declared policy. With `Asleep` a group sleeps and refuses requests; with `OnIdle` a request wakes it."""

    ALWAYS_AWAKE = "AlwaysAwake"
    ASLEEP = "Asleep"
    ON_IDLE = "OnIdle"


class ColdMode(enum.StrEnum):
    """Handling of a request for a model that cannot serve it yet: it waits, or is refused with a time to come back."""

    HOLD = "Hold"
    REJECT = "Reject"


class Residency(enum.StrEnum):
    """Time that an adapter stays in memory: always, while there is room, or from its first request on while there is room."""

    RESIDENT = "Resident"
    CACHED = "Cached"
    ON_DEMAND = "OnDemand"


class ProblemReport(msgspec.Struct, frozen=True, rename="camel"):
    """An error as it is kept in the state document."""

    code: str
    message: str
    retryable: bool = False


class Operation(msgspec.Struct, frozen=True, rename="camel"):
    """The sleep or wake in progress."""

    operation_id: str
    kind: str
    age_seconds: float


class OperationResult(msgspec.Struct, frozen=True, rename="camel"):
    """The sleep or wake that ended last. `freed_bytes` is what a sleep gave back, over all ranks."""

    operation_id: str
    kind: str
    error: ProblemReport | None = None
    seconds: float = 0.0
    freed_bytes: int | None = None
    level: SleepLevel | None = None


class HeldDocument(msgspec.Struct, frozen=True, rename="camel"):
    """Requests that wait until the model can serve them."""

    current: int = 0
    oldest_age_seconds: float | None = None


class LoadDocument(msgspec.Struct, frozen=True, rename="camel"):
    """Progress of a load, in bytes: of the model's files while it is fetched, then of weights summed over the ranks."""

    stage: LoadStage
    bytes_done: int
    bytes_total: int


class ModelDocument(msgspec.Struct, frozen=True, rename="camel"):
    """The model; pipeline, dtype and size are null until it is loaded, and the digest until its files were hashed after that.

    `revision` is what its source calls the state of it that is served: a commit; null for a folder.
    """

    served_name: str
    path: str
    pipeline: str | None
    dtype: str | None
    size_bytes: int | None
    digest: str | None = None
    revision: str | None = None
    # Tasks whose requests run alone, with what their pipeline was about to do with the shared model.
    runs_whole: dict[Task, str] = {}


class RankDocument(msgspec.Struct, frozen=True, rename="camel"):
    """A rank; `last_progress_age_seconds` is the age of its last message."""

    rank: int
    pid: int | None
    state: RankState
    last_progress_age_seconds: float | None
    memory: MemoryReport


class LossDocument(msgspec.Struct, frozen=True, rename="camel"):
    """A rank group's loss: the kind of fault, a sentence that names the rank, and its generation."""

    fault: Fault
    message: str
    generation: int
    age_seconds: float


class AdapterDocument(msgspec.Struct, frozen=True, rename="camel"):
    """An adapter; `refs` counts the requests that use it, `requests_total` all those since it is known here.

    `fetched_bytes` of `total_bytes` are progress while it is `Fetching`. `verification_failed` tells for ten minutes that a wake found it
    wrong. `load_seconds` is the time of its last load that succeeded, the fetch included. Null values are not known yet.
    """

    name: str
    digest: str | None
    source: Source
    state: AdapterState
    scale: float
    rank: int | None
    modules: int | None
    size_bytes: int | None
    ranks_loaded: int
    ranks_total: int
    refs: int
    error: ProblemReport | None
    revision: str | None = None
    components: list[str] = []
    format: str | None = None
    alpha: float | None = None
    base_model: str | None = None
    recipe: Recipe | None = None
    residency: Residency = Residency.CACHED
    priority: int = 0
    fetched_bytes: int | None = None
    total_bytes: int | None = None
    requests_total: int = 0
    last_request_age_seconds: float | None = None
    verification_failed: bool = False
    load_seconds: float | None = None
    identity: str | None = None


class DesiredDocument(msgspec.Struct, frozen=True, rename="camel"):
    """The mounted files: `reads_shards` says that this worker needs no list in the main one, `problem` why adapters may be missing.

    `reads_identity` says that a put may name the identity of an adapter.
    """

    reads_shards: bool = True
    reads_identity: bool = True
    problem: ProblemReport | None = None


class StateDocument(msgspec.Struct, frozen=True, rename="camel"):
    """Everything the operator needs, in one cheap document. Ages are seconds on this worker's own clock.

    `adapters_removed` are names that are gone since then. The rest of the list is asked for with `adapters_continue`. `revision` is another
    one after every change that a watcher is to hear of. `pod_uid` is empty outside of Kubernetes. `generation` counts the lives of the rank
    group in this server's life. `failure` is the reason why it is not serving, and `last_loss` that of the group's last restart. `policy`
    is the sleep policy that this worker acts by, `paused` tells that requests are accepted but no step is made. `operator_epoch` is the
    highest that a leader of the operator had in a call.
    """

    boot_id: str
    generation: int
    state: EngineState
    operation: Operation | None
    last_operation: OperationResult | None
    in_flight: int
    queued: int
    last_request_age_seconds: float | None
    load: LoadDocument
    model: ModelDocument
    ranks: list[RankDocument]
    adapters: list[AdapterDocument]
    failure: ProblemReport | None
    restarts: int = 0
    last_loss: LossDocument | None = None
    # Outcome of the options that speed up or shrink the model, by name; unused options are absent.
    features: dict[str, str] = {}
    state_age_seconds: float = 0.0
    policy: SleepPolicy = SleepPolicy.ALWAYS_AWAKE
    held: HeldDocument = HeldDocument()
    desired: DesiredDocument = DesiredDocument()
    paused: bool = False
    operator_epoch: int = 0
    # A call asked for the drain before the end. A worker of the first version has neither the call nor this.
    draining: bool = False
    revision: str = ""
    pod_uid: str = ""
    # With `adapters_since`, the list has only names that changed after that revision, each with all of its adapters.
    adapters_since: str | None = None
    adapters_removed: list[str] = []
    adapters_continue: str | None = None


class OperationCall(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Base of the control calls. Without `boot_id` the call is for whatever runs."""

    operation_id: str
    boot_id: str | None = None
    deadline_seconds: float = 120.0


class SleepCall(OperationCall, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Body of a sleep; `deadline_seconds` bounds the drain, after it running requests are ended as by `Abort`.

    With `if_idle_since` it is refused with Busy unless no request came or ran for so many seconds, by this worker's own clock.
    `policy` is the sleep policy from now on; None leaves it.
    """

    level: SleepLevel = SleepLevel.HOST_MEMORY
    mode: SleepMode = SleepMode.WAIT
    deadline_seconds: float = 300.0
    if_idle_since: float | None = None
    policy: SleepPolicy | None = None


class DrainCall(OperationCall, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Body of a drain before the end: nothing is accepted any more, and what runs past the deadline is ended with an error."""

    deadline_seconds: float = 300.0


class WakeCall(OperationCall, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Body of a wake, of everything or of some tags; until all are awake nothing is served. `policy` as of a sleep."""

    tags: list[MemoryTag] | None = None
    policy: SleepPolicy | None = None


class PauseCall(OperationCall, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Body of a pause: no step begins any more; it is answered when the ranks' work of those that did is over."""

    deadline_seconds: float = 60.0


class AdapterCall(OperationCall, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Body of a put of an adapter."""

    source: Source
    digest: str | None = None
    # The effect that the load must have, unless another converter named it.
    identity: str | None = None
    scale: float = 1.0
    # Only these components of the file are used; none means all that it has.
    components: list[str] = []
    # The file's required format (`peft`, `diffusers`, `kohya`), and its rank; None leaves it open.
    format: str | None = None
    expected_rank: int | None = None
    residency: Residency = Residency.CACHED
    # Among evictable adapters the lowest goes first, then the least recently used.
    priority: int = 0
    # The call needed no token, so its source may name global addresses only.
    public_only: bool = False
    # Read the source again, whatever is known of it.
    read_again: bool = False


class ProfileCall(OperationCall, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Body of a profile: begin a trace on every rank, with a prefix for the names of its files, or end it."""

    start: bool
    prefix: str = "trace"


class ProfileDocument(msgspec.Struct, frozen=True, rename="camel"):
    """State of a trace on every rank, and the files that the ranks wrote, as paths on the worker."""

    running: bool
    files: list[str] = []


class DesiredAdapter(msgspec.Struct, frozen=True, rename="camel"):
    """An adapter of the desired file."""

    name: str
    source: Source
    digest: str | None = None
    identity: str | None = None
    scale: float = 1.0
    components: list[str] = []
    format: str | None = None
    expected_rank: int | None = None
    residency: Residency = Residency.CACHED
    priority: int = 0
    load_timeout_seconds: float = 300.0


class DesiredShard(msgspec.Struct, frozen=True):
    """A file with adapters beside the desired file, and how many they are."""

    file: str
    sha256: str
    count: int


class DesiredModel(msgspec.Struct, frozen=True, rename="camel"):
    """The required version of every replica's model: the state of its source that the first one found. It does not apply to another
    source."""

    source: Source
    revision: str | None = None
    digest: str | None = None


class DesiredSleep(msgspec.Struct, frozen=True, rename="camel"):
    """The sleep part of the desired file; the level is for the sleeps that the worker begins itself."""

    policy: SleepPolicy = SleepPolicy.ALWAYS_AWAKE
    level: SleepLevel = SleepLevel.HOST_MEMORY
    wake_timeout_seconds: float = 120.0


class ColdRequests(msgspec.Struct, frozen=True, rename="camel"):
    """Handling of requests for a model that loads, sleeps or wakes: at most `max_held` wait, each at most so long."""

    mode: ColdMode = ColdMode.HOLD
    max_held: int = 64
    hold_timeout_seconds: float = 300.0


class DesiredState(msgspec.Struct, frozen=True, rename="camel"):
    """The mounted file that lets a worker restart without its operator."""

    sleep: DesiredSleep = DesiredSleep()
    cold_requests: ColdRequests = ColdRequests()
    # Shorter than all the shards together where there is no room for more, or no need of it.
    adapters: list[DesiredAdapter] = []
    shards: list[DesiredShard] = []
    model: DesiredModel | None = None
