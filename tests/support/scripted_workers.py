# SPDX-License-Identifier: Apache-2.0
"""A WorkerClient over workers in memory, by IP: each does what it is told at once, unless its script says otherwise."""

from dataclasses import dataclass, field

import msgspec

from diffusion_operator.api.adapter import Residency
from diffusion_operator.api.adapter_load import AdapterLoad
from diffusion_operator.api.source import identity
from diffusion_operator.api.worker_state import (
    AdapterRecord,
    LoadReport,
    LossReport,
    ModelReport,
    Operation,
    RecordState,
    WireError,
    WorkerPhase,
    WorkerState,
)
from diffusion_operator.errors import ControlError, ControlRefused, ControlUnreachable
from diffusion_operator.plan.actions import PutAdapter, RemoveAdapter, SleepWorker, WakeWorker


@dataclass
class ScriptedWorker:
    boot_id: str
    phase: WorkerPhase = WorkerPhase.READY
    in_flight: int = 0
    slow: bool = False
    """Sleep and wake stay in progress until `finish`."""
    unreachable: bool = False
    failing_operations: int = 0
    """So many sleeps or wakes end with an error."""
    refusals: dict[str, WireError] = field(default_factory=dict)
    """By identity of an adapter's source."""
    digests: dict[str, str] = field(default_factory=dict)
    """By identity; otherwise made from it."""
    revisions: dict[str, str] = field(default_factory=dict)
    """By identity: what a branch is found to be."""
    held: set[str] = field(default_factory=set)
    """Identities of sources whose load stays in progress until `finish_load`; the put itself goes unanswered."""
    max_cached: int = 1000
    """So many stay in memory; then the one with the lowest priority goes for one that comes."""
    rank: int = 8
    components: tuple[str, ...] = ("transformer",)
    """What the files of adapters have."""
    adapters: dict[str, AdapterRecord] = field(default_factory=dict)
    loading: dict[str, AdapterRecord] = field(default_factory=dict)
    draining: dict[str, AdapterRecord] = field(default_factory=dict)
    loads: list[str] = field(default_factory=list)
    """What really was loaded, as against `calls`."""
    _asked: dict[str, AdapterLoad] = field(default_factory=dict)
    operation: Operation | None = None
    last_operation: Operation | None = None
    load: LoadReport = field(default_factory=LoadReport)
    failure: WireError | None = None
    generation: int = 1
    last_loss: LossReport | None = None
    calls: list[str] = field(default_factory=list)

    def state(self) -> WorkerState:
        return WorkerState(
            boot_id=self.boot_id,
            state=self.phase,
            in_flight=self.in_flight,
            operation=self.operation,
            last_operation=self.last_operation,
            load=self.load,
            model=ModelReport(pipeline="StableDiffusion3Pipeline", size_bytes=5),
            adapters=(*self.adapters.values(), *self.loading.values(), *self.draining.values()),
            failure=self.failure,
            generation=self.generation,
            last_loss=self.last_loss,
        )

    def begin(self, kind: str, operation_id: str) -> None:
        self.calls.append(f"{kind} {operation_id}")
        self.operation = Operation(operation_id=operation_id, kind=kind)
        self.phase = WorkerPhase.DRAINING if kind == "sleep" else WorkerPhase.WAKING
        if not self.slow:
            self.finish()

    def finish(self) -> None:
        """The operation in progress ends."""
        assert self.operation is not None
        kind, error = self.operation.kind, None
        if self.failing_operations:
            self.failing_operations -= 1
            error = WireError(code="InsufficientMemory", message="3 of 5 bytes free", retryable=True)
        asleep = (kind == "sleep") is (error is None)
        self.phase = WorkerPhase.ASLEEP if asleep else WorkerPhase.READY
        self.last_operation = Operation(operation_id=self.operation.operation_id, kind=kind, error=error)
        self.operation = None

    def load_adapter(self, name: str, load: AdapterLoad) -> None:
        """A put: taken over where the bytes are here already, else loaded, beside another version of the name."""
        self.calls.append(f"put {name}")
        present = self.adapters.get(name)
        if present is not None and present.state in (RecordState.LOADED, RecordState.CACHED) and self._same(present, load):
            self.adapters[name] = _told(present, load)
            if present.state is RecordState.LOADED or load.residency is Residency.ON_DEMAND:
                return
        if load.residency is Residency.ON_DEMAND:
            self.adapters[name] = _told(AdapterRecord(name=name, state=RecordState.CACHED, ranks_total=1), load)
            return
        if identity(load.source) in self.held:
            self.loading[name] = _told(AdapterRecord(name=name, state=RecordState.FETCHING, ranks_total=1), load)
            self._asked[name] = load
            raise ControlUnreachable(f"put {name}: no answer within 10 s")
        error = self._load(name, load)
        if error is not None:
            raise ControlRefused(error, status=409)

    def fetched(self, name: str, done: int, total: int) -> None:
        self.loading[name] = msgspec.structs.replace(self.loading[name], fetched_bytes=done, total_bytes=total)

    def finish_load(self, name: str) -> None:
        """The held load of a name ends, well or as `refusals` has it."""
        del self.loading[name]
        self._load(name, self._asked.pop(name))

    def evict(self, name: str, *, error: WireError | None = None) -> None:
        """Out of memory; with an error, which the last request met that wanted it back."""
        self.adapters[name] = msgspec.structs.replace(self.adapters[name], state=RecordState.CACHED, ranks_loaded=0, error=error)

    def use(self, name: str, *, requests: int, age_s: float, running: int = 0) -> None:
        record = self.adapters[name]
        total = record.requests_total + requests
        self.adapters[name] = msgspec.structs.replace(record, requests_total=total, last_request_age_seconds=age_s, refs=running)

    def remove(self, name: str) -> None:
        """Gone at once, unless requests still use it: then it drains until `drained`."""
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
        present = self.adapters.get(name)
        if error is not None and present is not None and present.state is RecordState.LOADED:
            self.adapters[name] = msgspec.structs.replace(present, error=error)
            return error
        self.loads += [name] if error is None else []
        self.adapters[name] = _told(
            AdapterRecord(
                name=name,
                state=RecordState.FAILED if error else RecordState.LOADED,
                digest=None if error else found,
                revision=self.revisions.get(where),
                rank=self.rank,
                modules=24,
                size_bytes=100,
                components=load.components or self.components,
                format="peft",
                alpha=8.0,
                base_model="digits",
                ranks_loaded=0 if error else 1,
                ranks_total=1,
                error=error,
            ),
            load,
        )
        self._make_room(name)
        return error

    def _make_room(self, newest: str) -> None:
        loaded = {name: record for name, record in self.adapters.items() if record.state is RecordState.LOADED}
        may_go = [name for name, record in loaded.items() if name != newest and record.residency is not Residency.RESIDENT]
        if len(loaded) > self.max_cached and may_go:
            self.evict(min(may_go, key=lambda name: loaded[name].priority))

    def _same(self, record: AdapterRecord, load: AdapterLoad) -> bool:
        same = record.digest == load.digest if load.digest and record.digest else record.source == load.source
        return same and record.components == (load.components or self.components)


def _told(record: AdapterRecord, load: AdapterLoad) -> AdapterRecord:
    return msgspec.structs.replace(record, source=load.source, scale=load.scale, residency=load.residency, priority=load.priority)


class ScriptedWorkers:
    """The port."""

    def __init__(self) -> None:
        self._by_ip: dict[str, ScriptedWorker] = {}
        self.tokens: set[str] = set()

    def add(self, ip: str, worker: ScriptedWorker) -> ScriptedWorker:
        self._by_ip[ip] = worker
        return worker

    def at(self, ip: str) -> ScriptedWorker:
        return self._by_ip[ip]

    async def state(self, ip: str, *, token: str) -> WorkerState:
        self.tokens.add(token)
        worker = self._by_ip.get(ip)
        if worker is None or worker.unreachable:
            raise ControlUnreachable(f"{ip}: connection refused")
        return worker.state()

    async def sleep(self, call: SleepWorker, *, token: str) -> None:
        self._called(call.worker.ip, call.worker.boot_id).begin("sleep", call.operation_id)

    async def wake(self, call: WakeWorker, *, token: str) -> None:
        self._called(call.worker.ip, call.worker.boot_id).begin("wake", call.operation_id)

    async def put_adapter(self, call: PutAdapter, *, token: str) -> None:
        worker = self._called(call.worker.ip, call.worker.boot_id)
        if worker.phase is not WorkerPhase.READY:
            raise _refused("Asleep", retryable=True)
        worker.load_adapter(call.name, call.load)

    async def remove_adapter(self, call: RemoveAdapter, *, token: str) -> None:
        self._called(call.worker.ip, call.worker.boot_id).remove(call.name)

    def _called(self, ip: str, boot_id: str) -> ScriptedWorker:
        worker = self._by_ip[ip]
        if worker.unreachable:
            raise ControlUnreachable(f"{ip}: connection refused")
        if worker.boot_id != boot_id:
            raise _refused("WrongBoot", retryable=False)
        return worker


def _refused(code: str, *, retryable: bool) -> ControlError:
    return ControlRefused(WireError(code=code, message=code, retryable=retryable), status=409)
