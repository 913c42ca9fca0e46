# SPDX-License-Identifier: Apache-2.0
"""Replicas that wait: the status says what for, by the pod's Events and by the deployments that sleep, and when a person must act."""

from typing import Any

import pytest

from diffusion_operator.api.names import DEPLOYMENT, POD
from diffusion_operator.errors import ClusterRefused
from support.operator.rig import Rig, deployment, serving

MOUNT = 'MountVolume.SetUp failed for volume "v": configmap "authority" not found'
GPU = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."


def happened(rig: Rig, pod: str, reason: str, message: str, *, type_: str = "Warning") -> None:
    """Write an Event about a pod as a kubelet does."""
    about = rig.cluster.find(POD, pod)
    assert about is not None
    when = rig.now.strftime("%Y-%m-%dT%H:%M:%SZ")
    metadata = {"name": f"{pod}.{reason}.{when}", "namespace": "default"}
    event = {"apiVersion": "v1", "kind": "Event", "metadata": metadata, "type": type_, "reason": reason, "message": message}
    rig.cluster.put(event | {"lastTimestamp": when, "involvedObject": {"uid": about["metadata"]["uid"]}})


async def waiting(**spec: Any) -> Rig:
    """Return a rig with a deployment whose pod has a node, where its container is not made."""
    rig = Rig()
    rig.cluster.put(deployment(**spec))
    await rig.run()
    rig.cluster.waiting("d-0-0", "ContainerCreating")
    return rig


async def test_a_pod_that_waits_says_what_for_by_its_last_warning_after_30_s() -> None:
    rig = await waiting()
    happened(rig, "d-0-0", "FailedScheduling", "skipped: no such class yet")
    await rig.run(1)
    happened(rig, "d-0-0", "FailedMount", MOUNT)
    happened(rig, "d-0-0", "Scheduled", "assigned to node", type_="Normal")
    await rig.run(15)
    assert MOUNT not in rig.message("Ready")
    await rig.run(30)
    for condition in ("Ready", "Progressing"):
        assert f"replica 0: FailedMount: {MOUNT}" in rig.message(condition)
    assert rig.status()["replicaStates"][0]["message"] == f"FailedMount: {MOUNT}"
    assert (rig.condition("Ready"), rig.condition("Degraded")) == (("False", "Starting"), ("False", "AsExpected"))


async def test_events_are_read_once_in_30_s_while_a_pod_waits_and_never_else() -> None:
    rig = await waiting()
    await rig.run(300)
    asked = len(rig.cluster.asked_for_warnings)
    assert 8 <= asked <= 300 / 30
    rig.start("d-0-0")
    await rig.run(300)
    assert len(rig.cluster.asked_for_warnings) == asked
    assert "FailedMount" not in rig.message("Ready")


async def test_what_was_wrong_before_the_node_had_set_the_pod_up_is_settled() -> None:
    rig = await waiting()
    happened(rig, "d-0-0", "FailedMount", MOUNT)
    await rig.run(60)
    assert MOUNT in rig.message("Ready")
    set_up = {"type": "PodReadyToStartContainers", "status": "True", "lastTransitionTime": rig.now.strftime("%Y-%m-%dT%H:%M:%SZ")}
    rig.cluster.pod_status("d-0-0", conditions=[set_up])
    await rig.run(60)
    assert MOUNT not in rig.message("Ready")


async def test_events_that_cannot_be_read_stop_nothing() -> None:
    rig = await waiting()

    async def refuse(namespace: str, uid: str) -> list[Any]:
        raise ClusterRefused("events is forbidden", status=403)

    rig.cluster.warnings = refuse  # type: ignore[method-assign]
    await rig.run(120)
    assert (rig.condition("Ready"), rig.errors) == (("False", "Starting"), [])


@pytest.mark.parametrize("waits", ["for a mount", "for a node"])
async def test_a_replica_that_does_not_come_up_is_degraded_past_the_deadline_and_says_what_it_waits_for(waits: str) -> None:
    rig = await serving(1, rollout={"progressDeadlineSeconds": 60})
    rig.cluster.remove(POD, "d-0-0")  # long after the rollout
    await rig.run()
    (pod,) = rig.cluster.names(POD)
    if waits == "for a mount":
        rig.cluster.waiting(pod, "ContainerCreating")
        happened(rig, pod, "FailedMount", MOUNT)
    await rig.run(50)
    assert rig.condition("Degraded") == ("False", "AsExpected")
    await rig.run(60)
    assert (rig.condition("Progressing"), rig.condition("Degraded")) == (("False", "DeadlineExceeded"), ("True", "DeadlineExceeded"))
    assert "did not come up for 60 s (spec.rollout.progressDeadlineSeconds)" in rig.message("Degraded")
    assert (MOUNT in rig.message("Degraded")) is (waits == "for a mount")
    rig.start(pod)
    await rig.run()
    assert rig.condition("Degraded") == ("False", "AsExpected")


async def test_a_new_deployment_that_does_not_come_up_is_degraded_past_the_deadline() -> None:
    rig = await waiting(rollout={"progressDeadlineSeconds": 60})
    happened(rig, "d-0-0", "FailedMount", MOUNT)
    await rig.run(90)
    assert (rig.condition("Ready"), rig.condition("Degraded")) == (("False", "Starting"), ("True", "DeadlineExceeded"))
    assert MOUNT in rig.message("Degraded")


async def asleep(rig: Rig, name: str, namespace: str = "default") -> None:
    """Let the operator hear of a deployment that sleeps and keeps its GPUs."""
    rig.cluster.put(deployment(name, resources={}, sleep={"policy": "Asleep"}))
    await rig.run()
    rig.start_all()
    await rig.run(60)
    assert rig.condition("Awake", name) == ("False", "AllAsleep")
    if namespace != "default":
        (key,) = [key for key in rig.runtime.asleep if key.name == name]
        rig.runtime.asleep[key._replace(namespace=namespace)] = rig.runtime.asleep.pop(key).__class__(
            namespace=namespace, name=name, devices=frozenset({"nvidia.com/gpu"}), replicas=1
        )


async def test_who_waits_for_a_gpu_names_the_sleepers_of_its_namespace_and_counts_the_others() -> None:
    rig = Rig()
    for name, namespace in (("near", "default"), ("far", "secret-team")):
        await asleep(rig, name, namespace)
    rig.cluster.put(deployment(resources={}))
    await rig.run()
    rig.cluster.unschedulable("d-0-0", GPU)
    await rig.run()
    assert rig.condition("Ready") == ("False", "WaitingForGPU")
    said = "deployments that sleep and keep such devices: in this namespace near (1), in others 1; spec.suspend frees them"
    for condition in ("Ready", "Scheduled", "Progressing"):
        assert f"{GPU}; {said}" in rig.message(condition)
        assert "far" not in rig.message(condition)
        assert "secret-team" not in rig.message(condition)
    assert rig.message("Ready").endswith("; no pod is behind the Service, so clients get no answer from it")


async def test_a_sleeper_that_goes_is_no_longer_named_at_the_next_look() -> None:
    rig = Rig()
    await asleep(rig, "near")
    rig.cluster.put(deployment(resources={}))
    await rig.run()
    rig.cluster.unschedulable("d-0-0", GPU)
    await rig.run()
    rig.cluster.change(DEPLOYMENT, "near", lambda spec: spec.update(sleep={"policy": "AlwaysAwake"}))
    await rig.run(60)
    assert "sleep" not in rig.message("Ready")


async def test_a_sleeper_with_other_devices_is_not_named() -> None:
    rig = Rig()
    await asleep(rig, "near")
    rig.cluster.put(deployment(resources={"gpuResourceName": "amd.com/gpu"}))
    await rig.run()
    rig.cluster.unschedulable("d-0-0", GPU.replace("nvidia", "amd"))
    await rig.run()
    assert rig.condition("Ready") == ("False", "WaitingForGPU")
    assert "sleep" not in rig.message("Ready")


async def test_the_service_of_a_deployment_that_serves_is_not_said_to_be_empty() -> None:
    rig = await serving(1)
    assert "Service" not in rig.message("Ready")
