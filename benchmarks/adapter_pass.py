# SPDX-License-Identifier: Apache-2.0
"""Passes over one deployment with many adapters, for P17: the time of one that finds nothing new, and of one after a single change.

A pass is the operator's own, from its store to its store. The API server is a stand-in that takes every write. The worker is a stand-in
that tells what changed, as a watch does. `longest_turn_ms` is the longest time for which
the first pass keeps everything else from running. Times are medians; `python -m benchmarks.adapter_pass` gives every sample.
"""

import asyncio
import hashlib
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta

import msgspec
from prometheus_client import CollectorRegistry

from benchmarks.stand_ins.written_objects import WrittenObjects
from diffusion_operator.api.meta import ObjectMeta
from diffusion_operator.api.names import ADAPTER, DEPLOYMENT, POD, Kind
from diffusion_operator.api.worker_state import AdapterRecord, WorkerPhase, WorkerState
from diffusion_operator.cluster import Manifest
from diffusion_operator.metrics import PrometheusMeter
from diffusion_operator.plan.observed.pods import Pod
from diffusion_operator.plan.results.actions import DrainWorker, PutAdapter, RemoveAdapter, SleepWorker, WakeWorker
from diffusion_operator.reconcile.dispatch import reconcile
from diffusion_operator.reconcile.memory import DeploymentMemory
from diffusion_operator.reconcile.runtime import Runtime, adapter_key, deployment_key
from diffusion_operator.reconcile.store.object_store import ObjectStore
from diffusion_operator.reconcile.store.watched_cluster import WatchedCluster
from diffusion_operator.reconcile.workers.calls import WorkerCalls
from diffusion_operator.reconcile.workers.watches import hear
from diffusion_operator.settings import Settings

PER_PASS = 500
MANY = 20_000
PASSES = 30
NAMESPACE, NAME = "default", "d"
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


class Worker:
    """A stand-in for the operator's worker client and watch: one worker in memory with all adapters loaded.

    It takes a put of an adapter and changes its scale. Reading its state, removing, sleeping, waking and draining are not implemented.
    """

    def __init__(self, adapters: int) -> None:
        records = [_record(name) for name in _names(adapters)]
        self.said = WorkerState(boot_id="b", state=WorkerPhase.READY, adapters=tuple(records), revision="b.0")
        self.puts = 0
        self.runtime: Runtime | None = None

    def follow(self, deployment: ObjectMeta, memory: DeploymentMemory, pods: Sequence[Pod]) -> None:
        for pod in pods:
            record = memory.polls[pod.uid]
            if self.runtime is not None and record.state is not self.said:
                hear(self.runtime, record, self.said)
                self.said = record.state or self.said

    def forget(self, namespace: str, deployment: str) -> None:
        raise NotImplementedError

    async def state(self, ip: str, *, token: str, pod_uid: str = "", after: str = "", wait_s: float = 0.0) -> WorkerState:
        raise NotImplementedError

    async def put_adapter(self, call: PutAdapter, *, token: str) -> None:
        self.puts += 1
        told = msgspec.structs.replace(self.said.named[call.name][0], scale=call.load.scale)
        revision = f"b.{self.puts}"
        self.said = msgspec.structs.replace(self.said, adapters=(told,), adapters_since=self.said.revision, revision=revision)

    async def remove_adapter(self, call: RemoveAdapter, *, token: str) -> None:
        raise NotImplementedError

    async def sleep(self, call: SleepWorker, *, token: str) -> None:
        raise NotImplementedError

    async def wake(self, call: WakeWorker, *, token: str) -> None:
        raise NotImplementedError

    async def drain(self, call: DrainWorker, *, token: str) -> None:
        raise NotImplementedError


class Bed:
    """A deployment of one replica whose worker has loaded `adapters` adapters, and the operator's runtime over objects in memory.

    `begin` creates the objects, and runs the pass that makes the pod. The next pass is the first one that sees the adapters loaded. Call
    `settle` before passes that should find nothing new.
    """

    def __init__(self, adapters: int) -> None:
        self.now = BEGIN
        self.store = ObjectStore(lambda kind, manifest: None)
        self.objects = WrittenObjects(self.store)
        self.worker = Worker(adapters)
        self.woken = 0
        self.runtime = Runtime(
            cluster=WatchedCluster(self.objects, self.store),
            workers=self.worker,
            settings=Settings(engine_image="worker:1", operator_key=b"k" * 32),
            clock=lambda: self.now,
            wake=self._wake,
            meter=PrometheusMeter(CollectorRegistry()),
        )
        self.worker.runtime = self.runtime
        self.runtime.watches = self.worker
        self.calls = self.runtime.calls = WorkerCalls(self.runtime)

    def _wake(self, key: object) -> None:
        self.woken += 1

    async def begin(self, adapters: int) -> None:
        spec = {"model": {"source": {"path": "/m"}}, "lora": {"maxCached": adapters}, "resources": {"gpuResourceName": "none"}}
        await self.objects.create(_object(DEPLOYMENT, NAME, spec))
        for name in _names(adapters):
            await self.objects.create(_object(ADAPTER, name, {"deploymentRef": {"name": NAME}, "source": {"path": f"/loras/{name}"}}))
        await self.one_pass()
        running = {"name": "worker", "state": {"running": {}}, "restartCount": 0}
        conditions = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}]
        status = {"phase": "Running", "podIP": "10.0.0.1", "conditions": conditions, "containerStatuses": [running]}
        container = {"name": "worker", "image": "worker:1"}
        self.objects.change(POD, NAMESPACE, f"{NAME}-0-0", spec={"nodeName": "node", "containers": [container]}, status=status)

    async def settle(self) -> None:
        """Run passes until one writes nothing, sends nothing to the worker and wakes nobody.

        Raises:
            RuntimeError: 20 passes were not enough.
        """
        for _ in range(20):
            before = self.objects.writes + self.worker.puts + self.woken
            await self.one_pass()
            if self.objects.writes + self.worker.puts + self.woken == before:
                return
        raise RuntimeError("expected passes that find nothing new, found writes after 20 of them")

    async def one_pass(self) -> float:
        """Run one pass over the deployment, 20 s later by the test's clock, and return its seconds.

        The calls to the worker that it began are awaited, but not counted.
        """
        self.now += timedelta(seconds=20)
        begun = time.perf_counter()
        await reconcile(self.runtime, deployment_key(NAMESPACE, NAME))
        seconds = time.perf_counter() - begun
        await self.calls.settled()
        return seconds

    async def after_a_change(self) -> float:
        """Change one adapter's scale, and return the seconds of the pass that sends it to the worker.

        Raises:
            RuntimeError: the pass made another number of calls than one.
        """
        name, puts = _names(1)[0], self.worker.puts
        scale = "0.5" if puts % 2 == 0 else "1.0"
        spec = {"deploymentRef": {"name": NAME}, "source": {"path": f"/loras/{name}"}, "defaultScale": scale}
        self.objects.change(ADAPTER, NAMESPACE, name, spec=spec)
        seconds = await self.one_pass()
        if self.worker.puts != puts + 1:
            raise RuntimeError(f"expected one call for one change, found {self.worker.puts - puts}")
        return seconds

    async def write_statuses(self, adapters: int) -> float:
        """Run the own pass of each adapter, one after another, and return the seconds that all take together."""
        begun = time.perf_counter()
        for name in _names(adapters):
            await reconcile(self.runtime, adapter_key(NAMESPACE, name))
        return time.perf_counter() - begun


async def _sampled(adapters: int, passes: int) -> dict[str, list[float]]:
    """Return the milliseconds of each kind of pass over a deployment with so many adapters.

    Kinds: the first, the longest turn in it, passes that find nothing new, passes after one change, and the adapters' own, twice.

    Raises:
        RuntimeError: something was written where nothing had changed, or the passes do not settle.
    """
    bed = Bed(adapters)
    await bed.begin(adapters)
    first_s, turn_s = await _watched(bed.one_pass)
    await bed.settle()
    statuses_s = await bed.write_statuses(adapters)
    await bed.settle()
    writes = bed.objects.writes
    unchanged = [await bed.one_pass() for _ in range(passes)]
    again_s = await bed.write_statuses(adapters)
    if bed.objects.writes != writes:
        raise RuntimeError(f"expected no write where nothing changed, found {bed.objects.writes - writes}")
    changed = []
    for _ in range(passes):
        changed.append(await bed.after_a_change())
        await bed.settle()
    seconds = {"unchanged": unchanged, "one_changed": changed, "first": [first_s], "longest_turn": [turn_s]}
    seconds |= {"statuses": [statuses_s], "statuses_again": [again_s]}
    return {name: [round(one * 1000, 3) for one in times] for name, times in seconds.items()}


async def _watched(work: Callable[[], Awaitable[float]]) -> tuple[float, float]:
    """Run some work and return two times in seconds: what the work returned, and the longest for which it kept other tasks waiting."""
    done, longest = False, 0.0

    async def others() -> None:
        nonlocal longest
        while not done:
            begun = time.perf_counter()
            await asyncio.sleep(0)
            longest = max(longest, time.perf_counter() - begun)

    watcher = asyncio.create_task(others())
    await asyncio.sleep(0)
    try:
        seconds = await work()
    finally:
        done = True
        await watcher
    return seconds, longest


def samples(*, tiny: bool = False) -> dict[str, list[float]]:
    """Measure passes over few adapters and over many; return every sample in milliseconds, by the figure's name.

    Names are those of 500 and 20,000 adapters, also in a tiny run, which has fewer.
    """
    few, many, passes = (5, 60, 2) if tiny else (PER_PASS, MANY, PASSES)
    found = {f"{name}_500_ms": times for name, times in asyncio.run(_sampled(few, passes)).items()}
    return found | {f"{name}_20000_ms": times for name, times in asyncio.run(_sampled(many, passes)).items()}


def figures(found: dict[str, list[float]]) -> dict[str, float]:
    medians = {name: statistics.median(times) for name, times in found.items()}
    return {"pass_500_adapters_ms": medians.pop("unchanged_500_ms"), **medians}


def _names(count: int) -> list[str]:
    return [f"a{number:05}" for number in range(count)]


def _record(name: str) -> AdapterRecord:
    facts = {
        "digest": "sha256:" + hashlib.sha256(name.encode()).hexdigest(),
        "ranksLoaded": 1,
        "ranksTotal": 1,
        "rank": 16,
        "sizeBytes": 1 << 20,
    }
    return msgspec.convert({"name": name, "state": "Loaded", "source": {"path": f"/loras/{name}"}} | facts, AdapterRecord)


def _object(kind: Kind, name: str, spec: Manifest) -> Manifest:
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec}


def main() -> None:
    found = samples()
    print(json.dumps({"figures": figures(found), "samples": found}, indent=1))


if __name__ == "__main__":
    main()
