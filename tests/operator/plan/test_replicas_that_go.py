# SPDX-License-Identifier: Apache-2.0
"""A replica that is removed ends with an exit code and a failed pod, and does not count as failed. Every Event has a reason."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec
import pytest

from diffusion_operator.api.adapter import ErrorStatus, InstanceState, InstanceStatus, LoRAAdapter
from diffusion_operator.api.deployment_status import DeploymentStatus, FailureStatus, OperationStatus, ReplicaState, ReplicaStatus
from diffusion_operator.api.names import DEPLOYMENT, POD
from diffusion_operator.api.worker_state import WorkerPhase
from diffusion_operator.plan.deployment import plan_deployment
from diffusion_operator.plan.observed.observed import Observed
from diffusion_operator.plan.observed.pods import Container, Exit, read_pod
from diffusion_operator.plan.results.events import adapter_events, deployment_events
from diffusion_operator.reconcile.store.parsing import parse
from support.operator.plan_builders import NOW, made, pod
from support.operator.rig import Rig, adapter, serving

KILLED = Container(last_exit=Exit(code=137, reason="Error"))
EVICTED = "EvictionByEvictionAPI: Eviction API: evicting"


def events_of(**facts: Any) -> tuple[list[tuple[str, str]], ReplicaStatus]:
    """Plan once for a pod with these facts. Return the reasons and messages of the Events, and the replica's part of the status."""
    deployment = made()
    after = plan_deployment(Observed(deployment=deployment, default_image="worker:1", pods=(pod(**facts),)), NOW).status
    return [(event.reason, event.message) for event in deployment_events(deployment.status, after)], after.replica_states[0]


@pytest.mark.parametrize(
    "facts",
    [
        {"terminating": True, "finished": True},
        {"terminating": True, "finished": True, "container": KILLED},
        {"terminating": True, "container": KILLED},
        {"terminating": True, "finished": True, "disruption": EVICTED},
        {"finished": True, "disruption": EVICTED},
        {"finished": True, "disruption": EVICTED, "container": KILLED},
    ],
)
def test_a_pod_that_was_told_to_go_has_not_failed(facts: dict[str, Any]) -> None:
    events, replica = events_of(**facts)
    assert events == []
    assert replica.last_failure is None
    assert not replica.failures or not facts.get("terminating")


OWN = 'Evicted: Usage of EmptyDir volume "cache" exceeds the limit "1Gi".'


async def test_evictions_for_the_pods_own_disk_are_told_counted_and_waited_for_whatever_the_exit_code() -> None:
    rig, starts = await serving(1), []
    for number in range(5):
        pod_name = f"d-0-{number}"
        worker = next(one for one in rig.workers if one.phase is WorkerPhase.READY)
        worker.phase = WorkerPhase.TERMINATING  # no call drained it: SIGTERM did
        await rig.run(3)
        assert rig.cluster.names(POD) == [pod_name], "it shows its cause when it has ended"
        rig.cluster.ended(pod_name, code=0)
        rig.cluster.pod_status(pod_name, phase="Failed", reason="Evicted", message=OWN.removeprefix("Evicted: "))
        await rig.run(3)
        [replica] = rig.status()["replicaStates"]
        assert (replica["failures"], replica["lastFailure"]["message"]) == (number + 1, OWN)
        starts.append((datetime.fromisoformat(replica["nextRestartTime"]) - rig.now).total_seconds())
        await rig.run(starts[-1] + 5)
        rig.start_all()
        await rig.run(3)
    assert [round(start, -1) for start in starts] == [10, 20, 40, 80, 600]
    told = rig.cluster.notes("ReplicaRestarted")
    assert OWN in told[0]
    assert len([note for note in told if "is made again as" in note]) == 5


async def test_a_container_that_ends_with_code_0_has_failed() -> None:
    rig = await serving(1)
    rig.restart_container("d-0-0", code=0)
    await rig.run()
    [replica] = rig.status()["replicaStates"]
    assert (replica["failures"], replica["lastFailure"]["exitCode"]) == (1, 0)
    assert "replica 0 ended with exit code 0" in rig.cluster.notes("ReplicaRestarted")[0]


async def test_a_worker_that_ends_for_its_nodes_sake_is_replaced_at_once() -> None:
    rig = await serving(1)
    rig.cluster.graceful = True
    target = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
    rig.cluster.pod_status("d-0-0", conditions=[{"type": "Ready", "status": "True"}, target])
    next(iter(rig.workers)).phase = WorkerPhase.TERMINATING
    await rig.run(3)
    assert "d-0-1" in rig.cluster.names(POD)


def test_an_eviction_is_told_in_the_status_of_the_replica() -> None:
    _, replica = events_of(terminating=True, disruption=EVICTED)
    assert replica.message == f"the pod is being disrupted: {EVICTED}"


def test_a_pod_that_ended_by_itself_without_a_word_has_failed_and_the_event_says_what_is_known() -> None:
    events, replica = events_of(finished=True)
    assert events == [("ReplicaRestarted", "replica 0 failed: the pod ended, and the kubelet does not start it again")]
    assert replica.last_failure is not None


@pytest.mark.parametrize(
    ("reason", "told"),
    [("EvictionByEvictionAPI", True), ("PreemptionByScheduler", True), ("DeletionByTaintManager", True), ("TerminationByKubelet", False)],
)
def test_what_the_kubelet_ends_of_itself_is_no_order_to_go(reason: str, told: bool) -> None:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "a\nb"}
    manifest = {
        "metadata": {"name": "d-0-0", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "status": {"conditions": [condition], "phase": "Failed"},
    }
    assert read_pod(manifest, index=0, incarnation=0).disruption == (rf"{reason}: a\nb" if told else "")


@dataclass
class Going:
    """A rig whose kubelet takes a moment to end a deleted pod."""

    rig: Rig

    async def step(self) -> None:
        await self.rig.run(1)
        for name in self.rig.cluster.names(POD):
            found = self.rig.cluster.find(POD, name) or {}
            if not found.get("status"):
                self.rig.start(name)
            elif "deletionTimestamp" in found["metadata"]:
                self.rig.cluster.ended(name, code=143 if name.endswith("0") else 0)
                await self.rig.run(1)
                self.rig.cluster.remove(POD, name)

    def expect_no_failure(self) -> None:
        notes = [one for reason in set(self.rig.cluster.events()) for one in self.rig.cluster.notes(reason)]
        assert not [note for note in notes if "failed" in note or "None" in note or "exit code" in note]
        assert "ReplicaRestarted" not in self.rig.cluster.events()
        assert not [one for one in self.rig.status()["replicaStates"] if one.get("lastFailure") or one.get("failures")]
        assert self.rig.condition("Ready") == ("True", "Serving")
        assert self.rig.errors == []


@pytest.mark.parametrize("what", ["scale-down", "rollout", "eviction", "deletion"])
async def test_no_event_tells_of_a_failure_where_replicas_go(what: str) -> None:
    rig = await serving(3)
    rig.cluster.graceful = True
    going = Going(rig)
    if what == "scale-down":
        rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(replicas=1))
    elif what == "rollout":
        rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(engine={"env": [{"name": "A", "value": "1"}]}))
    else:
        rig.cluster.tell_to_go("d-1-0", evicted=what == "eviction")
    for _ in range(20):
        await going.step()
    assert len(rig.cluster.names(POD)) == (1 if what == "scale-down" else 3)
    assert "d-1-0" not in rig.cluster.names(POD)
    going.expect_no_failure()


EMPTY = ReplicaStatus(index=0, state=ReplicaState.FAILED, boot_id="b", leader_pod="d-0-0")
WORDLESS = [
    {"last_failure": FailureStatus()},
    {"last_failure": FailureStatus(message="")},
    {"last_failure": FailureStatus(exit_code=3)},
    {"generation": 2},
    {"incarnation": 1, "failures": 2, "leader_pod": None},
    {"last_operation": OperationStatus(id="a", kind="sleep", code="Busted")},
    {"last_operation": OperationStatus(id="a", kind="wake", code="Busted", message="", seconds="1.000")},
    {"last_operation": OperationStatus(id="a", code="", message=None)},
    {"last_operation": OperationStatus(id="a", kind="wake")},
    {"last_operation": OperationStatus(id="a", kind="sleep")},
]


@pytest.mark.parametrize("changes", WORDLESS, ids=str)
def test_an_event_says_why_even_where_nobody_does(changes: dict[str, Any]) -> None:
    before = DeploymentStatus(replica_states=(EMPTY,))
    after = DeploymentStatus(replica_states=(msgspec.structs.replace(EMPTY, **changes),))
    events = deployment_events(before, after)
    assert len(events) == 1
    assert "None" not in events[0].message
    assert not events[0].message.rstrip().endswith(":")


@pytest.mark.parametrize("state", [InstanceState.LOADED, InstanceState.FAILED])
@pytest.mark.parametrize("error", [ErrorStatus(), ErrorStatus(code="NotFound"), ErrorStatus(message="")])
def test_an_event_of_an_adapter_says_why_even_where_nobody_does(state: InstanceState, error: ErrorStatus) -> None:
    metadata = {"uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
    manifest = adapter()
    found = parse(manifest | {"metadata": manifest["metadata"] | metadata}, LoRAAdapter)
    after = msgspec.structs.replace(found.status, replica_instances=(InstanceStatus(replica=0, state=state, last_error=error),))
    events = adapter_events(found, after)
    assert len(events) == 1
    assert "None" not in events[0].message
    assert not events[0].message.rstrip().endswith(":")
