# SPDX-License-Identifier: Apache-2.0
"""Who used an adapter, from what its replicas count: coarse, and without an object's status changing with every request."""

from collections.abc import Iterable
from datetime import datetime, timedelta

from diffusion_operator.api.adapter import UsageStatus
from diffusion_operator.api.worker_state import AdapterRecord
from diffusion_operator.plan.observed.replica_state import Group


def usage_of(name: str, groups: Iterable[Group], *, before: UsageStatus | None, now: datetime) -> UsageStatus | None:
    """None while nobody has used it. A worker tells the age of the last request, so two clocks never meet."""
    records = [record for group in groups if group.document is not None for record in group.document.named.get(name, ())]
    total = sum(record.requests_total for record in records)
    if total == 0 or (before is not None and total == before.requests_total):
        return before
    times = [_last_request(record, now) for record in records] + [before.last_request_time if before is not None else None]
    return UsageStatus(requests_total=total, last_request_time=max((when for when in times if when is not None), default=None))


def _last_request(record: AdapterRecord, now: datetime) -> datetime | None:
    age_s = record.last_request_age_seconds
    return None if age_s is None else now - timedelta(seconds=round(age_s))
