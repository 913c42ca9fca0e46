# SPDX-License-Identifier: Apache-2.0
"""A WorkerClient over workers in memory, by IP: each obeys at once, unless its script says otherwise.

Real: the messages. Not real: the model, its ranks, and the bytes of adapters. Sleep follows the real worker's rules: harmless calls,
conflicts, a drain that a wake ends, a wake by a held request, ages by a clock.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec

from diffusion_operator.api import worker_state
from diffusion_operator.api.adapter import Residency
from diffusion_operator.api.adapter_load import AdapterLoad
from diffusion_operator.api.deployment_spec import SleepLevel, SleepPolicy
from diffusion_operator.api.source import identity
from diffusion_operator.api.worker_state import AdapterRecord, Operation, RecordState, WireError, WorkerPhase, WorkerState
from diffusion_operator.errors import ControlRefused, ControlUnreachable, OperatorError
from diffusion_operator.plan.adapters.records import contradicts
from diffusion_operator.plan.results.actions import DrainWorker, PutAdapter, RemoveAdapter, SleepWorker, WakeWorker, WorkerAddress
from support.operator.fake_cluster import EPOCH

RESTING = (WorkerPhase.DRAINING, WorkerPhase.SLEEPING, WorkerPhase.ASLEEP)
DIGITS = worker_state.ModelReport(pipeline="StableDiffusion3Pipeline", size_bytes=5)
NO_MEMORY = WireError(code="InsufficientMemory", message="3 of 5 bytes free", retryable=True)
# Fields that are in the state document unchanged.
SAID = (
    "boot_id",
    "in_flight",
    "operation",
    "last_operation",
    "load",
    "model",
    "failure",
    "generation",
    "last_loss",
    "policy",
    "desired",
    "pod_uid",
)


@dataclass
class ScriptedWorker:
    boot_id: str
    phase: WorkerPhase = WorkerPhase.READY
    in_flight: int = 0
    slow: bool = False
    """True: sleeps and wakes stay in progress until `finish`."""
    unreachable: bool = False
    drains: bool = False
    """True after a call has drained it."""
    pod_uid: str = ""
    """The UID of its pod; empty where nobody set it."""
    token: str = ""
    """The token that callers must have; empty: any token is accepted."""
    failing_operations: int = 0
    """The number of next sleeps or wakes that end with `operation_error`."""
    operation_error: WireError = NO_MEMORY
    refuse_operations: list[WireError] = field(default_factory=list)
    """Errors that answer the next sleeps and wakes, in order."""
    lost_answers: int = 0
    """The number of next sleeps or wakes that are accepted although no answer arrives."""
    clock: Callable[[], datetime] = lambda: EPOCH
    policy: SleepPolicy = SleepPolicy.ALWAYS_AWAKE
    held_requests: int = 0
    last_request_at: datetime | None = None
    refusals: dict[str, WireError] = field(default_factory=dict)
    """Refusals by identity of an adapter's source."""
    digests: dict[str, str] = field(default_factory=dict)
    """Digests by identity of the source; without an entry they are derived from it."""
    identities: dict[str, str] = field(default_factory=dict)
    """Reported identities of the effect, by identity of the source."""
    revisions: dict[str, str] = field(default_factory=dict)
    """The commits found for branches, by identity of the source."""
    held: set[str] = field(default_factory=set)
    """Identities of sources whose load stays in progress until `finish_load`; the put itself goes unanswered."""
    max_cached: int = 1000
    """The most adapters in memory; for one more the adapter with the lowest priority is dropped."""
    rank: int = 8
    components: tuple[str, ...] = ("transformer",)
    """The components that adapters' files change."""
    adapters: dict[str, AdapterRecord] = field(default_factory=dict)
    loading: dict[str, AdapterRecord] = field(default_factory=dict)
    draining: dict[str, AdapterRecord] = field(default_factory=dict)
    loads: list[str] = field(default_factory=list)
    """The names of the actual loads, unlike `calls`."""
    _asked: dict[str, AdapterLoad] = field(default_factory=dict)
    operation: Operation | None = None
    last_operation: Operation | None = None
    load: worker_state.LoadReport = field(default_factory=worker_state.LoadReport)
    model: worker_state.ModelReport = DIGITS
    desired: worker_state.DesiredReport = field(default_factory=worker_state.DesiredReport)
    failure: WireError | None = None
    generation: int = 1
    last_loss: worker_state.LossReport | None = None
    calls: list[str] = field(default_factory=list)
    level: SleepLevel = SleepLevel.HOST_MEMORY
    """The level of the sleep in progress, or of the last one."""
    wakes_by_itself: int = 0
    _seen: tuple[WorkerPhase, datetime] = (WorkerPhase.READY, EPOCH)

    def __post_init__(self) -> None:
        self._seen = (self.phase, self.clock())

    def _state_age_s(self) -> float:
        """Return the seconds since a look or an operation first found the worker in its present phase."""
        if self._seen[0] is not self.phase:
            self._seen = (self.phase, self.clock())
        return (self.clock() - self._seen[1]).total_seconds()

    def _request_age_s(self) -> float | None:
        if self.in_flight or self.held_requests:
            return 0.0
        return None if self.last_request_at is None else (self.clock() - self.last_request_at).total_seconds()

    def request(self) -> None:
        """Receive a request: a ready worker notes its time alone, and any other holds it.

        An asleep worker whose policy is OnIdle also begins to wake.
        """
        self.last_request_at = self.clock()
        if self.phase is WorkerPhase.READY:
            return
        self.held_requests += 1
        if self.phase is WorkerPhase.ASLEEP and self.policy is SleepPolicy.ON_IDLE:
            self.wakes_by_itself += 1
            self.begin("wake", f"demand-{self.wakes_by_itself}")

    def state(self) -> WorkerState:
        held = worker_state.HeldReport(current=self.held_requests, oldest_age_seconds=1.0 if self.held_requests else None)
        ages = {"last_request_age_seconds": self._request_age_s(), "state_age_seconds": self._state_age_s(), "draining": self.drains}
        adapters = (*self.adapters.values(), *self.loading.values(), *self.draining.values())
        return WorkerState(state=self.phase, adapters=adapters, held=held, **ages, **{name: getattr(self, name) for name in SAID})

    def sleep(self, call: SleepWorker) -> None:
        self.policy = call.policy
        if self.phase in RESTING:
            self.calls.append(f"tell {call.policy.value}")
            return
        self._check_free("sleep", call.operation_id)
        idle_s = self._request_age_s()
        if call.if_idle_since_s is not None and idle_s is not None and idle_s < call.if_idle_since_s:
            raise _refused("Busy")
        self.level = call.level
        self.begin("sleep", call.operation_id)

    def wake(self, call: WakeWorker) -> None:
        self.policy = call.policy
        if self.phase in (WorkerPhase.READY, WorkerPhase.WAKING):
            return
        if self.phase is WorkerPhase.DRAINING and self.operation is not None:
            self.calls.append(f"wake {call.operation_id}")
            cancelled = WireError(code="Cancelled", message="a wake came during the drain")
            self.last_operation = Operation(operation_id=self.operation.operation_id, kind="sleep", error=cancelled)
            self.phase, self.operation = WorkerPhase.READY, None
            return
        self._check_free("wake", call.operation_id)
        self.begin("wake", call.operation_id)

    def drain(self, call: DrainWorker) -> None:
        """Begin a drain: held requests end at once, and running ones when `in_flight` is set to 0."""
        self.calls.append(f"drain {call.deadline_s}")
        self.drains, self.phase, self.held_requests = True, WorkerPhase.TERMINATING, 0

    def _check_free(self, kind: str, operation_id: str) -> None:
        if self.refuse_operations:
            raise ControlRefused(self.refuse_operations.pop(0), status=409)
        if self.operation is not None and self.operation.operation_id != operation_id:
            raise _refused("Conflict")

    def begin(self, kind: str, operation_id: str) -> None:
        self.calls.append(f"{kind} {operation_id}")
        self.operation = Operation(operation_id=operation_id, kind=kind)
        self.phase = WorkerPhase.DRAINING if kind == "sleep" else WorkerPhase.WAKING
        self._state_age_s()
        if not self.slow:
            self.finish()
        if self.lost_answers:
            self.lost_answers -= 1
            raise ControlUnreachable(f"{kind}: no answer within 10 s")

    def finish(self) -> None:
        """End the operation in progress: with `operation_error` while `failing_operations` are left, and else successfully.

        After a successful wake, or a failed sleep, no request is held any more.
        """
        assert self.operation is not None
        kind, error = self.operation.kind, self.operation_error if self.failing_operations else None
        self.failing_operations -= error is not None
        asleep = (kind == "sleep") is (error is None)
        self.phase = WorkerPhase.ASLEEP if asleep else WorkerPhase.READY
        freed = 3_200_000_000 if kind == "sleep" and error is None else None
        after = {"error": error, "seconds": 0.25, "freed_bytes": freed, "level": self.level}
        self.last_operation, self.operation = msgspec.structs.replace(self.operation, **after), None
        self._adapters_after(kind, asleep=asleep)
        if not asleep:
            self.held_requests = 0
        self._state_age_s()

    def _adapters_after(self, kind: str, *, asleep: bool) -> None:
        """Apply the end of an operation to adapters: a sleep that discards drops the ranks' copies; a wake loads deferred ones."""
        discards, wakes = asleep and kind == "sleep" and self.level is SleepLevel.DISCARD, not asleep and kind == "wake"
        for name, one in list(self.adapters.items()):
            if discards and one.state is RecordState.LOADED:
                self._change(name, state=RecordState.DEFERRED, ranks_loaded=0)
            if wakes and one.state is RecordState.DEFERRED:
                self._load(name, self._asked.pop(name, AdapterLoad(source=one.source, scale=one.scale, digest=one.digest)))

    def load_adapter(self, name: str, load: AdapterLoad) -> None:
        """Take a put of an adapter: keep the bytes that are in memory already, or load it; an asleep worker defers it to the wake.

        A new on-demand adapter gets only into the cache. ControlRefused with the load's error.
        ControlUnreachable for a source in `held`, whose load stays in progress.
        """
        self.calls.append(f"put {name}")
        present = self.adapters.get(name)
        if self.phase is WorkerPhase.ASLEEP:
            self._defer(name, load, present)
            return
        if present is not None and present.state in (RecordState.LOADED, RecordState.CACHED) and self._same(present, load):
            self.adapters[name] = _told(present, load)
            if present.state is RecordState.LOADED or load.residency is Residency.ON_DEMAND:
                return
        if load.residency is Residency.ON_DEMAND:
            self.adapters[name] = _told(AdapterRecord(name=name, state=RecordState.CACHED, ranks_total=1), load)
            return
        if identity(load.source) in self.held:
            if present is not None and present.state is RecordState.FAILED:
                del self.adapters[name]  # the next try takes the place of the failed one
            self.loading[name] = _told(AdapterRecord(name=name, state=RecordState.FETCHING, ranks_total=1), load)
            self._asked[name] = load
            raise ControlUnreachable(f"put {name}: no answer within 10 s")
        error = self._load(name, load)
        if error is not None:
            raise ControlRefused(error, status=409)

    def load_mounted(self, wanted: Iterable[dict[str, Any]]) -> None:
        """Try the adapters of the desired file, as a worker does at its start; their errors are ignored."""
        for one in wanted:
            with contextlib.suppress(OperatorError):
                self.load_adapter(one["name"], msgspec.convert(one, AdapterLoad))

    def _defer(self, name: str, load: AdapterLoad, present: AdapterRecord | None) -> None:
        """Accept a put during a sleep: a present adapter takes its new settings, an absent one is fetched for the wake.

        ControlRefused if the source of an absent one is in `refusals`.
        """
        error = self.refusals.get(identity(load.source))
        if present is not None and self._same(present, load) and present.state is not RecordState.FAILED:
            self.adapters[name] = _told(present, load)
            return
        state = RecordState.FAILED if error is not None else RecordState.DEFERRED
        self.adapters[name] = _told(AdapterRecord(name=name, state=state, ranks_total=1, error=error), load)
        self._asked[name] = load
        if error is not None:
            raise ControlRefused(error, status=409)

    def fetched(self, name: str, done: int, total: int) -> None:
        self.loading[name] = msgspec.structs.replace(self.loading[name], fetched_bytes=done, total_bytes=total)

    def finish_load(self, name: str) -> None:
        """End the held load of a name, successfully or with its refusal in `refusals`."""
        del self.loading[name]
        self._load(name, self._asked.pop(name))

    def evict(self, name: str, *, error: WireError | None = None) -> None:
        """Evict an adapter from the ranks' memory; `error` is the failure of the last request that wanted it back."""
        self._change(name, state=RecordState.CACHED, ranks_loaded=0, error=error)

    def use(self, name: str, *, requests: int, age_s: float, running: int = 0) -> None:
        total = self.adapters[name].requests_total + requests
        self._change(name, requests_total=total, last_request_age_seconds=age_s, refs=running)

    def remove(self, name: str) -> None:
        """Remove an adapter at once; if requests still use it, it drains until `drained`."""
        self.calls.append(f"remove {name}")
        record = self.adapters.pop(name, None)
        if record is not None and record.refs:
            self.draining[name] = msgspec.structs.replace(record, state=RecordState.DRAINING)

    def drained(self, name: str) -> None:
        del self.draining[name]

    def _load(self, name: str, load: AdapterLoad) -> WireError | None:
        where = identity(load.source)
        found = self.digests.get(where, "sha256:" + where.strip("/").replace("/", "-"))
        error = self.refusals.get(where)
        if error is None and load.digest not in (None, found):
            error = WireError(code="DigestMismatch", message=f"expected {load.digest}, found {found}")
        effect = self.identities.get(where)
        if error is None and effect is not None and contradicts(effect, load.identity):
            error = WireError(code="IdentityMismatch", message=f"expected identity {load.identity}, found {effect}")
        present = self.adapters.get(name)
        if error is not None and present is not None and present.state is RecordState.LOADED:
            self._change(name, error=error)
            return error
        facts = {"rank": self.rank, "modules": 24, "size_bytes": 100, "format": "peft", "alpha": 8.0, "base_model": "digits"}
        facts |= {"revision": self.revisions.get(where), "components": load.components or self.components}
        if error is None:
            self.loads.append(name)
            facts |= {"identity": effect, "digest": found, "ranks_loaded": 1, "load_seconds": len(self.loads) / 2}
        state = RecordState.LOADED if error is None else RecordState.FAILED
        self.adapters[name] = _told(AdapterRecord(name=name, state=state, ranks_total=1, error=error, **facts), load)
        self._make_room(name)
        return error

    def _change(self, name: str, **facts: Any) -> None:
        self.adapters[name] = msgspec.structs.replace(self.adapters[name], **facts)

    def _make_room(self, newest: str) -> None:
        loaded = {name: record for name, record in self.adapters.items() if record.state is RecordState.LOADED}
        may_go = [name for name, record in loaded.items() if name != newest and record.residency is not Residency.RESIDENT]
        if len(loaded) > self.max_cached and may_go:
            self.evict(min(may_go, key=lambda name: loaded[name].priority))

    def _same(self, record: AdapterRecord, load: AdapterLoad) -> bool:
        same = record.digest == load.digest if load.digest and record.digest else record.source == load.source
        same = same and not contradicts(record.identity, load.identity)
        return same and record.components == (load.components or self.components)


def _told(record: AdapterRecord, load: AdapterLoad) -> AdapterRecord:
    return msgspec.structs.replace(record, source=load.source, scale=load.scale, residency=load.residency, priority=load.priority)


class Revisions:
    """The revisions of one worker's states: another one after each change other than of ages, and after each request."""

    def __init__(self) -> None:
        self._said: WorkerState | None = None
        self._age_s = math.inf
        self._number = 0

    def revised(self, state: WorkerState) -> WorkerState:
        held = worker_state.HeldReport(current=state.held.current)
        said = msgspec.structs.replace(state, held=held, last_request_age_seconds=None, state_age_seconds=0.0)
        age_s = math.inf if state.last_request_age_seconds is None else state.last_request_age_seconds
        if said != self._said or age_s < self._age_s:
            self._said, self._number = said, self._number + 1
        self._age_s = age_s
        return msgspec.structs.replace(state, revision=f"{state.boot_id}.{self._number}")


class ScriptedWorkers:
    """A fake of the operator's port to workers: scripted workers in memory, by IP."""

    def __init__(self) -> None:
        self._by_ip: dict[str, ScriptedWorker] = {}
        self.tokens: set[str] = set()

    def __iter__(self) -> Iterator[ScriptedWorker]:
        return iter(self._by_ip.values())

    def add(self, ip: str, worker: ScriptedWorker) -> ScriptedWorker:
        self._by_ip[ip] = worker
        return worker

    def at(self, ip: str) -> ScriptedWorker:
        return self._by_ip[ip]

    async def state(self, ip: str, *, token: str, pod_uid: str = "", after: str = "", wait_s: float = 0.0) -> WorkerState:
        """Return a worker's state at once, without a revision.

        ControlUnreachable if no worker answers there, and ControlRefused for a wrong token.
        """
        self.tokens.add(token)
        return self._reached(ip, token).state()

    async def sleep(self, call: SleepWorker, *, token: str) -> None:
        self._called(call.worker, token).sleep(call)

    async def wake(self, call: WakeWorker, *, token: str) -> None:
        self._called(call.worker, token).wake(call)

    async def drain(self, call: DrainWorker, *, token: str) -> None:
        self._called(call.worker, token).drain(call)

    async def put_adapter(self, call: PutAdapter, *, token: str) -> None:
        worker = self._called(call.worker, token)
        if worker.phase not in (WorkerPhase.READY, WorkerPhase.ASLEEP):
            raise _refused("Asleep")
        worker.load_adapter(call.name, call.load)

    async def remove_adapter(self, call: RemoveAdapter, *, token: str) -> None:
        self._called(call.worker, token).remove(call.name)

    def _reached(self, ip: str, token: str) -> ScriptedWorker:
        worker = self._by_ip.get(ip)
        if worker is None or worker.unreachable:
            raise ControlUnreachable(f"{ip}: connection refused")
        if worker.token not in ("", token):
            raise ControlRefused(WireError(code="Unauthorized", message="another token is expected"), status=401)
        return worker

    def _called(self, address: WorkerAddress, token: str) -> ScriptedWorker:
        worker = self._reached(address.ip, token)
        if worker.boot_id != address.boot_id:
            raise _refused("WrongBoot", retryable=False)
        return worker


def _refused(code: str, *, retryable: bool = True) -> ControlRefused:
    return ControlRefused(WireError(code=code, message=code, retryable=retryable), status=409)
