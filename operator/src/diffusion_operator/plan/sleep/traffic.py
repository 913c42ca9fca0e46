# SPDX-License-Identifier: Apache-2.0
"""Traffic in a deployment's status: held requests, the time of the last request, and when a replica may sleep.

Workers report ages; a time in a status is the operator's clock minus an age, and moves a little between looks. A time that only moved so is
kept as it was written, so that an idle deployment's status does not change.
"""

import math
from collections.abc import Sequence
from datetime import datetime, timedelta

from diffusion_operator.api.deployment_spec import DeploymentSpec, SleepPolicy
from diffusion_operator.api.deployment_status import HeldStatus
from diffusion_operator.plan.observed.replica_state import Group
from diffusion_operator.plan.sleep.idleness import next_sleep_in_s

JITTER = timedelta(seconds=3)  # whole seconds here, and up to two that a poll takes


def held_requests(groups: Sequence[Group]) -> HeldStatus | None:
    """Sum up the held requests of all replicas, with the oldest one's age in whole seconds; None before any replica has answered."""
    held = [group.document.held for group in groups if group.document is not None]
    if not held:
        return None
    aged = [group.poll.since_s + (group.document.held.oldest_age_seconds or 0) for group in groups if group.document and group.held]
    return HeldStatus(current=sum(one.current for one in held), oldest_seconds=math.floor(max(aged)) if aged else None)


def last_request_time(groups: Sequence[Group], *, before: datetime | None, now: datetime) -> datetime | None:
    """Return the time of the last request. A new server process has none, so the earlier time stays.

    It stays too if the new time is less than 3 s later.
    """
    ages = [group.poll.request_age_s for group in groups if group.poll.fresh]
    times = [now - timedelta(seconds=round(age)) for age in ages if age is not None]
    latest = max(times, default=before)
    return before if before is not None and latest is not None and latest < before + JITTER else latest


def sleep_eligible_time(
    spec: DeploymentSpec, groups: Sequence[Group], *, rolling: bool, before: datetime | None, now: datetime
) -> datetime | None:
    """Return the time at which a replica may sleep if no request comes; a time that moved less than 3 s stays as it was.

    None without OnIdle, during a rollout (`rolling`), and if none may.
    """
    due_in_s = next_sleep_in_s(spec, groups) if spec.sleep.policy is SleepPolicy.ON_IDLE and not rolling else None
    if due_in_s is None:
        return None
    due = now + timedelta(seconds=round(due_in_s))
    return before if before is not None and abs(due - before) < JITTER else due
