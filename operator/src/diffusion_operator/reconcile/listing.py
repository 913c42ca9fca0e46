# SPDX-License-Identifier: Apache-2.0
"""Everything into the store: before the first pass, and then now and again, for what kopf's watches did not tell.

kopf opens a watch anew where nothing comes, not even a bookmark, and goes on where it was; but where the API server has forgotten what
happened since, it names only what is there: what has gone meanwhile nobody hears of. And a watch that is dead for good would not be
noticed at all: what a listing finds that should have been told shows it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping

import msgspec

from diffusion_operator.api.names import Kind
from diffusion_operator.cluster import KubernetesCluster
from diffusion_operator.errors import OperatorError
from diffusion_operator.reconcile.object_store import ObjectStore

log = logging.getLogger(__name__)


class Scope(msgspec.Struct, frozen=True):
    kind: Kind
    namespace: str
    """Empty: all of them."""
    labels: Mapping[str, str] = {}

    def __str__(self) -> str:
        return f"{self.kind.plural} in {self.namespace or 'all namespaces'}"


class Listing:
    """One kind in one namespace, or in all."""

    def __init__(self, cluster: KubernetesCluster, store: ObjectStore, scope: Scope, *, clock: Callable[[], float]) -> None:
        """`clock` counts seconds from anywhere."""
        self._cluster = cluster
        self._store = store
        self._clock = clock
        self._deaf_since: float | None = None
        self._told = 0
        self.scope = scope

    @property
    def deaf_s(self) -> float:
        """Since a listing found what the watch should have told, and the watch told nothing at all; 0 where it is well."""
        return 0.0 if self._deaf_since is None else self._clock() - self._deaf_since

    def heard(self) -> None:
        """The watch told something."""
        self._told += 1
        self._deaf_since = None

    async def list(self) -> bool:
        """Everything, into the store; gives whether there was news."""
        kind, namespace = self.scope.kind, self.scope.namespace
        before, seen, version, news = self._store.places(kind, namespace), set(), "", False
        async for page in self._cluster.pages(kind, namespace, labels=self.scope.labels):
            for manifest in page.items:
                seen.add(manifest["metadata"]["uid"])
                news = self._store.put(kind, manifest) or news
            version = page.version
        return self._store.keep_only(kind, before, seen, version=version) or news

    async def run(self, every_s: float) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(every_s)
            told = self._told
            try:
                news = await self.list()
            except OperatorError as error:
                log.warning("listing failed kind=%s error=%s", self.scope, error)
                continue
            if news and self._deaf_since is None and told == self._told:  # else both told it, the listing a moment earlier
                self._deaf_since = self._clock()  # the watch may be a moment late, and then tells it
