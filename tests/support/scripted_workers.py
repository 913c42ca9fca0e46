# SPDX-License-Identifier: Apache-2.0
"""A WorkerClient over workers in memory, by IP: each does what it is told at once, unless its script says otherwise."""

from dataclasses import dataclass, field

from diffusion_operator.api.source import AdapterSource, identity
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
    """By path of an adapter's source."""
    digests: dict[str, str] = field(default_factory=dict)
    """By path; otherwise made from it."""
    adapters: dict[str, AdapterRecord] = field(default_factory=dict)
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
            adapters=tuple(self.adapters.values()),
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

    def load_adapter(self, name: str, path: str, *, digest: str | None = None, scale: float = 1.0) -> None:
        self.calls.append(f"put {name}")
        found = self.digests.get(path, "sha256:" + path.strip("/").replace("/", "-"))
        error = self.refusals.get(path)
        if error is None and digest not in (None, found):
            error = WireError(code="DigestMismatch", message=f"expected {digest}, found {found}")
        self.adapters[name] = AdapterRecord(
            name=name,
            state=RecordState.FAILED if error else RecordState.LOADED,
            digest=None if error else found,
            source=AdapterSource(path=path),
            scale=scale,
            rank=8,
            modules=24,
            size_bytes=100,
            ranks_loaded=0 if error else 1,
            ranks_total=1,
            error=error,
        )
        if error is not None:
            raise ControlRefused(error, status=409)


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
        worker.load_adapter(call.name, identity(call.load.source), digest=call.load.digest, scale=call.load.scale)

    async def remove_adapter(self, call: RemoveAdapter, *, token: str) -> None:
        worker = self._called(call.worker.ip, call.worker.boot_id)
        worker.calls.append(f"remove {call.name}")
        worker.adapters.pop(call.name, None)

    def _called(self, ip: str, boot_id: str) -> ScriptedWorker:
        worker = self._by_ip[ip]
        if worker.unreachable:
            raise ControlUnreachable(f"{ip}: connection refused")
        if worker.boot_id != boot_id:
            raise _refused("WrongBoot", retryable=False)
        return worker


def _refused(code: str, *, retryable: bool) -> ControlError:
    return ControlRefused(WireError(code=code, message=code, retryable=retryable), status=409)
