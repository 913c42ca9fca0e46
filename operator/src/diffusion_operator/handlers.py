# SPDX-License-Identifier: Apache-2.0
"""The only module that knows kopf (with __main__, which starts it). Every handler does one thing: take what a watch tells into the store.

Only `on.event` handlers: kopf then keeps no annotation and no finalizer on any object, and a deletion never waits for us.
"""

import asyncio
import itertools
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextvars import Context
from datetime import UTC, datetime
from typing import Any

import kopf
from prometheus_client.registry import Collector

from diffusion_operator import metrics
from diffusion_operator.api.names import ADAPTER, DEPLOYMENT, FIELD_MANAGER, GROUP, LABEL_DEPLOYMENT, LABEL_MANAGED_BY, POD, Kind
from diffusion_operator.api.published_schema import missing_fields
from diffusion_operator.cluster import PAGE, KubernetesCluster, Manifest, connect
from diffusion_operator.election.elector import Elector
from diffusion_operator.election.gated import GatedCluster, GatedWorkers
from diffusion_operator.election.leadership import Leadership
from diffusion_operator.errors import ClusterRefused, KindsOutdated, OperatorError, WatchStale
from diffusion_operator.kopf_storage import NoDiffBase, NoProgress
from diffusion_operator.reconcile.dispatch import reconcile
from diffusion_operator.reconcile.keyed_queue import Key, KeyedQueue, Result
from diffusion_operator.reconcile.runtime import Runtime, adapter_key, deployment_key
from diffusion_operator.reconcile.scope_events import tell_refusals
from diffusion_operator.reconcile.store.child_watch import ChildWatch
from diffusion_operator.reconcile.store.listing import Listing, Scope
from diffusion_operator.reconcile.store.object_store import ObjectStore
from diffusion_operator.reconcile.store.parsing import deployment_named
from diffusion_operator.reconcile.store.watched_cluster import CHILD_KINDS, DECLARED_KINDS, WATCHED, WatchedCluster
from diffusion_operator.reconcile.workers.calls import WorkerCalls
from diffusion_operator.reconcile.workers.watches import WorkerWatches
from diffusion_operator.settings import Settings
from diffusion_operator.worker_client import HttpWorkerClient

PUBLISHED_WITHIN_S = 10.0
"""The API server publishes a changed kind a moment after it takes it."""
LOOK_AGAIN_S = 1.0

FORBIDDEN = 403
BACKOFFS_S = (1, 1, 2, 4, 8, 16, 30)
PATIENCE_S = 5.0
"""For the passes that run when SIGTERM comes. The Lease is kept meanwhile."""

log = logging.getLogger(__name__)


class EndlessBackoffs:
    """Pauses between the tries of a request that the API server refuses; the last is repeated for ever.

    After a finite list kopf ends the whole operator, as for the watch of one deleted namespace.
    """

    def __iter__(self) -> Iterator[float]:
        return itertools.chain(BACKOFFS_S, itertools.repeat(BACKOFFS_S[-1]))


class Process:
    """Parts of the operator that kopf's start-up handler brings up and its clean-up handler closes.

    The store and its watches live all the time. The queue exists only while this process leads.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._cluster: KubernetesCluster | None = None
        self._workers: HttpWorkerClient | None = None
        self._store = ObjectStore(self._changed)
        self._elector: Elector | None = None
        self._election: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._telling: set[asyncio.Task[None]] = set()
        self._collectors: tuple[Collector, ...] = ()
        self.listings: tuple[Listing, ...] = ()
        self.leadership = Leadership() if settings.election is not None else Leadership.for_ever()
        self.failure = ""
        """The error for which it did not start. Empty where it did."""
        self.queue: KeyedQueue | None = None
        """There while this process leads."""
        self.runtime: Runtime | None = None
        self.watches: WorkerWatches | None = None
        self.calls: WorkerCalls | None = None

    async def begin(self, **_: Any) -> None:
        """Call `start`. Turn an OperatorError into a kopf.PermanentError of one sentence, without a traceback, and keep it in `failure`."""
        try:
            await self.start()
        except OperatorError as error:
            self.failure = str(error)
            raise kopf.PermanentError(self.failure) from None

    async def start(self) -> None:
        """Connect, list all objects once, and start the watches and the election; without an election this process leads at once.

        A follower keeps its watches and its store warm, so that it can take over quickly.

        Raises:
            OperatorError: the CRDs are missing or outdated, the cluster cannot be listed, or all named namespaces refuse it.
        """
        settings, leadership = self._settings, self.leadership
        self._cluster = await connect(self._answered)
        cluster = self._cluster
        self.listings = tuple(
            Listing(cluster, self._store, scope, clock=time.monotonic, refused=self._scope_refused) for scope in _scopes(settings)
        )
        await self._list_first()
        await require_kinds(cluster)
        self._workers = HttpWorkerClient(
            poll_timeout_s=settings.poll_timeout_s, call_timeout_s=settings.call_timeout_s, epoch=lambda: leadership.epoch
        )
        self.runtime = Runtime(
            cluster=GatedCluster(WatchedCluster(self._cluster, self._store), leadership),
            workers=GatedWorkers(self._workers, leadership),
            settings=settings,
            clock=lambda: datetime.now(UTC),
            wake=self.wake,
            meter=metrics.METER,
        )
        self.watches = self.runtime.watches = WorkerWatches(self.runtime, random=random.random, monotonic=time.monotonic)
        self.calls = self.runtime.calls = WorkerCalls(self.runtime)
        self._collectors = metrics.register(self.runtime, lambda: self.queue, self.listings, leadership)
        self._tasks = [asyncio.create_task(one.run(settings.resync_s), name=f"listing {one.scope}") for one in self.listings]
        for one in self.listings:
            if one.scope.kind in CHILD_KINDS:
                watch = ChildWatch(cluster, self._store, one, random=random.random, monotonic=time.monotonic)
                self._tasks.append(asyncio.create_task(watch.run(), name=f"watch of {one.scope}"))
        self._take_part()

    def _take_part(self) -> None:
        """Begin the election, or lead at once where there is none."""
        if self._settings.election is None or self._cluster is None:
            log.warning(
                "no election: no --lease-namespace, --lease-name and --identity; a second operator beside this one would undo its writes"
            )
            self._lead(again=False)
            return
        self._elector = Elector(
            self._cluster,
            self._settings.election,
            self.leadership,
            lead=self._lead,
            follow=self._follow,
            wall=lambda: datetime.now(UTC),
            random=random.random,
        )
        self._election = asyncio.create_task(self._elector.run(), name="election")

    def _lead(self, again: bool) -> None:
        """Begin to lead: open the queue and the watches of workers, and wake every object, first those with unobserved changes.

        `again`: nobody else led meanwhile, so what is remembered of the objects still holds.
        """
        if self.runtime is None:
            return
        if not again:
            self.runtime.forget_all()
        if self.watches is not None:
            self.watches.start()
        settings, measured = self._settings, metrics.measured(self._reconcile, time.monotonic)
        self.queue = KeyedQueue(measured, resync_s=settings.resync_s, parallel=settings.parallel_reconciles, random=random.random)
        if any(one.refusal for one in self.listings):
            self._scope_refused()
        for kind in DECLARED_KINDS:
            for manifest in self._store.manifests(kind, ""):
                self.wake(Key(kind.kind, manifest["metadata"]["namespace"], manifest["metadata"]["name"]), first=not _looked_at(manifest))

    def _scope_refused(self) -> None:
        """Report the namespaces that are set aside, if this process leads; else it does so when it begins to."""
        if self.runtime is not None and self.queue is not None:
            telling = asyncio.create_task(tell_refusals(self.runtime, self._settings.election, self.listings), name="refusals")
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)

    async def _follow(self) -> None:
        """End all passes, watches of workers and calls, and show no more objects in the metrics.

        The memory of objects stays for the case that nobody else leads.
        """
        queue, self.queue = self.queue, None
        if queue is not None:
            await queue.close()
        await self._call_nobody()
        if self.runtime is not None:
            self.runtime.show_nothing()

    async def _call_nobody(self) -> None:
        """Close the watches of workers, and give up the calls that are under way."""
        if self.watches is not None and self.calls is not None:
            await self.watches.stop()
            await self.calls.close()

    async def _list_first(self) -> None:
        """List all scopes once. A named namespace that is gone answers 403, and is set aside while the others are served.

        Raises the refusal if all are refused, and any other error of the cluster.
        """
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
        """End the passes, after up to 5 s of patience, and all tasks; then give the Lease up and close all connections.

        Another process can lead at once.
        """
        if self.queue is not None:
            await self.queue.close(patience_s=PATIENCE_S)
        await self._call_nobody()
        tasks = [*self._tasks, *self._telling, *filter(None, (self._election,))]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._elector is not None:
            await self._elector.release()
        for collector in self._collectors:
            metrics.REGISTRY.unregister(collector)
        if self._workers is not None:
            await self._workers.close()
        if self._cluster is not None:
            await self._cluster.__aexit__(None, None, None)

    async def probe(self, **_: Any) -> dict[str, int]:
        """Return the seconds that each watch has been stalled.

        Raises WatchStale if one is stalled for longer than `watch_dead_s`, or if a task of the process has ended.
        """
        if ended := [task.get_name() for task in self._tasks if task.done()]:
            raise WatchStale(f"a task that must not end has ended: {', '.join(ended)}")
        stalled = {str(one.scope): round(one.stalled_s) for one in self.listings}
        stale = {name: seconds for name, seconds in stalled.items() if seconds > self._settings.watch_dead_s}
        if stale:
            unheard = (
                f"a listing found changes of {name} {seconds} s ago that their watch has not reported" for name, seconds in stale.items()
            )
            raise WatchStale("; ".join(unheard))
        return stalled

    def wake(self, key: Key, *, first: bool = False) -> None:
        """Queue an object for a pass; with `first`, before those that were queued without it.

        Do nothing while this process does not lead.
        """
        if self.queue is not None:
            self.queue.wake(key, first=first)

    async def _reconcile(self, key: Key) -> Result:
        if self.runtime is None:  # the queue exists only after it
            return Result(gone=True)
        return await reconcile(self.runtime, key)

    def event_handler(self, kind: Kind) -> Callable[..., Awaitable[None]]:
        """Build kopf's handler for a kind: it puts the object into the store, or removes it there."""

        async def take_event(event: kopf.RawEvent, **_: Any) -> None:
            manifest = dict(event["object"])
            for listing in self.listings:
                if listing.scope.kind == kind and listing.scope.namespace in ("", manifest["metadata"]["namespace"]):
                    listing.record_event()
            take = self._store.remove if event["type"] == "DELETED" else self._store.put
            # kopf keeps the event in context variables. The timers and tasks that follow would inherit them, and pass them on for ever.
            Context().run(take, kind, manifest)

        return take_event

    def _changed(self, kind: Kind, manifest: Manifest) -> None:
        """Wake every key that a changed object concerns; objects that users declare go into the first lane.

        An adapter wakes two keys: its own, under which its status is written, and its deployment's, which does all else. A child wakes its
        deployments, and a pod also informs the watches of workers. Before there is a runtime, children wake nothing.
        """
        namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        if kind == DEPLOYMENT:
            self.wake(deployment_key(namespace, name), first=True)
        elif kind == ADAPTER:
            self.wake(adapter_key(namespace, name), first=True)
            if deployment := deployment_named(manifest):
                self.wake(deployment_key(namespace, deployment), first=True)
        elif self.runtime is not None:
            for deployment in _deployments(manifest):
                self.runtime.child_changed(namespace, deployment, kind.kind, name)
                if kind == POD and self.watches is not None:
                    self.watches.see_pod(namespace, deployment, manifest, gone=self._store.get(POD, namespace, name) is None)

    def _answered(self, kind: Kind, manifest: Manifest) -> None:
        """Handle the answer to our own write, whose event will repeat it. A changed pod is looked at again; an applied object is already in
        its desired state."""
        if kind in WATCHED:
            self._store.learn(kind, manifest)
        if kind == POD:
            for deployment in _deployments(manifest):
                self.wake(deployment_key(manifest["metadata"]["namespace"], deployment))


def _looked_at(manifest: Manifest) -> bool:
    return bool(manifest.get("status", {}).get("observedGeneration") == manifest["metadata"].get("generation"))


def _deployments(child: Manifest) -> set[str]:
    """List the deployments that a child names, in its label or its owner references.

    Two names are possible, because somebody may have edited either; an unrelated object gives none.
    """
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
    """Connect kopf to the API server.

    In a pod the address is taken from environment variables, so this works without DNS. Outside a pod the kubeconfig is used.
    """
    in_cluster = "KUBERNETES_SERVICE_HOST" in os.environ
    return kopf.login_via_client(**context) if in_cluster else kopf.login_with_kubeconfig(**context)


def build_registry(process: Process) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry, id="login")(login)
    # Permanent: a process that cannot start exits with the reason, and its supervisor restarts it.
    kopf.on.startup(registry=registry, id="start", errors=kopf.ErrorsMode.PERMANENT)(process.begin)
    kopf.on.cleanup(registry=registry, id="stop")(process.stop)
    kopf.on.probe(registry=registry, id="watches", errors=kopf.ErrorsMode.PERMANENT)(process.probe)
    for kind in DECLARED_KINDS:
        group, version = kind.group_and_version
        kopf.on.event(group, version, kind.plural, registry=registry, id=kind.plural)(process.event_handler(kind))
    return registry


def build_kopf_settings() -> kopf.OperatorSettings:
    """Return kopf's settings: a watch that is silent for 70 s is opened again, and kopf writes no finalizer, annotation or Event."""
    result = kopf.OperatorSettings()
    result.networking.connect_timeout = 10
    result.networking.request_timeout = 60
    result.networking.error_backoffs = EndlessBackoffs()  # kopf begins it again for each request
    result.watching.server_timeout = 600
    result.watching.client_timeout = 660
    result.watching.inactivity_timeout = 70  # the API server sends a bookmark about once a minute
    result.watching.chunk_size = PAGE
    # Each object with news has a task, which keeps the last event until it ends; handlers take no time here.
    result.queueing.idle_timeout = 0.2
    result.persistence.finalizer = f"{GROUP}/operator"  # none is ever set in this shape
    result.persistence.progress_storage = NoProgress()
    result.persistence.diffbase_storage = NoDiffBase()
    result.posting.enabled = False
    result.peering.standalone = True
    result.scanning.disabled = True  # our kinds are there before us, so no right to list CRDs or namespaces is needed
    result.process.ultimate_exiting_timeout = 20
    return result


async def require_kinds(cluster: KubernetesCluster) -> None:
    """Wait until every field of a status is in the published kinds, for about ten seconds.

    Raises KindsOutdated with the missing fields after that.
    """
    for _ in range(int(PUBLISHED_WITHIN_S / LOOK_AGAIN_S)):
        missing = missing_fields(await cluster.published_kinds())
        if not missing:
            return
        log.info("waiting for newer kinds missing=%s", ", ".join(missing))
        await asyncio.sleep(LOOK_AGAIN_S)
    crds = " and ".join(f"{kind.plural}.{GROUP}" for kind in (DEPLOYMENT, ADAPTER))
    raise KindsOutdated(
        f"the CustomResourceDefinitions {crds} are older than this operator: expected fields that they lack, {', '.join(missing)}. "
        "Apply those of this version (docs/install.md, Upgrade)"
    )
