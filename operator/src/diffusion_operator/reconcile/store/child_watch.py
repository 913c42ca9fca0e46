# SPDX-License-Identifier: Apache-2.0
"""Watches of the children into the store. kopf watches the two kinds that users write.

They have most of the events. kopf makes a queue and a task for each object with news, which no child needs. The event goes into the
store, and the key of its deployment is woken. Measured in docs/development/why-kopf.md.
"""

import asyncio
import logging

from diffusion_operator.cluster import KubernetesCluster
from diffusion_operator.errors import ClusterError
from diffusion_operator.reconcile.store.listing import Listing
from diffusion_operator.reconcile.store.object_store import ObjectStore
from diffusion_operator.watch_stream import Event

PAUSES_S = (0.1, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Before a watch is opened again, by the tries that failed since one was open."""

log = logging.getLogger(__name__)


class ChildWatch:
    """Goes on where the scope's listing ended, and lists again where that place is lost."""

    def __init__(self, cluster: KubernetesCluster, store: ObjectStore, listing: Listing) -> None:
        self._cluster = cluster
        self._store = store
        self._listing = listing
        self._failures = 0
        self._version = ""
        """Everything up to it is in the store. Empty: nobody knows, so a listing is due."""

    async def run(self) -> None:
        """Watch for ever, whatever the API server answers."""
        self._version = self._listing.version
        while True:
            pause_s = 0.0
            try:
                await self._once()
            except ClusterError as error:
                pause_s = error.retry_after_s
                self._note(error)
            await asyncio.sleep(max(pause_s, PAUSES_S[min(self._failures, len(PAUSES_S) - 1)]))

    async def _once(self) -> None:
        """Follow one watch to its end, which the API server sets at some minutes."""
        listed = not self._version
        if listed:
            await self._listing.list()
            self._version = self._listing.version
        scope = self._listing.scope
        async with self._cluster.watch(scope.kind, scope.namespace, labels=scope.labels, since=self._version) as events:
            self._failures = 0
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
            log.exception("event not understood kind=%s object=%s", self._listing.scope, event.object["metadata"].get("name"))

    def _note(self, error: ClusterError) -> None:
        """Count a failure, and give the place up where it may be lost.

        After one lost connection it holds. After more, the API server's store may be another one.
        """
        self._failures += 1
        log.info("watch ended kind=%s failures=%d error=%s", self._listing.scope, self._failures, error)
        if error.status or self._failures > 1:
            self._version = ""
