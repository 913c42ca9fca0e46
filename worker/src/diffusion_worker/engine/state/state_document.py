# SPDX-License-Identifier: Apache-2.0
"""The state document of the control API (`GET /v1/state`) and the structs of its calls, as JSON with camelCase names."""

import enum

import msgspec

from diffusion_worker.errors import Fault
from diffusion_worker.messages import MemoryReport, MemoryTag, ModelMerging, Recipe, SleepLevel, Task, WakeCheck
from diffusion_worker.sources.source import Source


class EngineState(enum.StrEnum):
    """The state of the whole server. Requests are admitted in `ready` only, and kept while it is `restarting`.

    Those that were admitted may also finish in `draining` and `terminating`.
    """

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
    """The life of an adapter; requests take it only while it is `Loaded`, and may finish while it is `Draining`.

    A `Cached` one is on no rank, and its file may be here: a request or a call loads it. A `Deferred` one came during a sleep, or left
    the ranks in one: the wake loads it.
    """

    FETCHING = "Fetching"
    LOADING = "Loading"
    LOADED = "Loaded"
    CACHED = "Cached"
    DEFERRED = "Deferred"
    DRAINING = "Draining"
    FAILED = "Failed"


class RankState(enum.StrEnum):
    """The state of a rank process."""

    STARTING = "starting"
    READY = "ready"
    ASLEEP = "asleep"
    DEAD = "dead"


class SleepMode(enum.StrEnum):
    """The fate of running requests at a sleep: finish within the deadline, or end at once with code `Asleep`."""

    WAIT = "Wait"
    ABORT = "Abort"


class SleepPolicy(enum.StrEnum):
    """The declared policy. With `Asleep` a group sleeps and refuses requests; with `OnIdle` a request wakes it."""

    ALWAYS_AWAKE = "AlwaysAwake"
    ASLEEP = "Asleep"
    ON_IDLE = "OnIdle"


class ColdMode(enum.StrEnum):
    """Handling of a request for a model that cannot serve it yet: hold it, or refuse it with a time to come back."""

    HOLD = "Hold"
    REJECT = "Reject"


class Residency(enum.StrEnum):
    """Residency of an adapter in memory: always, while there is room, or from its first request on while there is room."""

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
    """The result of a sleep or wake; `error` is None if it succeeded.

    `freed_bytes` are the bytes that a sleep freed, over all ranks; None for a wake or a failure.
    """

    operation_id: str
    kind: str
    error: ProblemReport | None = None
    seconds: float = 0.0
    freed_bytes: int | None = None
    level: SleepLevel | None = None


class HeldDocument(msgspec.Struct, frozen=True, rename="camel"):
    """The number of requests held back while the model cannot serve, and the age in seconds of the oldest, None without one."""

    current: int = 0
    oldest_age_seconds: float | None = None


class LoadDocument(msgspec.Struct, frozen=True, rename="camel"):
    """The stage of a start, and its bytes: those of files that are fetched, then those of weights on all ranks; 0 if unknown."""

    stage: LoadStage
    bytes_done: int
    bytes_total: int


class ModelDocument(msgspec.Struct, frozen=True, rename="camel"):
    """The model. Pipeline, dtype and size are null until it is loaded, and the digest until its files are hashed after that.

    `revision` is the source's name for the served content, such as a commit; null for a folder.
    """

    served_name: str
    path: str
    pipeline: str | None
    dtype: str | None
    size_bytes: int | None
    digest: str | None = None
    revision: str | None = None
    # Tasks whose requests run alone, with the change to the shared model that their pipeline was about to make.
    runs_whole: dict[Task, str] = {}
    # For each method of each component: whether requests share its calls, and why.
    merging: list[ModelMerging] = []


class RankDocument(msgspec.Struct, frozen=True, rename="camel"):
    """A rank's process, state and memory; `pid` and the seconds since its last message are null until it has a process."""

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
    """An adapter. `refs` counts the requests that use it, `requests_total` all requests since it became known.

    `fetched_bytes` of `total_bytes` are progress while it is `Fetching`. `verification_failed` is true for ten minutes after a wake found
    it wrong. `load_seconds` is the time of its last load that succeeded, the fetch included. Null values are not known yet.
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


class StateDocument(msgspec.Struct, frozen=True, rename="camel"):
    """The whole state for the operator, in one cheap document. Ages are seconds on this worker's own clock.

    `revision` differs after every change that a watcher has to see. `pod_uid` is empty outside of Kubernetes. `generation` counts the
    lives of the rank group in this server's life. `failure` is the reason why the worker does not serve, and `last_loss` that of the
    group's last restart. `policy` is the sleep policy in force. `paused` means that requests are accepted but no step begins.
    `operator_epoch` is the highest epoch in a call of an operator's leader.
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
    # Processes that are past their imports, to become ranks when the group is lost.
    standby_ranks: int = 0
    # Outcome of the options that speed up or shrink the model, by name; unused options are absent.
    features: dict[str, str] = {}
    state_age_seconds: float = 0.0
    policy: SleepPolicy = SleepPolicy.ALWAYS_AWAKE
    # The use of the probe in verifying wakes; null for a model that cannot sleep, and before its first load.
    wake_check: WakeCheck | None = None
    held: HeldDocument = HeldDocument()
    paused: bool = False
    operator_epoch: int = 0
    # True after a call for the drain before the end.
    draining: bool = False
    revision: str = ""
    pod_uid: str = ""


class OperationCall(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Base of the control calls. A call without `boot_id` is for any life of the server."""

    operation_id: str
    boot_id: str | None = None
    deadline_seconds: float = 120.0


class SleepCall(OperationCall, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Body of a sleep. Requests still running after `deadline_seconds` end as in mode `Abort`.

    `if_idle_since` is a number of seconds: if a request came or ran within it, by this worker's clock, the answer is Busy. `policy`
    replaces the one in force; None keeps it.
    """

    level: SleepLevel = SleepLevel.HOST_MEMORY
    mode: SleepMode = SleepMode.WAIT
    deadline_seconds: float = 300.0
    if_idle_since: float | None = None
    policy: SleepPolicy | None = None


class DrainCall(OperationCall, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Body of a drain before the end: no request is accepted any more, and those that run past the deadline end with an error."""

    deadline_seconds: float = 300.0


class WakeCall(OperationCall, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Body of a wake, of everything or of some tags; nothing is served until all are awake. `policy` is as for a sleep."""

    tags: list[MemoryTag] | None = None
    policy: SleepPolicy | None = None


class PauseCall(OperationCall, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Body of a pause: no step begins any more. The answer comes when running steps are over on the ranks."""

    deadline_seconds: float = 60.0


class AdapterCall(OperationCall, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Body of a put of an adapter."""

    source: Source
    digest: str | None = None
    # Identity that the load must find, unless another converter named it.
    identity: str | None = None
    scale: float = 1.0
    # Components of the file that are used; none means all that it has.
    components: list[str] = []
    # The file's required format (`peft`, `diffusers`, `kohya`), and its rank; None leaves it open.
    format: str | None = None
    expected_rank: int | None = None
    residency: Residency = Residency.CACHED
    # Adapters of the lowest priority are evicted first, then the least recently used.
    priority: int = 0
    # The call came without a token, so its source may name global addresses only.
    public_only: bool = False
    # Read the source again, even if its content seems known.
    read_again: bool = False


class ProfileCall(OperationCall, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Body of a profile: begin a trace on every rank, with a prefix for its file names, or end it."""

    start: bool
    prefix: str = "trace"


class ProfileDocument(msgspec.Struct, frozen=True, rename="camel"):
    """The answer to a profile call: if every rank traces now, and after the end each rank's file by its path in the worker."""

    running: bool
    files: list[str] = []


class DesiredAdapter(msgspec.Struct, frozen=True, rename="camel"):
    """An adapter that a mounted file declares: the fields of a put, and the seconds that its load may take."""

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


class DesiredModel(msgspec.Struct, frozen=True, rename="camel"):
    """The version of the model that every replica must serve: the one that the first replica found at the source.

    It does not apply to another source.
    """

    source: Source
    revision: str | None = None
    digest: str | None = None


class DesiredSleep(msgspec.Struct, frozen=True, rename="camel"):
    """The sleep policy that a mounted file declares, with level and wake timeout for sleeps and wakes without a call."""

    policy: SleepPolicy = SleepPolicy.ALWAYS_AWAKE
    level: SleepLevel = SleepLevel.HOST_MEMORY
    wake_timeout_seconds: float = 120.0


class ColdRequests(msgspec.Struct, frozen=True, rename="camel"):
    """Handling of requests for a model that loads, sleeps or wakes: at most `max_held` wait, for at most `hold_timeout_seconds` each."""

    mode: ColdMode = ColdMode.HOLD
    max_held: int = 64
    hold_timeout_seconds: float = 300.0


class DesiredState(msgspec.Struct, frozen=True, rename="camel"):
    """The mounted file that lets a worker restart without its operator."""

    sleep: DesiredSleep = DesiredSleep()
    cold_requests: ColdRequests = ColdRequests()
    model: DesiredModel | None = None
