# SPDX-License-Identifier: Apache-2.0
"""When what is known of an adapter is worth a look at its status: at once for what it is, now and then for what only counts."""

from datetime import timedelta

import msgspec

from diffusion_operator.api.adapter import AdapterStatus
from diffusion_operator.plan.adapters.plan import AdapterView

PROGRESS_INTERVAL = timedelta(seconds=5)
PROGRESS_STEP = 0.05
USAGE_INTERVAL = timedelta(seconds=60)


def worth_publishing(old: AdapterView | None, new: AdapterView, *, since: timedelta) -> bool:
    """`since` the last time that the adapter's view was published."""
    if old is None or _without_counts(old) != _without_counts(new):
        return True
    if old.usage != new.usage and since >= USAGE_INTERVAL:
        return True
    (done_then, _), (done_now, total) = _bytes(old), _bytes(new)
    return since >= PROGRESS_INTERVAL and abs(done_now - done_then) >= max(1.0, PROGRESS_STEP * total)


def _without_counts(view: AdapterView) -> AdapterView:
    """Nor with the object's own status, which is written from views."""
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
    """Fetched and to be fetched, over all replicas."""
    return sum(one.status.fetched_bytes or 0 for one in view.instances), sum(one.status.total_bytes or 0 for one in view.instances)
