# SPDX-License-Identifier: Apache-2.0
"""Parts that the reconciles share: both ports, settings, clock, the way to wake a key, and each deployment's memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from diffusion_operator.api.deployment_status import DeploymentStatus
from diffusion_operator.api.meta import Condition, ObjectMeta, reason_of
from diffusion_operator.api.names import ADAPTER, DEPLOYMENT
from diffusion_operator.cluster import Cluster
from diffusion_operator.plan.observed.observed import Asleep
from diffusion_operator.plan.observed.pods import Pod
from diffusion_operator.plan.results.actions import WorkerAction
from diffusion_operator.plan.results.worker_changes import WorkerChanges
from diffusion_operator.reconcile.backoff import Backoffs
from diffusion_operator.reconcile.control_tokens import ControlTokens
from diffusion_operator.reconcile.keyed_queue import Key
from diffusion_operator.reconcile.memory import DeploymentMemory
from diffusion_operator.render.child import child_key
from diffusion_operator.settings import Settings
from diffusion_operator.worker_client import WorkerClient


class Meter(Protocol):
    """Counters of the reconciles; in the process, the metrics server implements them."""

    def called(self, verb: str, code: str, seconds: float) -> None:
        """Count a finished call to a worker's control port by `OK` or the error's code."""

    def woke(self, level: str, seconds: float) -> None:
        """Record a replica's wake from a level of sleep."""

    def seen(self, happened: WorkerChanges) -> None:
        """Add a replica's adapter loads, evictions and failed verifications since its previous state document to the counters."""


class Watches(Protocol):
    """The port to the watches of workers, which keep the memories' records up to date; see workers/watches.py."""

    def follow(self, deployment: ObjectMeta, memory: DeploymentMemory, pods: Sequence[Pod]) -> None: ...

    def forget(self, namespace: str, deployment: str) -> None: ...


class Calls(Protocol):
    """The port to the control calls; see workers/calls.py."""

    @property
    def calling(self) -> frozenset[str]: ...

    def begin(self, key: Key, memory: DeploymentMemory, calls: Sequence[WorkerAction]) -> None: ...


@dataclass
class Runtime:
    cluster: Cluster
    workers: WorkerClient
    settings: Settings
    clock: Callable[[], datetime]
    """Aware UTC."""
    wake: Callable[[Key], None]
    meter: Meter
    watches: Watches = field(init=False)
    calls: Calls = field(init=False)
    """Both of them know the runtime, so they are made after it."""
    memories: dict[tuple[str, str], DeploymentMemory] = field(default_factory=dict)
    """Each deployment's memory, by namespace and name."""
    adapter_backoffs: dict[Key, Backoffs] = field(default_factory=dict)
    ready_reasons: dict[Key, str] = field(default_factory=dict)
    """The reason of Ready of every object that was looked at, for metrics."""
    degraded_reasons: dict[Key, str] = field(default_factory=dict)
    """The reason of Degraded, likewise."""
    statuses: dict[Key, DeploymentStatus] = field(default_factory=dict)
    """The status of every deployment as last computed, written or not, for metrics."""
    asleep: dict[Key, Asleep] = field(default_factory=dict)
    """The sleepers of every deployment, for those that wait for their devices."""

    def now(self) -> datetime:
        """Return the time in whole seconds, as Kubernetes keeps it, so that a status read back equals the one written."""
        return self.clock().replace(microsecond=0)

    def forget_all(self) -> None:
        """Forget all deployments and the backoffs of adapters, as a new process would begin: another one acted meanwhile."""
        for namespace, name in tuple(self.memories):
            self.forget(namespace, name)
        self.adapter_backoffs.clear()

    def forget(self, namespace: str, deployment: str) -> None:
        """Drop the memory of a deployment."""
        self.memories.pop((namespace, deployment), None)

    def show(self, key: Key, conditions: tuple[Condition, ...]) -> None:
        """Take an object's reasons for the metrics from its conditions."""
        self.ready_reasons[key], self.degraded_reasons[key] = (reason_of(conditions, type_) for type_ in ("Ready", "Degraded"))

    def hide(self, key: Key) -> None:
        """Take an object out of the metrics, and out of the sleepers that others name."""
        for shown in (self.ready_reasons, self.degraded_reasons, self.statuses, self.asleep):
            shown.pop(key, None)

    def show_nothing(self) -> None:
        """Clear the metrics of objects, which are left to the process that leads."""
        for shown in (self.ready_reasons, self.degraded_reasons, self.statuses, self.asleep):
            shown.clear()

    def memory(self, deployment: ObjectMeta) -> DeploymentMemory:
        namespace, name = deployment.namespace, deployment.name
        known = self.memories.get((namespace, name))
        if known is None or known.uid != deployment.uid:
            tokens = ControlTokens(self.settings, deployment)
            known = self.memories[namespace, name] = DeploymentMemory(uid=deployment.uid, tokens=tokens)
        return known

    def child_changed(self, namespace: str, deployment: str, kind: str, name: str) -> None:
        """Note a change of a child, perhaps by another client, and wake its deployment, whose next pass looks at the child."""
        known = self.memories.get((namespace, deployment))
        if known is not None:
            known.doubted |= {child_key(kind, name)}
        self.wake(deployment_key(namespace, deployment))


def deployment_key(namespace: str, name: str) -> Key:
    return Key(DEPLOYMENT.kind, namespace, name)


def adapter_key(namespace: str, name: str) -> Key:
    return Key(ADAPTER.kind, namespace, name)
