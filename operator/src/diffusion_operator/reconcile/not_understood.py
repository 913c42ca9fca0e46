# SPDX-License-Identifier: Apache-2.0
"""Objects that cannot be read, as those stored before a stricter schema: the status and an Event say which field is wrong.

Nothing else is done for such an object, and nothing is undone. A deletion of it needs no reading.
"""

import logging
from typing import Any

import msgspec

from diffusion_operator.api.meta import Condition, ObjectMeta, Verdict, settle_conditions
from diffusion_operator.api.names import DEPLOYMENT, KINDS
from diffusion_operator.plan.results.events import EventType, PlannedEvent
from diffusion_operator.reconcile.backoff import Backoffs
from diffusion_operator.reconcile.keyed_queue import Key, Result
from diffusion_operator.reconcile.runtime import Runtime
from diffusion_operator.reconcile.status_write import write_status

log = logging.getLogger(__name__)


async def tell_not_understood(runtime: Runtime, key: Key, manifest: dict[str, Any], verdicts: tuple[Verdict, ...]) -> Result:
    """Write `verdicts`, Ready first, into the object's status and leave all else of that."""
    ready = verdicts[0]
    status = manifest.get("status") or {}
    metadata = msgspec.convert(manifest["metadata"], ObjectMeta)
    backoffs = _backoffs(runtime, key, metadata)
    backoffs.see(metadata.generation)
    if runtime.ready_reasons.get(key) != ready.reason:
        log.warning("an object is not understood and left alone object=%s error=%s", key, ready.message)
    before = _known(status.get("conditions"))
    after = settle_conditions(verdicts, previous=before, generation=metadata.generation, now=runtime.now())
    runtime.show(key, after)
    if all(one in before for one in after):
        return Result()
    others = [one for one in status.get("conditions", ()) if one.get("type") not in [each.type for each in verdicts]]
    event = PlannedEvent(
        type=EventType.WARNING, reason=ready.reason, message=ready.message[:1000], key=f"{metadata.generation}-{ready.message}"
    )
    kind, version = KINDS[key.kind], manifest["metadata"]["resourceVersion"]
    told = status | {"conditions": [*msgspec.to_builtins(after), *others]}
    await write_status(runtime, backoffs, kind, metadata, version=version, events=(event,), status=told)
    return Result(requeue_after_s=backoffs.next_s(runtime.now()))


def _known(conditions: object) -> tuple[Condition, ...]:
    """Read the conditions of a status; empty if they cannot be read."""
    try:
        return msgspec.convert(conditions or (), tuple[Condition, ...])
    except msgspec.ValidationError:
        return ()


def _backoffs(runtime: Runtime, key: Key, metadata: ObjectMeta) -> Backoffs:
    if key.kind == DEPLOYMENT.kind:
        return runtime.memory(metadata).backoffs
    return runtime.adapter_backoffs.setdefault(key, Backoffs())
