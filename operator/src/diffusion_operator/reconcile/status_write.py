# SPDX-License-Identifier: Apache-2.0
"""Writing a status: only if it says something new, what only counts at most every five seconds, and what requests change every fifteen."""

from datetime import datetime, timedelta
from typing import Any

import msgspec

from diffusion_operator.api.deployment_status import DeploymentStatus

PROGRESS_INTERVAL = timedelta(seconds=5)
TRAFFIC_INTERVAL = timedelta(seconds=15)


def worth_writing(old: DeploymentStatus, new: DeploymentStatus, *, last: datetime | None, now: datetime) -> bool:
    if old == new:
        return False
    if last is None or now - last >= TRAFFIC_INTERVAL:
        return True
    calm_old, calm_new = _without_traffic(old), _without_traffic(new)
    if _without_progress(calm_old) != _without_progress(calm_new):
        return True
    return calm_old != calm_new and now - last >= PROGRESS_INTERVAL


def encode_status(status: msgspec.Struct) -> dict[str, Any]:
    encoded: dict[str, Any] = msgspec.to_builtins(status)
    return encoded


def _without_traffic(status: DeploymentStatus) -> DeploymentStatus:
    return msgspec.structs.replace(status, held=None, last_request_time=None, sleep_eligible_time=None)


def _without_progress(status: DeploymentStatus) -> DeploymentStatus:
    """Stage and presence count, bytes do not; nor how many of many adapters are there by now."""
    groups = tuple(
        msgspec.structs.replace(group, load=msgspec.structs.replace(group.load, bytes_done=None, bytes_total=None, percent=None))
        if group.load is not None
        else group
        for group in status.replica_states
    )
    conditions = tuple(
        msgspec.structs.replace(condition, message="") if (condition.type, condition.reason) == ("AdaptersReady", "Loading") else condition
        for condition in status.conditions
    )
    return msgspec.structs.replace(status, replica_states=groups, conditions=conditions, adapters=None)
