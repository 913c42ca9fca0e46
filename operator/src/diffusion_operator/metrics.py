# SPDX-License-Identifier: Apache-2.0
"""Metrics of the operator's process. Labels are bounded: no object names. docs/metrics.md explains each."""

import collections
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from diffusion_operator.api.deployment_status import DeploymentStatus, ReplicaState
from diffusion_operator.api.worker_state import CODES
from diffusion_operator.election.leadership import Leadership
from diffusion_operator.plan.results.worker_changes import WorkerChanges
from diffusion_operator.reconcile.keyed_queue import Key, KeyedQueue, Result
from diffusion_operator.reconcile.memory import DeploymentMemory, Followed
from diffusion_operator.reconcile.runtime import Runtime
from diffusion_operator.reconcile.store.listing import Listing

REGISTRY = CollectorRegistry()
RECONCILE_SECONDS = Histogram(
    "diffusion_operator_reconcile_seconds",
    "Time of one reconcile of an object, by kind and outcome: ok, gone or error.",
    ["kind", "outcome"],
    registry=REGISTRY,
)


# Buckets from tenths of a second (a load from a cache) to minutes (a fetch, or a wake that reads large files).
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

CALL_CODES = CODES | {"OK", "Unreachable"}
"""Labels of a call's outcome. A tenant's worker may answer with any text, and each new label costs memory for ever."""


class PrometheusMeter:
    """The reconciles' counters (`Meter`) in Prometheus."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._calls = Histogram(
            "diffusion_operator_control_call_seconds",
            "Time of a call to a worker's control port, by verb and by code (OK or an error's); reads of its state are left out.",
            ["verb", "code"],
            registry=registry,
        )
        self._wakes = Histogram(
            "diffusion_operator_wake_seconds",
            "Time of each wake of a replica that succeeded, by the operator or by a request, by level of the sleep.",
            ["level"],
            registry=registry,
            buckets=SECONDS,
        )
        self._loads = Histogram(
            "diffusion_operator_adapter_load_seconds",
            "Time of each load of an adapter on a replica that succeeded, its fetch included.",
            registry=registry,
            buckets=SECONDS,
        )
        self._loaded_bytes = Counter(
            "diffusion_operator_adapter_loaded_bytes",
            "Size of the adapters that were loaded on replicas, counted at each load.",
            registry=registry,
        )
        self._evictions = Counter(
            "diffusion_operator_adapter_evictions",
            "Adapters evicted from a replica's memory to make room for others, while it served.",
            registry=registry,
        )
        failures = Counter(
            "diffusion_operator_verification_failures",
            "Wakes given up because weights or adapters had changed (wake), and changed adapters that were loaded again (adapter).",
            ["what"],
            registry=registry,
        )
        # There from the start, so that an alert sees the first one.
        self._wrong_wakes, self._wrong_adapters = (failures.labels(what=what) for what in ("wake", "adapter"))

    def called(self, verb: str, code: str, seconds: float) -> None:
        self._calls.labels(verb=verb, code=code if code in CALL_CODES else "Other").observe(seconds)

    def woke(self, level: str, seconds: float) -> None:
        self._wakes.labels(level=level).observe(seconds)

    def seen(self, happened: WorkerChanges) -> None:
        for load in happened.loads:
            self._loads.observe(load.seconds)
            self._loaded_bytes.inc(load.size_bytes)
        self._evictions.inc(happened.evictions)
        self._wrong_wakes.inc(happened.wrong_wakes)
        self._wrong_adapters.inc(happened.wrong_adapters)


METER = PrometheusMeter(REGISTRY)


class ObjectsByReason(Collector):
    """Objects of each kind in each namespace by the reasons of Ready and of Degraded, counted when somebody asks."""

    def __init__(self, ready: Mapping[Key, str], degraded: Mapping[Key, str]) -> None:
        self._ready = ready
        self._degraded = degraded

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Count at a scrape, in the thread of the metrics server; `list` copies in one step, so the loop may write meanwhile."""
        yield self._counted("diffusion_operator_objects", "Ready", self._ready)
        yield self._counted("diffusion_operator_objects_degraded", "Degraded", self._degraded)

    def _counted(self, name: str, condition: str, reasons: Mapping[Key, str]) -> GaugeMetricFamily:
        text = f"DiffusionDeployments and LoRAAdapters by the reason of their {condition} condition."
        family = GaugeMetricFamily(name, text, labels=["kind", "object_namespace", "reason"])
        counts = collections.Counter((key.kind, key.namespace, reason) for key, reason in list(reasons.items()))
        for labels, count in sorted(counts.items()):
            family.add_metric(labels, count)
        return family


class Replicas(Collector):
    """Replicas of each namespace by state, and the requests that they hold, counted when somebody asks."""

    def __init__(self, statuses: Mapping[Key, DeploymentStatus]) -> None:
        self._statuses = statuses

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Count replicas by namespace and state, and sum up held requests, at each scrape and in its thread.

        A namespace that has a deployment shows all states, those without replicas as 0.
        """
        statuses = [(key.namespace, status) for key, status in list(self._statuses.items())]
        replicas = GaugeMetricFamily(
            "diffusion_operator_replicas",
            "Replicas of all DiffusionDeployments of a namespace by state.",
            labels=["object_namespace", "state"],
        )
        held = GaugeMetricFamily(
            "diffusion_operator_held_requests",
            "Requests that replicas of a namespace hold until their model serves.",
            labels=["object_namespace"],
        )
        states = collections.Counter((namespace, one.state) for namespace, status in statuses for one in status.replica_states)
        for namespace in sorted({namespace for namespace, _ in statuses}):
            for state in ReplicaState:
                replicas.add_metric([namespace, state.value], states[namespace, state])
            waiting = [status.held.current or 0 for where, status in statuses if where == namespace and status.held is not None]
            held.add_metric([namespace], sum(waiting))
        yield from (replicas, held)


class Watches(Collector):
    """Seconds that each kind's watch has been stalled, the longest of its namespaces; and what cannot be listed at all."""

    def __init__(self, listings: Sequence[Listing]) -> None:
        self._listings = listings

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "diffusion_operator_watch_stalled_seconds",
            "Time since a listing found a change that the watch of this kind had not reported; 0 while the watch reports.",
            labels=["kind"],
        )
        stalled: dict[str, float] = {}
        for listing in self._listings:
            kind = listing.scope.kind.kind
            stalled[kind] = max(stalled.get(kind, 0.0), listing.stalled_s)
        for kind, seconds in stalled.items():
            family.add_metric([kind], seconds)
        yield family
        refused = GaugeMetricFamily(
            "diffusion_operator_watch_refused",
            "1 for each kind in a namespace whose last listing failed, so that the operator does without it.",
            labels=["kind", "object_namespace"],
        )
        for listing in self._listings:
            if listing.refusal:
                refused.add_metric([listing.scope.kind.kind, listing.scope.namespace], 1)
        yield refused


class Waiting(Collector):
    """Objects that are due and wait for their turn."""

    def __init__(self, queue: Callable[[], KeyedQueue | None]) -> None:
        """Count the queue that `queue` returns; None, while this process does not lead, counts as empty."""
        self._queue = queue

    def collect(self) -> Iterator[GaugeMetricFamily]:
        queue = self._queue()
        waiting, oldest_s = (queue.waiting, queue.oldest_s) if queue is not None else (0, 0.0)
        yield GaugeMetricFamily(
            "diffusion_operator_queue_length", "Objects that are due for a reconcile and wait for their turn.", value=waiting
        )
        yield GaugeMetricFamily(
            "diffusion_operator_queue_age_seconds",
            "Time that the object which is due for the longest has waited for its reconcile; 0 if none waits.",
            value=oldest_s,
        )


class Workers(Collector):
    """Workers by how they are followed: `watched`, `lost` or `unheard`."""

    def __init__(self, memories: Mapping[tuple[str, str], DeploymentMemory]) -> None:
        self._memories = memories

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Count workers by how they are followed, at each scrape and in its thread. States without a worker show 0.

        Each copy is one step of the interpreter, so the loop may write meanwhile.
        """
        records = [record for memory in list(self._memories.values()) for record in list(memory.polls.values())]
        counts = collections.Counter(record.followed for record in records)
        family = GaugeMetricFamily(
            "diffusion_operator_workers",
            "Workers by how the operator hears of their state: watched, lost or unheard.",
            labels=["followed"],
        )
        for state in Followed:
            family.add_metric([state.value], counts[state])
        yield family


class Leads(Collector):
    """The lead of this process: its epoch, and the time since it renewed its Lease."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership

    def collect(self) -> Iterator[Metric]:
        found = self._leadership
        yield GaugeMetricFamily(
            "diffusion_operator_leader",
            "1 if this process leads and so writes to the cluster, else 0; 1 without election.",
            value=found.is_open,
        )
        yield GaugeMetricFamily(
            "diffusion_operator_leader_epoch",
            "Epoch of this process's last leadership, a number that rises with each leader; 0 before it and without election.",
            value=found.epoch or 0,
        )
        yield GaugeMetricFamily(
            "diffusion_operator_lease_age_seconds",
            "Time since this process renewed its Lease; 0 if it does not lead, and without election.",
            value=found.renewed_ago_s,
        )
        yield CounterMetricFamily(
            "diffusion_operator_leaderships_lost",
            "Times that this process lost the leadership; giving it up at its end does not count.",
            value=found.lost,
        )


def register(
    runtime: Runtime, queue: Callable[[], KeyedQueue | None], listings: Sequence[Listing], leadership: Leadership
) -> tuple[Collector, ...]:
    """Register collectors that read their values at scrape time, and return them; the caller unregisters them when the process ends."""
    collectors = (
        ObjectsByReason(runtime.ready_reasons, runtime.degraded_reasons),
        Replicas(runtime.statuses),
        Watches(listings),
        Waiting(queue),
        Workers(runtime.memories),
        Leads(leadership),
    )
    for collector in collectors:
        REGISTRY.register(collector)
    return collectors


def measured(reconcile: Callable[[Key], Awaitable[Result]], clock: Callable[[], float]) -> Callable[[Key], Awaitable[Result]]:
    """Wrap a reconcile function to record the duration of each call by kind and outcome: `ok`, `gone` or `error`.

    An exception is an `error`, and so is a result with a failure. `clock` returns seconds since an arbitrary moment.
    """

    async def timed(key: Key) -> Result:
        begun, outcome = clock(), "error"
        try:
            result = await reconcile(key)
            if result.failure is None:
                outcome = "gone" if result.gone else "ok"
            return result
        finally:
            RECONCILE_SECONDS.labels(kind=key.kind, outcome=outcome).observe(clock() - begun)

    return timed


def serve_metrics(port: int) -> None:
    """Serve the metrics over HTTP and return at once. A thread of its own answers, even while the loop is busy."""
    start_http_server(port, registry=REGISTRY)
