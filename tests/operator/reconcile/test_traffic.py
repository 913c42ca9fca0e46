# SPDX-License-Identifier: Apache-2.0
"""Requests in a status: times that do not move with the jitter of the operator's looks, and counts over all replicas."""

from datetime import timedelta

import msgspec
import pytest

from diffusion_operator.api.deployment_status import DeploymentStatus, HeldStatus
from diffusion_operator.api.worker_state import HeldReport, WorkerPhase, WorkerState
from diffusion_operator.reconcile.status_write import worth_writing
from support.operator.plan_builders import NOW, planned, pod, says

ON_IDLE = {"policy": "OnIdle"}


def asked(age_s: float | None, **more: object) -> WorkerState:
    return says(WorkerPhase.READY, last_request_age_seconds=age_s, state_age_seconds=1000.0, **more)


def status(*states: WorkerState, before: dict[str, object] | None = None) -> DeploymentStatus:
    pods = [pod(index) for index in range(len(states))]
    return planned(*pods, states=dict(enumerate(states)), replicas=len(states), status=before, sleep=ON_IDLE).status


def seconds_ago(count: float) -> str:
    return msgspec.to_builtins(NOW - timedelta(seconds=count))


REQUESTS = [
    ("the latest of all replicas", [asked(40), asked(7)], None, 7),
    ("none is known", [asked(None)], None, None),
    ("what a process that ended knew stays", [asked(None)], 90, 90),
    ("what only jitters stays", [asked(7)], 9.0, 9),
    ("also the other way", [asked(9)], 7.0, 7),
    ("a newer one is told", [asked(7)], 10.0, 7),
]


@pytest.mark.parametrize(("states", "before_s", "after_s"), [row[1:] for row in REQUESTS], ids=[row[0] for row in REQUESTS])
def test_the_time_of_the_last_request(states: list[WorkerState], before_s: float | None, after_s: float | None) -> None:
    before = {} if before_s is None else {"lastRequestTime": seconds_ago(before_s)}
    found = status(*states, before=before).last_request_time
    assert found == (None if after_s is None else NOW - timedelta(seconds=after_s))


ELIGIBLE = [("a jitter stays", 198, 198), ("either way", 202, 202), ("more does not", 203, 200), ("nor much more", 100, 200)]


@pytest.mark.parametrize(("before_s", "after_s"), [row[1:] for row in ELIGIBLE], ids=[row[0] for row in ELIGIBLE])
def test_the_time_to_sleep_moves_with_requests_and_not_with_looks(before_s: int, after_s: int) -> None:
    found = status(asked(100), before={"sleepEligibleTime": seconds_ago(-before_s)}).sleep_eligible_time
    assert found == NOW + timedelta(seconds=after_s)


def test_held_requests_are_counted_over_all_replicas_and_the_oldest_is_told() -> None:
    states = [asked(0, held=HeldReport(current=2, oldest_age_seconds=3.9)), asked(0, held=HeldReport(current=1, oldest_age_seconds=9.2))]
    assert status(*states).held == HeldStatus(current=3, oldest_seconds=9)
    assert status(asked(0)).held == HeldStatus(current=0)


def test_what_requests_change_is_written_once_a_minute() -> None:
    old, new = status(asked(100)), status(asked(0, held=HeldReport(current=2, oldest_age_seconds=1.0)))
    assert (old.held, old.last_request_time, old.sleep_eligible_time) != (new.held, new.last_request_time, new.sleep_eligible_time)
    assert not worth_writing(old, new, last=NOW, now=NOW + timedelta(seconds=59))
    assert worth_writing(old, new, last=NOW, now=NOW + timedelta(seconds=60))
    both = msgspec.structs.replace(new, awake_replicas=7)
    assert worth_writing(old, both, last=NOW, now=NOW), "with anything else at once"
