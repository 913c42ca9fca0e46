# SPDX-License-Identifier: Apache-2.0
"""The only module that knows kopf (with __main__, which starts it). Every handler does one thing: take what a watch tells into the store.

Only `on.event` handlers: kopf then keeps no annotation and no finalizer on any object, and a deletion never waits for us.
"""

import itertools
import os
from collections.abc import Awaitable, Callable, Iterator
from contextvars import Context
from typing import Any

import kopf

from diffusion_operator import watch_stream
from diffusion_operator.api.names import GROUP, Kind
from diffusion_operator.cluster import PAGE, Manifest, connect
from diffusion_operator.connected import Connected
from diffusion_operator.errors import OperatorError
from diffusion_operator.kopf_storage import NoDiffBase, NoProgress
from diffusion_operator.reconcile.store.watched_cluster import DECLARED_KINDS
from diffusion_operator.settings import Settings

BACKOFFS_S = (1, 1, 2, 4, 8, 16, 30)


class EndlessBackoffs:
    """Pauses between the tries of a request that the API server refuses; the last is repeated for ever.

    After a finite list kopf ends the whole operator, as for the watch of one deleted namespace.
    """

    def __iter__(self) -> Iterator[float]:
        return itertools.chain(BACKOFFS_S, itertools.repeat(BACKOFFS_S[-1]))


class Process:
    """The operator as kopf sees it: a start, an end, a probe, and a handler of events for each kind that users declare."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.failure = ""
        """The error for which it did not start. Empty where it did."""
        self.connected: Connected | None = None
        """There from the start on."""

    async def begin(self, **_: Any) -> None:
        """Connect and start. Turn an OperatorError into a kopf.PermanentError of one sentence, without a traceback, and keep it in
        `failure`."""
        try:
            self.connected = Connected(self._settings, await connect(self._answered))
            await self.connected.start()
        except OperatorError as error:
            self.failure = str(error)
            raise kopf.PermanentError(self.failure) from None

    async def stop(self, **_: Any) -> None:
        """End what `begin` began."""
        if self.connected is not None:
            await self.connected.close()

    async def probe(self, **_: Any) -> dict[str, int]:
        """Return the seconds that each watch has been stalled, none before the start; raise WatchStale where a new process would help."""
        return self.connected.stalled() if self.connected is not None else {}

    def event_handler(self, kind: Kind) -> Callable[..., Awaitable[None]]:
        """Build kopf's handler for a kind: it puts the object into the store, or removes it there."""

        async def take_event(event: kopf.RawEvent, **_: Any) -> None:
            if self.connected is not None:
                deleted = event["type"] == "DELETED"
                # kopf keeps the event in context variables. The timers and tasks that follow would inherit them, and pass them on for ever.
                Context().run(self.connected.take, kind, dict(event["object"]), deleted=deleted)

        return take_event

    def _answered(self, kind: Kind, manifest: Manifest) -> None:
        if self.connected is not None:
            self.connected.answered(kind, manifest)


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
    result.watching.server_timeout = watch_stream.WATCH_S
    result.watching.client_timeout = watch_stream.CLIENT_S
    result.watching.inactivity_timeout = watch_stream.SILENT_S
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
