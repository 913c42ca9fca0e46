# SPDX-License-Identifier: Apache-2.0
"""Keeps one kind in the store: a whole listing, then what a watch brings from there on, as long as the process lives.

kopf's own watch would not tell what we must know: that a connection is alive though nothing happens (bookmarks), and what has gone
while it was deaf (a listing anew names only what is there). A silent watch is opened again, one that stays silent is not believed.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping

import msgspec

from diffusion_operator.api.names import Kind
from diffusion_operator.cluster import KubernetesCluster
from diffusion_operator.errors import ClusterError, ClusterUnavailable, OperatorError
from diffusion_operator.reconcile.object_store import ObjectStore

RETRY_FIRST_S = 1.0
RETRY_MAX_S = 30.0
REOPEN_S = 0.2


class Scope(msgspec.Struct, frozen=True):
    kind: Kind
    namespace: str
    """Empty: all of them."""
    labels: Mapping[str, str] = {}

    def __str__(self) -> str:
        return f"{self.kind.plural} in {self.namespace or 'all namespaces'}"


log = logging.getLogger(__name__)


class Informer:
    def __init__(
        self, cluster: KubernetesCluster, store: ObjectStore, scope: Scope, *, silence_s: float, clock: Callable[[], float]
    ) -> None:
        """`silence_s` is how long nothing may come, not even a bookmark; `clock` counts seconds from anywhere."""
        self._cluster = cluster
        self._store = store
        self._silence_s = silence_s
        self._clock = clock
        self._heard_at = clock()
        self.scope = scope

    @property
    def age_s(self) -> float:
        """Since the API server said something about the kind."""
        return self._clock() - self._heard_at

    async def list(self) -> str:
        """Everything, into the store; gives the version to watch from."""
        kind, namespace = self.scope.kind, self.scope.namespace
        before, seen, version = self._store.places(kind, namespace), set(), ""
        async for page in self._cluster.pages(kind, namespace, labels=self.scope.labels):
            for manifest in page.items:
                seen.add(manifest["metadata"]["uid"])
                self._store.put(kind, manifest)
            version = page.version
            self._heard_at = self._clock()
        self._store.keep_only(kind, before, seen)
        return version

    async def run(self, version: str) -> None:
        """For ever, from a listing's version on."""
        delay_s = RETRY_FIRST_S
        while True:
            try:
                await self._follow(version)
                delay_s = RETRY_FIRST_S
            except ClusterError as error:
                log.warning("watch broken kind=%s error=%s", self.scope, error)
            except Exception:
                log.exception("watch broken kind=%s", self.scope)
            await asyncio.sleep(delay_s)
            try:
                version = await self.list()
            except OperatorError as error:
                log.warning("listing failed kind=%s error=%s", self.scope, error)
                delay_s = min(RETRY_MAX_S, 2 * delay_s)

    async def _follow(self, version: str) -> None:
        """Until the version is too old to watch from, or two watches in a row brought nothing."""
        failed = False
        while True:
            try:
                async for event in self._cluster.watch(
                    self.scope.kind, self.scope.namespace, since=version, labels=self.scope.labels, silence_s=self._silence_s
                ):
                    if event.type == "ERROR":
                        log.info("watch begins anew kind=%s why=%s", self.scope, event.manifest.get("message"))
                        return
                    failed, self._heard_at = False, self._clock()
                    version = event.manifest["metadata"]["resourceVersion"]
                    self._take(event.type, event.manifest)
            except ClusterUnavailable:
                if failed:
                    raise
                failed = True
            await asyncio.sleep(REOPEN_S)

    def _take(self, type_: str, manifest: dict[str, object]) -> None:
        if type_ == "DELETED":
            self._store.remove(self.scope.kind, manifest)
        elif type_ in ("ADDED", "MODIFIED"):
            self._store.put(self.scope.kind, manifest)
