# SPDX-License-Identifier: Apache-2.0
"""The operator once it has a cluster: `Connected` lists, watches and follows all the time; `Leading` acts while this process leads."""

import asyncio
import logging
import random
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any

from diffusion_operator import metrics
from diffusion_operator.api.meta import ObjectMeta
from diffusion_operator.api.names import ADAPTER, DEPLOYMENT, FIELD_MANAGER, GROUP, LABEL_DEPLOYMENT, LABEL_MANAGED_BY, POD, Kind
from diffusion_operator.api.published_schema import missing_fields
from diffusion_operator.cluster import KubernetesCluster, Manifest
from diffusion_operator.election.elector import Elector
from diffusion_operator.election.gated import GatedCluster, GatedWorkers
from diffusion_operator.election.leadership import Leadership
from diffusion_operator.errors import ClusterRefused, KindsOutdated, NotLeading, OperatorError, WatchStale
from diffusion_operator.plan.results.events import EventType, PlannedEvent
from diffusion_operator.reconcile.dispatch import reconcile
from diffusion_operator.reconcile.keyed_queue import Key, KeyedQueue, Result
from diffusion_operator.reconcile.report import report
from diffusion_operator.reconcile.runtime import Runtime, adapter_key, deployment_key
from diffusion_operator.reconcile.store.child_watch import ChildWatch
from diffusion_operator.reconcile.store.listing import Listing, Scope
from diffusion_operator.reconcile.store.object_store import ObjectStore
from diffusion_operator.reconcile.store.parsing import deployment_named
from diffusion_operator.reconcile.store.watched_cluster import CHILD_KINDS, DECLARED_KINDS, WATCHED, WatchedCluster
from diffusion_operator.reconcile.workers.calls import WorkerCalls
from diffusion_operator.reconcile.workers.watches import WorkerWatches
from diffusion_operator.settings import ElectionSettings, Settings
from diffusion_operator.worker_client import HttpWorkerClient

PUBLISHED_WITHIN_S = 10.0
"""The API server publishes a changed kind a moment after it takes it."""
LOOK_AGAIN_S = 1.0

FORBIDDEN = 403
NAMESPACE_REFUSED = "NamespaceRefused"
PATIENCE_S = 5.0
"""For the passes that run when SIGTERM comes. The Lease is kept meanwhile."""

log = logging.getLogger(__name__)


class Leading:
    """The queue of passes, the watches of workers and the calls to them: what runs only while this process leads."""

    def __init__(self, runtime: Runtime, watches: WorkerWatches, calls: WorkerCalls) -> None:
        async def reconcile_one(key: Key) -> Result:
            return await reconcile(runtime, key)

        self._watches, self._calls = watches, calls
        watches.start()
        settings, measured = runtime.settings, metrics.measured(reconcile_one, time.monotonic)
        self.queue = KeyedQueue(measured, resync_s=settings.resync_s, parallel=settings.parallel_reconciles, random=random.random)

    async def close(self, *, patience_s: float = 0.0) -> None:
        """End the passes after so many seconds of patience; then close the watches, and give up the calls that are under way."""
        await self.queue.close(patience_s=patience_s)
        await self._watches.stop()
        await self._calls.close()


class Connected:
    """The store with its listings and watches, the memory of objects, and the election. All of it lives until the process ends."""

    def __init__(self, settings: Settings, cluster: KubernetesCluster) -> None:
        self._settings = settings
        self._cluster = cluster
        self._store = ObjectStore(self._changed)
        self._ends = AsyncExitStack()
        """The ends of all parts, in the order in which they began."""
        self._ends.push_async_callback(cluster.__aexit__, None, None, None)
        self._tasks: list[asyncio.Task[None]] = []
        self._telling: set[asyncio.Task[None]] = set()
        self.leading: Leading | None = None
        """There while this process leads."""
        self.leadership = Leadership() if settings.election is not None else Leadership.for_ever()
        self.listings = tuple(
            Listing(cluster, self._store, scope, clock=time.monotonic, refused=self._scope_refused) for scope in _scopes(settings)
        )
        workers = HttpWorkerClient(
            poll_timeout_s=settings.poll_timeout_s, call_timeout_s=settings.call_timeout_s, epoch=lambda: self.leadership.epoch
        )
        self._ends.push_async_callback(workers.close)
        self.runtime = Runtime(
            cluster=GatedCluster(WatchedCluster(cluster, self._store), self.leadership),
            workers=GatedWorkers(workers, self.leadership),
            settings=settings,
            clock=lambda: datetime.now(UTC),
            wake=self.wake,
            meter=metrics.METER,
        )
        self._watches = self.runtime.watches = WorkerWatches(self.runtime, random=random.random, monotonic=time.monotonic)
        self._calls = self.runtime.calls = WorkerCalls(self.runtime)

    async def start(self) -> None:
        """List all objects once, and start the watches and the election; without an election this process leads at once.

        Raises:
            OperatorError: the CRDs are missing or outdated, the cluster cannot be listed, or all named namespaces refuse it.
        """
        await self._list_first()
        await require_kinds(self._cluster)
        for collector in metrics.register(self.runtime, self._queue, self.listings, self.leadership):
            self._ends.callback(metrics.REGISTRY.unregister, collector)
        elector = self._elector()
        if elector is not None:
            self._ends.push_async_callback(elector.release)
        self._ends.push_async_callback(self._end_tasks)
        for one in self.listings:
            self._begin(f"listing {one.scope}", one.run(self._settings.resync_s))
            if one.scope.kind in CHILD_KINDS:
                watch = ChildWatch(self._cluster, self._store, one, random=random.random, monotonic=time.monotonic)
                self._begin(f"watch of {one.scope}", watch.run())
        if elector is not None:
            self._begin("election", elector.run())
        else:
            log.warning(
                "no election: no --lease-namespace, --lease-name and --identity; a second operator beside this one would undo its writes"
            )
            self._lead(again=False)

    def _elector(self) -> Elector | None:
        if self._settings.election is None:
            return None
        return Elector(
            self._cluster,
            self._settings.election,
            self.leadership,
            lead=self._lead,
            follow=self._follow,
            wall=lambda: datetime.now(UTC),
            random=random.random,
        )

    async def close(self) -> None:
        """End the passes, after up to 5 s of patience, and all tasks; then give the Lease up and close all connections.

        Another process can lead at once.
        """
        if self.leading is not None:
            await self.leading.close(patience_s=PATIENCE_S)
        await self._ends.aclose()

    def _queue(self) -> KeyedQueue | None:
        return self.leading.queue if self.leading is not None else None

    def _begin(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work, name=name))

    async def _end_tasks(self) -> None:
        tasks = [*self._tasks, *self._telling]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _lead(self, again: bool) -> None:
        """Begin to lead, and wake every object, first those with unobserved changes.

        `again`: nobody else led meanwhile, so what is remembered of the objects still holds.
        """
        if not again:
            self.runtime.forget_all()
        self.leading = Leading(self.runtime, self._watches, self._calls)
        if any(one.refusal for one in self.listings):
            self._scope_refused()
        for kind in DECLARED_KINDS:
            for manifest in self._store.manifests(kind, ""):
                self.wake(Key(kind.kind, manifest["metadata"]["namespace"], manifest["metadata"]["name"]), first=not _looked_at(manifest))

    async def _follow(self) -> None:
        """End all passes, watches of workers and calls, and show no more objects in the metrics.

        The memory of objects stays for the case that nobody else leads.
        """
        leading, self.leading = self.leading, None
        if leading is not None:
            await leading.close()
        self.runtime.show_nothing()

    def _scope_refused(self) -> None:
        """Report the namespaces that are set aside, if this process leads; else it does so when it begins to."""
        if self.leading is not None:
            telling = asyncio.create_task(tell_refusals(self.runtime, self._settings.election, self.listings), name="refusals")
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)

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

    def stalled(self) -> dict[str, int]:
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
        if self.leading is not None:
            self.leading.queue.wake(key, first=first)

    def take(self, kind: Kind, manifest: Manifest, *, deleted: bool) -> None:
        """Put an object of an event into the store, or remove it there."""
        for listing in self.listings:
            if listing.scope.kind == kind and listing.scope.namespace in ("", manifest["metadata"]["namespace"]):
                listing.record_event()
        (self._store.remove if deleted else self._store.put)(kind, manifest)

    def _changed(self, kind: Kind, manifest: Manifest) -> None:
        """Wake every key that a changed object concerns; objects that users declare go into the first lane.

        An adapter wakes two keys: its own, under which its status is written, and its deployment's, which does all else. A child wakes its
        deployments, and a pod also informs the watches of workers.
        """
        namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        if kind == DEPLOYMENT:
            self.wake(deployment_key(namespace, name), first=True)
        elif kind == ADAPTER:
            self.wake(adapter_key(namespace, name), first=True)
            if deployment := deployment_named(manifest):
                self.wake(deployment_key(namespace, deployment), first=True)
        else:
            for deployment in _deployments(manifest):
                self.runtime.child_changed(namespace, deployment, kind.kind, name)
                if kind == POD:
                    self._watches.see_pod(namespace, deployment, manifest, gone=self._store.get(POD, namespace, name) is None)

    def answered(self, kind: Kind, manifest: Manifest) -> None:
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


async def tell_refusals(runtime: Runtime, election: ElectionSettings | None, listings: Sequence[Listing]) -> None:
    """Report each namespace that cannot be listed, in an Event about this process's pod. Do nothing without an election.

    No OperatorError is raised: the metric, the alert and the log say it too.
    """
    if election is None or "_" not in election.identity:
        return
    name, _, uid = election.identity.partition("_")
    own_pod = ObjectMeta(name=name, namespace=election.namespace, uid=uid, creation_timestamp=runtime.now())
    try:
        await report(runtime, tuple(_refusals(runtime, listings)), kind=POD, about=own_pod)
    except NotLeading:
        return  # the process that leads next reports them
    except OperatorError as error:
        log.warning("Event not written reason=%s error=%s", NAMESPACE_REFUSED, error)


def _refusals(runtime: Runtime, listings: Sequence[Listing]) -> Iterator[PlannedEvent]:
    """Yield an Event for each namespace that is set aside; it is the same Event within an hour."""
    for namespace in sorted({one.scope.namespace for one in listings if one.refusal}):
        error = next(one.refusal for one in listings if one.refusal and one.scope.namespace == namespace)
        message = (
            f"the operator cannot list objects in namespace {namespace} and tries again every 30 s; other namespaces are served: {error}"
        )
        key = f"{namespace}-{runtime.now():%Y-%m-%dT%H}"
        yield PlannedEvent(type=EventType.WARNING, reason=NAMESPACE_REFUSED, message=message[:1000], key=key)


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
