# SPDX-License-Identifier: Apache-2.0
"""A suspended deployment: no pods, everything else stays, and it comes back as it was."""

import pytest

from diffusion_operator.api.names import CONFIG_MAP, DEPLOYMENT, POD, SECRET, SERVICE
from diffusion_operator.api.worker_state import WorkerPhase, WorkerState
from diffusion_operator.plan.results.actions import DeletePod, SetRoutable
from support.operator.plan_builders import READY, leaving, planned, pod, says
from support.operator.rig import Rig, serving, with_adapter

STATES = [
    ("waking", says(WorkerPhase.WAKING)),
    ("asleep", says(WorkerPhase.ASLEEP)),
    ("draining", says(WorkerPhase.DRAINING)),
    ("starting", says(WorkerPhase.STARTING)),
]


@pytest.mark.parametrize("state", [row[1] for row in STATES], ids=[row[0] for row in STATES])
def test_a_suspended_replica_is_unrouted_and_deleted_and_told_nothing(state: WorkerState) -> None:
    routed = planned(pod(routable=True), states={0: state}, suspend=True)
    assert routed.pods == (SetRoutable("d-0-0", "uid-0-0", routable=False, why="spec.suspend of the deployment is true"),)
    unrouted = planned(pod(), states={0: state}, suspend=True)
    assert unrouted.pods == (DeletePod("d-0-0", "uid-0-0", why="spec.suspend of the deployment is true"),)
    assert routed.calls == unrouted.calls == ()


def test_a_suspended_replica_that_is_awake_is_unrouted_and_drained_first() -> None:
    plan = planned(pod(), states={0: READY}, suspend=True)
    assert (plan.pods, leaving(plan)) == ((), ["d-0-0"])


def suspend(rig: Rig, value: bool, **more: object) -> None:
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(suspend=value, **more))


async def test_a_suspended_deployment_keeps_everything_but_its_pods() -> None:
    rig = await serving(2)
    suspend(rig, True)
    await rig.run(1)
    assert (rig.routable(), len(rig.cluster.names(POD))) == ([], 2), "unrouted first"
    await rig.run()
    assert rig.cluster.names(POD) == []
    assert (rig.cluster.names(SERVICE), rig.cluster.names(CONFIG_MAP), rig.cluster.names(SECRET)) == (["d"], ["d-desired"], ["d-control"])
    said = {name: rig.condition(name) for name in ("Ready", "Available", "Progressing", "Awake", "Degraded", "AdaptersReady")}
    assert said == {
        "Ready": ("False", "Suspended"),
        "Available": ("False", "Suspended"),
        "Progressing": ("False", "Paused"),
        "Awake": ("False", "Suspended"),
        "Degraded": ("False", "AsExpected"),
        "AdaptersReady": ("True", "NoAdapters"),
    }
    found = rig.cluster.find(DEPLOYMENT, "d")
    assert found is not None
    assert (rig.status()["replicas"], found["spec"]["replicas"]) == (0, 2), "an autoscaler's number is left alone"
    writes = rig.cluster.status_writes
    await rig.run(600)
    assert rig.cluster.status_writes == writes


async def test_a_resumed_deployment_starts_anew_and_serves() -> None:
    rig = await serving(2)
    suspend(rig, True)
    await rig.run(10)
    suspend(rig, False)
    await rig.run()
    rig.start_all()
    await rig.run()
    assert rig.condition("Ready") == ("True", "Serving")
    assert len(rig.routable()) == 2
    assert "RolloutComplete" not in rig.cluster.events(), "nothing was rolled out"


async def test_a_template_changed_while_suspended_is_what_comes_back() -> None:
    rig = await serving(1)
    old = rig.status()["currentRevision"]
    suspend(rig, True, engine={"maxBatchSize": 4})
    await rig.run(10)
    assert rig.status()["currentRevision"] == old
    assert "RolloutComplete" not in rig.cluster.events()
    suspend(rig, False)
    await rig.run()
    rig.start_all()
    await rig.run()
    assert rig.status()["currentRevision"] == rig.status()["updateRevision"] != old
    assert rig.cluster.events().count("RolloutComplete") == 1


async def test_a_suspension_in_the_middle_of_a_rollout_ends_every_pod() -> None:
    rig = await serving(3, rollout={"maxSurge": 2, "maxUnavailable": 0})
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(engine={"maxBatchSize": 4}))
    await rig.run(2)
    assert len(rig.cluster.names(POD)) == 5
    suspend(rig, True)
    await rig.run(5)
    assert rig.cluster.names(POD) == []


async def test_a_suspension_while_waking_ends_the_wake_with_the_pod() -> None:
    rig = await serving(1, sleep={"policy": "Asleep"})
    worker = rig.workers.at("10.0.0.1")
    worker.slow = True
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(sleep={}))
    await rig.run(2)
    assert rig.states() == ["Waking"]
    worker.calls.clear()
    suspend(rig, True)
    await rig.run(5)
    assert (rig.cluster.names(POD), worker.calls) == ([], [])
    assert rig.condition("Ready") == ("False", "Suspended")


async def test_adapters_of_a_suspended_deployment_are_deferred_and_say_why() -> None:
    rig = await with_adapter()
    suspend(rig, True)
    await rig.run(10)
    assert rig.adapter_condition("Ready") == ("False", "Deferred")
    assert "spec.suspend" in rig.adapter_message("Ready")
    assert rig.adapter_condition("Accepted") == ("True", "Accepted")
    assert rig.condition("AdaptersReady") == ("False", "Deferred")
    suspend(rig, False)
    await rig.run()
    rig.start_all()
    await rig.run()
    assert rig.adapter_condition("Ready") == ("True", "LoadedEverywhere")
