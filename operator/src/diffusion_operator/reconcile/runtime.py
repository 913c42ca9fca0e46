# SPDX-License-Identifier: Apache-2.0
"""What the reconciles share: the two ports, the settings, the clock, the way to wake a key, and the memory of each deployment."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from diffusion_operator.api.deployment_status import DeploymentStatus
from diffusion_operator.api.meta import ObjectMeta
from diffusion_operator.api.names import ADAPTER, DEPLOYMENT
from diffusion_operator.cluster import Cluster
from diffusion_operator.plan.results.worker_changes import WorkerChanges
from diffusion_operator.reconcile.backoff import Backoffs
from diffusion_operator.reconcile.control_tokens import ControlTokens
from diffusion_operator.reconcile.keyed_queue import Key
from diffusion_operator.reconcile.memory import DeploymentMemory
from diffusion_operator.settings import Settings
from diffusion_operator.worker_client import WorkerClient


class Meter(Protocol):
    """Where what happens is counted; in the process it is the metrics server's."""

    def called(self, verb: str, code: str, seconds: float) -> None:
        """A call to a worker's control port is over: `OK`, or the error's code."""

    def woke(self, level: str, seconds: float) -> None:
        """A replica has woken up from a level of sleep."""

    def seen(self, happened: WorkerChanges) -> None:
        """What happened on a replica since the last look at it."""


@dataclass
class Runtime:
    cluster: Cluster
    workers: WorkerClient
    settings: Settings
    clock: Callable[[], datetime]
    """Aware UTC."""
    wake: Callable[[Key], None]
    meter: Meter
    memories: dict[tuple[str, str], DeploymentMemory] = field(default_factory=dict)
    """By namespace and name."""
    adapter_backoffs: dict[Key, Backoffs] = field(default_factory=dict)
    ready_reasons: dict[Key, str] = field(default_factory=dict)
    """Of every object that was looked at, for metrics."""
    touched: set[Key] = field(default_factory=set)
    """Keys that were woken since their last pass began, so that it is not time alone that brings the next one."""
    statuses: dict[Key, DeploymentStatus] = field(default_factory=dict)
    """Of every deployment as it was seen last, written or not, for metrics."""

    def now(self) -> datetime:
        """Whole seconds: what Kubernetes keeps of a time, so that a status read back equals the one written."""
        return self.clock().replace(microsecond=0)

    def memory(self, deployment: ObjectMeta) -> DeploymentMemory:
        namespace, name = deployment.namespace, deployment.name
        known = self.memories.get((namespace, name))
        if known is None or known.uid != deployment.uid:
            tokens = ControlTokens(self.settings, deployment)
            known = self.memories[namespace, name] = DeploymentMemory(uid=deployment.uid, tokens=tokens)
        return known

    def child_changed(self, namespace: str, deployment: str, kind: str) -> None:
        """A child was touched, maybe by another client: look at it in the next pass."""
        known = self.memories.get((namespace, deployment))
        if known is not None:
            known.doubted.add(kind)
        self.wake(deployment_key(namespace, deployment))


def deployment_key(namespace: str, name: str) -> Key:
    return Key(DEPLOYMENT.kind, namespace, name)


def adapter_key(namespace: str, name: str) -> Key:
    return Key(ADAPTER.kind, namespace, name)
