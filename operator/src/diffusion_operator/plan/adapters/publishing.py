# SPDX-License-Identifier: Apache-2.0
"""When to publish an adapter's status: changes of state at once, changes of counters only now and then."""

from datetime import timedelta
from enum import Enum

import msgspec

from diffusion_operator.api.adapter import AdapterStatus
from diffusion_operator.plan.adapters.view import AdapterView

PROGRESS_INTERVAL = timedelta(seconds=5)
PROGRESS_STEP = 0.05
USAGE_INTERVAL = timedelta(seconds=60)


class Worth(Enum):
    """Answer to when a view is worth a write of its object's status."""

    NOW = "now"
    LATER = "later"
    NEVER = "never"


def worth_publishing(old: AdapterView | None, new: AdapterView, *, since: timedelta) -> Worth:
    """Return when a view is to be published: at once if more than its counters changed, never if nothing did.

    `since` is the time since it was last published. Usage alone waits 60 s, and fetched bytes 5 s and a step of 5 %.
    """
    if old is None or _without_counts(old) != _without_counts(new):
        return Worth.NOW
    (done_then, _), (done_now, total) = _bytes(old), _bytes(new)
    if old.usage == new.usage and done_then == done_now:
        return Worth.NEVER
    used = old.usage != new.usage and since >= USAGE_INTERVAL
    fetched = since >= PROGRESS_INTERVAL and abs(done_now - done_then) >= max(1.0, PROGRESS_STEP * total)
    return Worth.NOW if used or fetched else Worth.LATER


def _without_counts(view: AdapterView) -> AdapterView:
    """Strip a view of all that is not worth publishing at once: usage, fetched bytes, and the status in the adapter object.

    The operator writes that status from views, so it is no news.
    """
    adapter = msgspec.structs.replace(view.decision.adapter, status=AdapterStatus())
    instances = tuple(
        msgspec.structs.replace(
            one,
            status=msgspec.structs.replace(one.status, fetched_bytes=None),
            record=msgspec.structs.replace(one.record, fetched_bytes=None) if one.record is not None else None,
        )
        for one in view.instances
    )
    decision = msgspec.structs.replace(view.decision, adapter=adapter)
    return msgspec.structs.replace(view, decision=decision, instances=instances, usage=None)


def _bytes(view: AdapterView) -> tuple[int, int]:
    """Return bytes fetched and bytes in total, over all replicas."""
    return sum(one.status.fetched_bytes or 0 for one in view.instances), sum(one.status.total_bytes or 0 for one in view.instances)
