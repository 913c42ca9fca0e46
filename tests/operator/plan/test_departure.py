# SPDX-License-Identifier: Apache-2.0
"""The last steps of a replica that is removed: unrouted, drained through its control port, then deleted."""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

from diffusion_operator.api.deployment_status import ReplicaState
from diffusion_operator.api.worker_state import HeldReport, WorkerPhase, WorkerState
from diffusion_operator.plan.deployment import DeploymentPlan, plan_deployment
from diffusion_operator.plan.observed.observed import Observed, Poll
from diffusion_operator.plan.observed.pods import Pod
from diffusion_operator.plan.results.actions import CreatePod, DeletePod, DrainWorker, SetRoutable
from support.operator.plan_builders import NOW, REVISION, made, pod, says

IDLE = says(WorkerPhase.READY, draining=False)
ASLEEP = says(WorkerPhase.ASLEEP, draining=False)
BUSY = says(WorkerPhase.READY, draining=False, in_flight=1)
QUEUED = says(WorkerPhase.READY, draining=False, queued=1)
HELD = says(WorkerPhase.ASLEEP, draining=False, held=HeldReport(current=1))
DRAINS = says(WorkerPhase.TERMINATING, draining=True, in_flight=1)
DRAINED = says(WorkerPhase.TERMINATING, draining=True)
LATE = says(WorkerPhase.TERMINATING, draining=True, in_flight=1, state_age_seconds=315.0)


@dataclass
class Case:
    what: str
    state: WorkerState | None
    drained: bool
    deleted: bool
    facts: dict[str, Any] = field(default_factory=dict)
    poll: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, Any] = field(default_factory=dict)


CASES = [
    Case("one that sleeps is deleted at once", ASLEEP, False, True),
    Case("one whose last word had no request is drained first", IDLE, True, False),
    Case("a busy one is drained first", BUSY, True, False),
    Case("one whose requests wait in its queue too", QUEUED, True, False),
    Case("one that holds requests too", HELD, True, False),
    Case("one that did not take the call is deleted", BUSY, False, True, seen={"undrained": frozenset({"uid-0-0"})}),
    Case("one that does not answer is deleted", BUSY, False, True, poll={"failures": 1}),
    Case("an orphan is not called", BUSY, False, True, {"orphan": True, "owner_uid": "u"}),
    Case("one that is still routed to loses its traffic first", BUSY, False, False, {"routable": True}),
    Case("one that was unrouted a second ago too", BUSY, False, False, seen={"unrouted_at": {"uid-0-0": NOW - timedelta(seconds=1)}}),
    Case("one that drains is waited for", DRAINS, False, False),
    Case("one that has drained is deleted", DRAINED, False, True),
    Case("one that has not in time is deleted", LATE, False, True),
    Case("one whose time ended since its last word is deleted too", DRAINS, False, True, poll={"since_s": 315.0}),
    Case("one that ends while it drains is deleted", DRAINS, False, True, poll={"failures": 3, "failing_for": timedelta(seconds=15)}),
]


def plan(*pods: Pod, state: WorkerState | None, poll: dict[str, Any] | None = None, status: Any = None, **spec: Any) -> DeploymentPlan:
    seen = {name: spec.pop(name) for name in ("undrained", "unrouted_at") if name in spec}
    polls = {one.uid: Poll(state=state if one.index == 0 else IDLE, **(poll or {} if one.index == 0 else {})) for one in pods}
    return plan_deployment(Observed(deployment=made(status, **spec), default_image="worker:1", pods=pods, polls=polls, **seen), NOW)


def kinds(made_plan: DeploymentPlan, kind: type) -> list[Any]:
    return [one for one in (*made_plan.pods, *made_plan.calls) if isinstance(one, kind)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_a_pod_that_is_to_go(case: Case) -> None:
    result = plan(pod(**case.facts), state=case.state, poll=case.poll, replicas=0, **case.seen)
    assert bool(kinds(result, DrainWorker)) is case.drained
    assert bool(kinds(result, DeletePod)) is case.deleted


def test_the_call_has_the_bound_of_the_spec_and_one_name() -> None:
    asked = plan(pod(), state=BUSY, replicas=0, drain={"timeoutSeconds": 7})
    (call,) = kinds(asked, DrainWorker)
    assert (call.deadline_s, call.operation_id, call.worker.boot_id) == (7, "drain-uid-0-0", "b")


def test_a_replica_that_drains_is_on_its_way_out_and_another_one_takes_its_place() -> None:
    result = plan(pod(routable=False), state=DRAINS, replicas=1)
    assert kinds(result, CreatePod) == [CreatePod(index=0, incarnation=1)]
    assert [group.state for group in result.groups] == [ReplicaState.TERMINATING]
    assert result.status.replica_states[0].message == (
        "its pod ends when its requests are finished, after 300 s at the latest (spec.drain.timeoutSeconds)"
    )
    assert result.look_again_s == 0.5


def test_the_pod_that_drains_stays_beside_its_successor() -> None:
    """Check that a draining pod stays beside its successor, though an older pod of an index is usually deleted at once."""
    pods = (pod(), pod(0, 1))
    polls = {pods[0].uid: Poll(state=DRAINS), pods[1].uid: Poll(state=IDLE)}
    result = plan_deployment(Observed(deployment=made(), default_image="worker:1", pods=pods, polls=polls), NOW)
    assert kinds(result, DeletePod) == []
    assert [group.pod.incarnation for group in result.groups] == [1]
    assert [(one.name, one.routable) for one in kinds(result, SetRoutable)] == [("d-0-1", True)]


@pytest.mark.parametrize(("state", "stalled"), [(DRAINS, False), (IDLE, True)])
def test_a_rollouts_clock_stands_while_a_replica_drains_through_its_control_port(state: WorkerState, stalled: bool) -> None:
    before = {"revision": REVISION, "served": 0, "remaining": 1, "progressTime": NOW - timedelta(hours=1), "paused": 0}
    pods = (pod(revision="old", routable=False), pod(1, routable=True))
    progress = plan(*pods, state=state, replicas=2, status={"rollout": before | {"served": 1}}).situation.progress
    assert progress.stalled is stalled
