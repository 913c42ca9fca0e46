# SPDX-License-Identifier: Apache-2.0
"""The only module that knows kopf (with __main__, which starts it). Every handler does one thing: wake a key of our queue.

Only `on.event` handlers: kopf then keeps no annotation and no finalizer on any object, and a deletion never waits for us.
"""

import os
import random
import time
from datetime import UTC, datetime
from typing import Any

import kopf

from diffusion_operator import metrics
from diffusion_operator.api.names import (
    ADAPTER,
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    FIELD_MANAGER,
    GROUP,
    LABEL_DEPLOYMENT,
    LABEL_MANAGED_BY,
    NETWORK_POLICY,
    POD,
    SERVICE,
    VERSION,
)
from diffusion_operator.cluster import KubernetesCluster, connect
from diffusion_operator.reconcile.dispatch import reconcile
from diffusion_operator.reconcile.keyed_queue import Key, KeyedQueue, Result
from diffusion_operator.reconcile.runtime import Runtime, adapter_key, deployment_key
from diffusion_operator.settings import Settings
from diffusion_operator.worker_client import HttpWorkerClient

CHILD_KINDS = (POD, SERVICE, CONFIG_MAP, NETWORK_POLICY, DISRUPTION_BUDGET)


class Process:
    """What lives from kopf's start-up to its clean-up: connections, runtime, queue."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._cluster: KubernetesCluster | None = None
        self._workers: HttpWorkerClient | None = None
        self.queue: KeyedQueue | None = None
        self.runtime: Runtime | None = None
        self._collectors: tuple[metrics.ObjectsByReason | metrics.Replicas, ...] = ()

    async def start(self, **_: Any) -> None:
        settings = self._settings
        self._cluster = await connect()
        for namespace in settings.namespaces[:1]:
            await self._cluster.list(DEPLOYMENT, namespace)  # fails with a clear error where the CRDs or the rights are missing
        self._workers = HttpWorkerClient(poll_timeout_s=settings.poll_timeout_s, call_timeout_s=settings.call_timeout_s)
        self.runtime = Runtime(
            cluster=self._cluster,
            workers=self._workers,
            settings=settings,
            clock=lambda: datetime.now(UTC),
            wake=self.wake,
            meter=metrics.METER,
        )
        self._collectors = (metrics.ObjectsByReason(self.runtime.ready_reasons), metrics.Replicas(self.runtime.statuses))
        for collector in self._collectors:
            metrics.REGISTRY.register(collector)
        measured = metrics.measured(self._reconcile, time.monotonic)
        self.queue = KeyedQueue(measured, resync_s=settings.resync_s, parallel=settings.parallel_reconciles, random=random.random)

    async def stop(self, **_: Any) -> None:
        if self.queue is not None:
            await self.queue.close()
        for collector in self._collectors:
            metrics.REGISTRY.unregister(collector)
        if self._workers is not None:
            await self._workers.close()
        if self._cluster is not None:
            await self._cluster.__aexit__(None, None, None)

    def wake(self, key: Key) -> None:
        if self.queue is not None and self.runtime is not None:
            self.runtime.touched.add(key)
            self.queue.wake(key)

    async def _reconcile(self, key: Key) -> Result:
        if self.runtime is None:  # the queue exists only after it
            return Result(gone=True)
        return await reconcile(self.runtime, key)

    async def on_deployment(self, name: str | None, namespace: str | None, **_: Any) -> None:
        self.wake(deployment_key(namespace or "", name or ""))

    async def on_adapter(self, name: str | None, namespace: str | None, spec: kopf.Spec, **_: Any) -> None:
        """The object's own key for its status, its deployment's for what has to be done."""
        self.wake(adapter_key(namespace or "", name or ""))
        self.wake(deployment_key(namespace or "", spec["deploymentRef"]["name"]))

    async def on_child(self, namespace: str | None, labels: kopf.Labels, body: kopf.Body, **_: Any) -> None:
        deployment = labels.get(LABEL_DEPLOYMENT)
        if deployment and self.runtime is not None:
            self.runtime.child_changed(namespace or "", deployment, str(body.get("kind", "")))


async def login(**context: Any) -> kopf.ConnectionInfo | None:
    """In a pod by the environment's address, which needs no DNS; elsewhere by the kubeconfig."""
    in_cluster = "KUBERNETES_SERVICE_HOST" in os.environ
    return kopf.login_via_client(**context) if in_cluster else kopf.login_with_kubeconfig(**context)


def build_registry(process: Process) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry, id="login")(login)
    # Permanent: a process that cannot start ends with the reason, and is started again by whoever runs it.
    kopf.on.startup(registry=registry, id="start", errors=kopf.ErrorsMode.PERMANENT)(process.start)
    kopf.on.cleanup(registry=registry, id="stop")(process.stop)
    kopf.on.event(GROUP, VERSION, DEPLOYMENT.plural, registry=registry, id="deployment")(process.on_deployment)
    kopf.on.event(GROUP, VERSION, ADAPTER.plural, registry=registry, id="adapter")(process.on_adapter)
    for kind in CHILD_KINDS:
        kopf.on.event(*kind.group_and_version, kind.plural, registry=registry, id=kind.plural)(process.on_child)
    return registry


def build_kopf_settings(settings: Settings) -> kopf.OperatorSettings:
    """craft.md 1.6, measured there."""
    result = kopf.OperatorSettings()
    result.networking.connect_timeout = 10
    result.networking.request_timeout = 60
    result.watching.server_timeout = 600
    result.watching.client_timeout = 660
    result.watching.inactivity_timeout = 70
    result.watching.chunk_size = 500
    for kind in CHILD_KINDS:
        result.watching.label_selectors[*kind.group_and_version, kind.plural] = f"{LABEL_MANAGED_BY}={FIELD_MANAGER}"
    # Nothing is ever persisted by kopf in this shape; should a handler appear that does, it stays under our own domain.
    result.persistence.finalizer = f"{GROUP}/operator"
    result.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP, v1=False)
    result.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    result.posting.enabled = False
    result.peering.standalone = True
    result.scanning.disabled = bool(settings.namespaces)  # a named namespace needs no right to list CRDs or namespaces
    result.process.ultimate_exiting_timeout = 20
    return result
