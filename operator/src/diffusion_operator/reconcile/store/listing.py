# SPDX-License-Identifier: Apache-2.0
"""Listings of everything into the store: before the first pass, then every so often for changes that watches missed.

kopf reopens a watch in which nothing comes, not even a bookmark, and goes on from there. If the API server has forgotten that place,
it names only objects that still exist, so a deletion meanwhile stays unseen. A watch may also stay dead unnoticed.
A listing that finds a change which no watch reported shows both.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping

import msgspec

from diffusion_operator.api.names import Kind
from diffusion_operator.cluster import KubernetesCluster
from diffusion_operator.errors import OperatorError
from diffusion_operator.reconcile.store.object_store import ObjectStore

CATCH_UP_S = 10.0
"""From the first listing to the second. kopf opens its watches in between, and no watch tells what went before that."""
RETRY_S = 30.0
"""Between two listings of a scope that is set aside."""

log = logging.getLogger(__name__)


class Scope(msgspec.Struct, frozen=True):
    kind: Kind
    namespace: str
    """Empty: all of them."""
    labels: Mapping[str, str] = {}

    def __str__(self) -> str:
        place = f"namespace {self.namespace}" if self.namespace else "all namespaces"
        return f"{self.kind.plural} in {place}"


class Listing:
    """Listings of a kind, in one namespace or in all, into the store; they also show a watch that misses changes."""

    def __init__(
        self,
        cluster: KubernetesCluster,
        store: ObjectStore,
        scope: Scope,
        *,
        clock: Callable[[], float],
        refused: Callable[[], None] = lambda: None,
    ) -> None:
        """`clock` counts seconds from anywhere; `refused` is called when the scope is set aside."""
        self._cluster = cluster
        self._store = store
        self._clock = clock
        self._refused = refused
        self._stalled_since: float | None = None
        self._reported = 0
        self._caught_up = False
        self.scope = scope
        self.version = ""
        """Everything up to it was in the last listing that came to its end."""
        self.refusal = ""
        """The error of the last listing, for which the scope is set aside. Empty where it succeeded."""

    @property
    def stalled_s(self) -> float:
        """Seconds since a listing found a change that the watch had not reported; 0 once the watch reports something."""
        return 0.0 if self._stalled_since is None else self._clock() - self._stalled_since

    def record_event(self) -> None:
        """Note that the watch reported something."""
        self._reported += 1
        self._stalled_since = None

    def set_aside(self, error: OperatorError) -> None:
        """Go on without this scope until it can be listed again, as after a deleted namespace was made again."""
        first, self.refusal = not self.refusal, str(error)
        if first:
            log.warning("objects could not be listed, next try in 30 s kind=%s error=%s", self.scope, error)
            self._refused()

    async def list(self) -> bool:
        """List all objects of the scope into the store, and remove those that are gone; return whether there was news.

        It ends a set-aside. A failure is raised.
        """
        kind, namespace = self.scope.kind, self.scope.namespace
        before, seen, version, news = self._store.places(kind, namespace), set(), "", False
        newest = self._store.newest(kind, namespace)
        async for page in self._cluster.pages(kind, namespace, labels=self.scope.labels):
            if not version and int(page.version) < newest:
                log.warning(
                    "resourceVersion went back, as after a restore of etcd kind=%s version=%s known=%d", self.scope, page.version, newest
                )
                self._store.rewind(kind, namespace)
            for manifest in page.items:
                seen.add(manifest["metadata"]["uid"])
                news = self._store.put(kind, manifest) or news
            version = page.version
        self.version = version
        if self.refusal:
            log.info("scope listed again kind=%s", self.scope)
            self.refusal = ""
        return self._store.keep_only(kind, before, seen, version=version) or news

    async def run(self, every_s: float) -> None:
        """List again every `every_s` seconds, for ever. A scope that is set aside is tried more often.

        The second listing comes early, and what it finds says nothing about the watch.
        """
        while True:
            await asyncio.sleep(min(self._pause_s, every_s))
            reported = self._reported
            try:
                news = await self.list()
            except OperatorError as error:
                self.set_aside(error)
                continue
            # Stalled only if the watch reported nothing meanwhile.
            if news and self._caught_up and self._stalled_since is None and reported == self._reported:
                self._stalled_since = self._clock()  # a watch that is only a moment late clears this
            self._caught_up = True

    @property
    def _pause_s(self) -> float:
        if self.refusal:
            return RETRY_S
        return math.inf if self._caught_up else CATCH_UP_S
