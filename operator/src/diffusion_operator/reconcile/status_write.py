# SPDX-License-Identifier: Apache-2.0
"""Writing a status: only if it says something new, what only counts at most every five seconds, and what requests change once a minute."""

import logging
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from diffusion_operator.api.deployment_status import DeploymentStatus
from diffusion_operator.api.meta import ObjectMeta
from diffusion_operator.api.names import Kind
from diffusion_operator.errors import ClusterConflict, ClusterError, NamespaceEnds
from diffusion_operator.plan.results.events import PlannedEvent
from diffusion_operator.reconcile.backoff import Backoffs
from diffusion_operator.reconcile.report import report
from diffusion_operator.reconcile.runtime import Runtime

STATUS = "status"

log = logging.getLogger(__name__)

PROGRESS_INTERVAL = timedelta(seconds=5)
TRAFFIC_INTERVAL = timedelta(seconds=60)
EVER = datetime.min


def worth_writing(old: DeploymentStatus, new: DeploymentStatus, *, last: datetime | None, now: datetime) -> bool:
    return old != new and write_due_s(old, new, last=last, now=now) <= 0


def write_due_s(old: DeploymentStatus, new: DeploymentStatus, *, last: datetime | None, now: datetime) -> float:
    """Return the seconds until a new status is to be written; 0 or less for now.

    News that only count wait until 5 s after the `last` write, and those that requests make until 60 s after it.
    """
    if last is None:
        return 0.0
    calm_old, calm_new = _without_traffic(old), _without_traffic(new)
    if _without_progress(calm_old) != _without_progress(calm_new):
        return 0.0
    interval = PROGRESS_INTERVAL if calm_old != calm_new else TRAFFIC_INTERVAL
    return (last + interval - now).total_seconds()


def encode_status(status: msgspec.Struct | dict[str, Any]) -> dict[str, Any]:
    encoded: dict[str, Any] = msgspec.to_builtins(status)
    return encoded


async def write_status(
    runtime: Runtime,
    backoffs: Backoffs,
    kind: Kind,
    about: ObjectMeta,
    *,
    version: str,
    events: Sequence[PlannedEvent],
    status: msgspec.Struct | dict[str, Any],
) -> bool:
    """Write the Events and then the status, unless an earlier failure still makes them wait; return true if both were written.

    An Event's name comes from its content. A crash between the two writes therefore repeats the same Event and makes no second one. If the
    object is not at `version` any more, the write is put off with a line in the log.

    Raises:
        ClusterError: the API server failed or refused; the next write waits, unless the namespace is ending.
    """
    if backoffs.waiting(STATUS, runtime.now()):
        return False
    try:
        await report(runtime, events, kind=kind, about=about)
        await runtime.cluster.apply_status(kind, about.namespace, about.name, status=encode_status(status), version=version)
    except NamespaceEnds:
        raise
    except ClusterConflict as error:
        log.info("status not written object=%s/%s: the object changed meanwhile", about.namespace, about.name)
        backoffs.failed(STATUS, error, runtime.now())
        return False
    except ClusterError as error:
        backoffs.failed(STATUS, error, runtime.now())
        raise
    backoffs.succeeded(STATUS)
    return True


def _without_traffic(status: DeploymentStatus) -> DeploymentStatus:
    """Drop traffic from a status, except that the first request shows at once."""
    asked = None if status.last_request_time is None else EVER
    return msgspec.structs.replace(status, held=None, last_request_time=asked, sleep_eligible_time=None)


def _without_progress(status: DeploymentStatus) -> DeploymentStatus:
    """Drop bytes from the progress of loads, and from the adapters how many of them are loaded by now.

    The stage of a load stays, and so does the fact that there is one.
    """
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
