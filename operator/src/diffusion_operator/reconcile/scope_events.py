# SPDX-License-Identifier: Apache-2.0
"""Events about watched namespaces that cannot be listed. They are in the operator's own namespace, and about its pod."""

import logging
from collections.abc import Iterator, Sequence

from diffusion_operator.api.meta import ObjectMeta
from diffusion_operator.api.names import POD
from diffusion_operator.errors import NotLeading, OperatorError
from diffusion_operator.plan.results.events import EventType, PlannedEvent
from diffusion_operator.reconcile.report import report
from diffusion_operator.reconcile.runtime import Runtime
from diffusion_operator.reconcile.store.listing import Listing
from diffusion_operator.settings import ElectionSettings

NAMESPACE_REFUSED = "NamespaceRefused"

log = logging.getLogger(__name__)


async def tell_refusals(runtime: Runtime, election: ElectionSettings | None, listings: Sequence[Listing]) -> None:
    """Report each namespace that is set aside, in an Event about this process's pod. Do nothing without an election.

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
