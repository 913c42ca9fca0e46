# SPDX-License-Identifier: Apache-2.0
"""Watches of the children into the store. kopf watches the two kinds that users write.

They have most of the events. kopf makes a queue and a task for each object with news, which no child needs. The event goes into the
store, and the key of its deployment is woken. Measured in docs/development/why-kopf.md.
"""

import asyncio
import logging
from collections.abc import Callable

from diffusion_operator.cluster import KubernetesCluster
from diffusion_operator.errors import ClusterError
from diffusion_operator.pauses import Backoff
from diffusion_operator.reconcile.store.listing import Listing
from diffusion_operator.reconcile.store.object_store import ObjectStore
from diffusion_operator.watch_stream import Event

REOPEN_S = 0.1
"""Before the next watch, after one that has lived."""
REOPEN = Backoff(first_s=1.0, longest_s=30.0)
"""Pauses grow up to it while watches end soon or cannot be opened."""
LIVED_S = 30.0
"""A watch that ends sooner counts as a failure, though it could be opened."""

log = logging.getLogger(__name__)


class ChildWatch:
    """A watch of one kind of children into the store.

    It goes on where the scope's listing ended, and lists again where that place is lost.
    """

    def __init__(
        self,
        cluster: KubernetesCluster,
        store: ObjectStore,
        listing: Listing,
        *,
        random: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        """`random` gives numbers in [0, 1); `monotonic` counts seconds from anywhere."""
        self._cluster = cluster
        self._store = store
        self._listing = listing
        self._random = random
        self._monotonic = monotonic
        self._failures = 0
        """Watches in a row that did not live."""
        self._opened_at: float | None = None
        """None while the last one could not be opened."""
        self._version = ""
        """Everything up to it is in the store. Empty: nobody knows, so a listing is due."""

    async def run(self) -> None:
        """Watch for ever, whatever the API server answers."""
        self._version = self._listing.version
        while True:
            asked_s, self._opened_at = 0.0, None
            try:
                await self._once()
                self._count()
            except ClusterError as error:
                asked_s = error.retry_after_s
                self._count()
                self._note(error)
            await asyncio.sleep(max(asked_s, self._pause_s))

    @property
    def _pause_s(self) -> float:
        if not self._failures:
            return REOPEN_S
        return REOPEN.jittered_s(self._failures, self._random)

    async def _once(self) -> None:
        """Follow one watch to its end, which the API server sets at some minutes."""
        listed = not self._version
        if listed:
            await self._listing.list()
            self._version = self._listing.version
        scope = self._listing.scope
        async with self._cluster.watch(scope.kind, scope.namespace, labels=scope.labels, since=self._version) as events:
            self._opened_at = self._monotonic()
            if listed:
                self._listing.record_event()  # the listing brought all that a watch before it missed
            async for event in events:
                if event.type != "BOOKMARK":
                    self._listing.record_event()
                    self._take(event)
                self._version = event.object["metadata"]["resourceVersion"]

    def _take(self, event: Event) -> None:
        take = self._store.remove if event.type == "DELETED" else self._store.put
        try:
            take(self._listing.scope.kind, event.object)
        except Exception:  # a strange object must not end the watch of its kind
            name = event.object["metadata"].get("name")
            log.exception("a change from a watch could not be taken, and is left out kind=%s object=%s", self._listing.scope, name)

    def _count(self) -> None:
        """Count a failure; after a watch that has lived, forget all of them instead, even where it broke in the end."""
        lived = self._opened_at is not None and self._monotonic() - self._opened_at >= LIVED_S
        self._failures = 0 if lived else self._failures + 1

    def _note(self, error: ClusterError) -> None:
        """Log the error, and give the place up where it may be lost, so that a listing comes next.

        After one lost connection it holds. If the next watch cannot be opened either, the API server's store may be another one.
        """
        log.info("watch ended kind=%s failures=%d error=%s", self._listing.scope, self._failures, error)
        if error.status or (self._opened_at is None and self._failures > 1):
            self._version = ""
