# SPDX-License-Identifier: Apache-2.0
"""The only module that knows kopf (with __main__, which starts it). Every handler does one thing: take what a watch tells into the store.

Only `on.event` handlers: kopf then keeps no annotation and no finalizer on any object, and a deletion never waits for us.
"""

import asyncio
import itertools
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import kopf
from prometheus_client.registry import Collector

from diffusion_operator import metrics
from diffusion_operator.api.names import ADAPTER, DEPLOYMENT, FIELD_MANAGER, GROUP, LABEL_DEPLOYMENT, LABEL_MANAGED_BY, POD, Kind
from diffusion_operator.cluster import KubernetesCluster, Manifest, connect
from diffusion_operator.errors import ClusterRefused, WatchStale
from diffusion_operator.kopf_storage import NoDiffBase, NoProgress
from diffusion_operator.reconcile.dispatch import reconcile
from diffusion_operator.reconcile.keyed_queue import Key, KeyedQueue, Result
from diffusion_operator.reconcile.listing import Listing, Scope
from diffusion_operator.reconcile.object_store import ObjectStore
from diffusion_operator.reconcile.runtime import Runtime, adapter_key, deployment_key
from diffusion_operator.reconcile.watched_cluster import CHILD_KINDS, WATCHED, WatchedCluster
from diffusion_operator.settings import Settings
from diffusion_operator.worker_client import HttpWorkerClient

FORBIDDEN = 403
BACKOFFS_S = (1, 1, 2, 4, 8, 16, 30)


class EndlessBackoffs:
    """Pauses between the tries of a request that the API server refuses; the last is repeated for ever.

    After a finite list kopf ends the whole operator, as for the watch of one deleted namespace.
    """

    def __iter__(self) -> Iterator[float]:
        return itertools.chain(BACKOFFS_S, itertools.repeat(BACKOFFS_S[-1]))


class Process:
    """What lives from kopf's start-up to its clean-up: connections, watches, runtime, queue."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._cluster: KubernetesCluster | None = None
        self._workers: HttpWorkerClient | None = None
        self._store = ObjectStore(self._changed)
        self._tasks: list[asyncio.Task[None]] = []
        self._collectors: tuple[Collector, ...] = ()
        self.listings: tuple[Listing, ...] = ()
        self.queue: KeyedQueue | None = None
        self.runtime: Runtime | None = None

    async def start(self, **_: Any) -> None:
        """List everything before the first pass; where the CRDs or all rights are missing it fails here, with a clear error."""
        settings = self._settings
        self._cluster = await connect(self._answered)
        cluster = self._cluster
        self.listings = tuple(Listing(cluster, self._store, scope, clock=time.monotonic) for scope in _scopes(settings))
        await self._list_first()
        self._workers = HttpWorkerClient(poll_timeout_s=settings.poll_timeout_s, call_timeout_s=settings.call_timeout_s)
        self.runtime = Runtime(
            cluster=WatchedCluster(self._cluster, self._store),
            workers=self._workers,
            settings=settings,
            clock=lambda: datetime.now(UTC),
            wake=self.wake,
            meter=metrics.METER,
        )
        measured = metrics.measured(self._reconcile, time.monotonic)
        self.queue = KeyedQueue(measured, resync_s=settings.resync_s, parallel=settings.parallel_reconciles, random=random.random)
        self._collectors = metrics.register(self.runtime, self.queue, self.listings)
        for kind in (DEPLOYMENT, ADAPTER):
            for namespace, name in self._store.places(kind, ""):
                self.wake(Key(kind.kind, namespace, name))
        self._tasks = [asyncio.create_task(one.run(settings.resync_s), name=f"listing {one.scope}") for one in self.listings]

    async def _list_first(self) -> None:
        """A named namespace that is gone has taken the rights with it; the others are served."""
        for listing in self.listings:
            try:
                await listing.list()
            except ClusterRefused as error:
                if not self._settings.namespaces or error.status != FORBIDDEN:
                    raise
                listing.set_aside(error)
                if all(one.refusal for one in self.listings):
                    raise

    async def stop(self, **_: Any) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.queue is not None:
            await self.queue.close()
        for collector in self._collectors:
            metrics.REGISTRY.unregister(collector)
        if self._workers is not None:
            await self._workers.close()
        if self._cluster is not None:
            await self._cluster.__aexit__(None, None, None)

    async def probe(self, **_: Any) -> dict[str, int]:
        """Return the seconds that each watch has been stalled; raise WatchStale for one that reopening did not mend."""
        stalled = {str(one.scope): round(one.stalled_s) for one in self.listings}
        stale = {name: seconds for name, seconds in stalled.items() if seconds > self._settings.watch_dead_s}
        if stale:
            raise WatchStale("watch stalled: " + ", ".join(f"no events of {name} for {seconds} s" for name, seconds in stale.items()))
        return stalled

    def wake(self, key: Key) -> None:
        if self.queue is not None and self.runtime is not None:
            self.runtime.touched.add(key)
            self.queue.wake(key)

    async def _reconcile(self, key: Key) -> Result:
        if self.runtime is None:  # the queue exists only after it
            return Result(gone=True)
        return await reconcile(self.runtime, key)

    def event_handler(self, kind: Kind) -> Callable[..., Awaitable[None]]:
        """The handler of a kind's events."""

        async def told(event: kopf.RawEvent, **_: Any) -> None:
            manifest = dict(event["object"])
            for listing in self.listings:
                if listing.scope.kind == kind and listing.scope.namespace in ("", manifest["metadata"]["namespace"]):
                    listing.record_event()
            if event["type"] == "DELETED":
                self._store.remove(kind, manifest)
            else:
                self._store.put(kind, manifest)

        return told

    def _changed(self, kind: Kind, manifest: Manifest) -> None:
        """Wake the key for a change by another client than the operator.

        An adapter's own key is for its status, and the key of its deployment for all work.
        """
        namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        if kind == DEPLOYMENT:
            self.wake(deployment_key(namespace, name))
        elif kind == ADAPTER:
            self.wake(adapter_key(namespace, name))
            self.wake(deployment_key(namespace, manifest["spec"]["deploymentRef"]["name"]))
        elif self.runtime is not None:
            for deployment in _deployments(manifest):
                self.runtime.child_changed(namespace, deployment, kind.kind)

    def _answered(self, kind: Kind, manifest: Manifest) -> None:
        """By a write of ours, whose event will be no news. What we do to pods is looked at again; what we apply is as it should be."""
        if kind in WATCHED:
            self._store.learn(kind, manifest)
        if kind == POD:
            for deployment in _deployments(manifest):
                self.wake(deployment_key(manifest["metadata"]["namespace"], deployment))


def _deployments(child: Manifest) -> set[str]:
    """By its label and by its owner: somebody may have changed either."""
    label = child["metadata"].get("labels", {}).get(LABEL_DEPLOYMENT)
    owners = {one["name"] for one in child["metadata"].get("ownerReferences", ()) if one["kind"] == DEPLOYMENT.kind}
    return owners | {label} if label else owners


def _scopes(settings: Settings) -> list[Scope]:
    ours = {LABEL_MANAGED_BY: FIELD_MANAGER}
    return [
        Scope(kind=kind, namespace=namespace, labels=ours if kind in CHILD_KINDS else {})
        for namespace in settings.namespaces or ("",)
        for kind in WATCHED
    ]


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
    kopf.on.probe(registry=registry, id="watches", errors=kopf.ErrorsMode.PERMANENT)(process.probe)
    for kind in WATCHED:
        group, version = kind.group_and_version
        kopf.on.event(group, version, kind.plural, registry=registry, id=kind.plural)(process.event_handler(kind))
    return registry


def build_kopf_settings() -> kopf.OperatorSettings:
    """craft.md 1.6, measured there."""
    result = kopf.OperatorSettings()
    result.networking.connect_timeout = 10
    result.networking.request_timeout = 60
    result.networking.error_backoffs = EndlessBackoffs()  # kopf begins it again for each request
    result.watching.server_timeout = 600
    result.watching.client_timeout = 660
    result.watching.inactivity_timeout = 70  # the API server sends a bookmark about once a minute
    result.watching.chunk_size = 500
    for kind in CHILD_KINDS:
        group, version = kind.group_and_version
        result.watching.label_selectors[group, version, kind.plural] = f"{LABEL_MANAGED_BY}={FIELD_MANAGER}"
    result.persistence.finalizer = f"{GROUP}/operator"  # none is ever set in this shape
    result.persistence.progress_storage = NoProgress()
    result.persistence.diffbase_storage = NoDiffBase()
    result.posting.enabled = False
    result.peering.standalone = True
    result.scanning.disabled = True  # our kinds are there before us, so no right to list CRDs or namespaces is needed
    result.process.ultimate_exiting_timeout = 20
    return result
