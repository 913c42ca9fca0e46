# SPDX-License-Identifier: Apache-2.0
"""Usage of an adapter from its replicas' counters, rounded so that the object's status does not change with every request."""

from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec

from diffusion_operator.api.adapter import UsageStatus
from diffusion_operator.api.worker_state import AdapterRecord


class Use(msgspec.Struct, frozen=True, gc=False):
    """The number of requests for an adapter on one replica, and the time of the last."""

    total: int = 0
    last: datetime | None = None


def use_of(records: Sequence[AdapterRecord], heard_at: datetime) -> Use:
    """Return the use that new records tell. A worker tells the age of the last request, so two clocks never meet."""
    times = [heard_at - timedelta(seconds=round(age_s)) for one in records if (age_s := one.last_request_age_seconds) is not None]
    return Use(total=sum(one.requests_total for one in records), last=max(times, default=None))


def usage_of(uses: Sequence[Use], *, before: UsageStatus | None) -> UsageStatus | None:
    """Sum up an adapter's use on all replicas. Return `before` if the sum is 0 or the same; None while nobody has used it."""
    total = sum(one.total for one in uses)
    if total == 0 or (before is not None and total == before.requests_total):
        return before
    times = [one.last for one in uses] + [before.last_request_time if before is not None else None]
    return UsageStatus(requests_total=total, last_request_time=max((when for when in times if when is not None), default=None))
