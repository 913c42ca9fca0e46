# SPDX-License-Identifier: Apache-2.0
"""Events to the API server. They are for people: one that cannot be written is logged and never holds a reconcile up."""

import logging
from collections.abc import Sequence

from diffusion_operator.api.meta import ObjectMeta
from diffusion_operator.api.names import Kind
from diffusion_operator.errors import ClusterError, NamespaceEnds
from diffusion_operator.plan.results.events import PlannedEvent
from diffusion_operator.reconcile.runtime import Runtime
from diffusion_operator.render.event import event

log = logging.getLogger(__name__)


async def report(runtime: Runtime, events: Sequence[PlannedEvent], *, kind: Kind, about: ObjectMeta) -> None:
    for planned in events:
        try:
            await runtime.cluster.create(event(planned, kind=kind, about=about, now=runtime.clock()))
        except NamespaceEnds:
            return
        except ClusterError as error:
            log.warning("Event not written reason=%s object=%s/%s error=%s", planned.reason, about.namespace, about.name, error)
