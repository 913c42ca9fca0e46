# SPDX-License-Identifier: Apache-2.0
"""Replicas that fail, through real reconciles in virtual time: from the first end to the new pod, or to giving up."""

from diffusion_operator.api.names import DEPLOYMENT, POD
from diffusion_operator.api.worker_state import WireError, WorkerPhase
from diffusion_operator.errors import ClusterRefused
from support.operator.rig import Rig, serving


def dies(rig: Rig, pod: str, *, restarts: int, code: int = 70, message: str = "rank 1 died") -> None:
    rig.cluster.crashed(pod, code=code, message=message, restarts=restarts)


async def loops(rig: Rig, pod: str, times: int, *, code: int = 70) -> None:
    """Let a pod's container end and restart in place `times` times, and at last wait for another restart."""
    for count in range(1, times + 1):
        ended = {"exitCode": code, "reason": "Error", "message": "rank 1 died", "finishedAt": "2026-01-01T00:00:00Z"}
        rig.cluster.running(pod, "10.9.9.9", restarts=count, last=ended)
        await rig.run(10)
    dies(rig, pod, restarts=times, code=code)
    await rig.run(5)


async def test_a_loop_gets_a_new_pod_after_a_pause_and_then_one_every_ten_minutes_or_after_an_edit() -> None:
    rig = await serving(1)
    await loops(rig, "d-0-0", 3)
    group = rig.status()["replicaStates"][0]
    assert (group["failures"], rig.cluster.names(POD)) == (3, ["d-0-0"])
    rig.restart_operator()
    await rig.run(20)
    assert rig.status()["replicaStates"][0]["nextRestartTime"] == group["nextRestartTime"], "the pause outlives the operator"
    await rig.run(30)
    assert rig.cluster.names(POD) == ["d-0-1"]
    assert rig.status()["replicaStates"][0]["failures"] == 3, "the count outlives the pod"
    await loops(rig, "d-0-1", 4)
    rig.restart_operator()
    await rig.run(200)
    assert rig.cluster.names(POD) == ["d-0-1"]
    assert (rig.condition("Ready"), rig.condition("Degraded")) == (("False", "CrashLooping"), ("True", "CrashLooping"))
    assert "a new pod is made every ten minutes at most" in rig.message("Ready")
    writes = rig.cluster.status_writes
    await rig.run(200)
    assert rig.cluster.status_writes == writes
    assert rig.cluster.names(POD) == ["d-0-1"]
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(engine={"maxBatchSize": 4}))
    await rig.run(5)
    assert rig.cluster.names(POD) == ["d-0-2"]
    rig.start_all()
    await rig.run(10)
    assert rig.condition("Ready") == ("True", "Serving")
    assert "failures" not in rig.status()["replicaStates"][0]
    assert rig.status()["replicaStates"][0]["lastFailure"]["exitCode"] == 70, "what was wrong is told over pods and templates"


async def test_a_model_that_cannot_be_loaded_is_left_to_the_kubelet() -> None:
    rig = await serving(2)
    await loops(rig, "d-0-0", 9, code=1)
    await rig.run(3000)
    assert rig.cluster.names(POD) == ["d-0-0", "d-1-0"]
    assert rig.condition("Progressing") == ("False", "ModelError")
    rig.restart_container("d-0-0", code=1)
    await rig.run(30)
    assert rig.condition("Ready") == ("True", "Serving"), "the kubelet's next try finds what was missing"


async def test_the_count_of_failures_outlives_a_quota_that_refuses_the_next_pod() -> None:
    rig = await serving(1)
    rig.cluster.pod_status("d-0-0", phase="Failed", reason="Evicted")
    quota = ClusterRefused("exceeded quota: q", status=403)
    rig.cluster.refuse = lambda verb, manifest: quota if manifest["kind"] == POD.kind else None
    await rig.run(60)
    assert rig.cluster.names(POD) == []
    rig.restart_operator()
    await rig.run(10)
    rig.cluster.refuse = lambda verb, manifest: None
    await rig.run(10)
    assert rig.cluster.names(POD) == ["d-0-1"]
    assert rig.status()["replicaStates"][0]["failures"] == 1


async def test_ranks_that_do_not_come_up_get_a_new_pod() -> None:
    rig = await serving(2, startup={"timeoutSeconds": 60})
    worker = rig.workers.at("10.0.0.1")
    worker.phase, worker.failure = WorkerPhase.RESTARTING, WireError(code="RankFailed", message="rank 0 hangs")
    await rig.run(110)
    assert rig.cluster.names(POD) == ["d-0-0", "d-1-0"]
    await rig.run(40)
    assert rig.cluster.names(POD) == ["d-0-1", "d-1-0"]


async def test_an_unreachable_replica_serves_on_and_is_made_anew_after_five_minutes() -> None:
    rig = await serving(2)
    rig.workers.at("10.0.0.1").unreachable = True
    await rig.run(280)
    assert rig.routable() == rig.cluster.names(POD) == ["d-0-0", "d-1-0"]
    assert rig.condition("Degraded") == ("True", "ControlUnreachable")
    await rig.run(60)
    assert rig.cluster.names(POD) == ["d-0-1", "d-1-0"]
    assert rig.status()["replicaStates"][0]["failures"] == 1


async def test_an_operator_that_reaches_nobody_touches_nothing() -> None:
    rig = await serving(3)
    for number in range(1, 4):
        rig.workers.at(f"10.0.0.{number}").unreachable = True
    await rig.run(3000)
    assert rig.routable() == rig.cluster.names(POD) == ["d-0-0", "d-1-0", "d-2-0"]
    assert rig.condition("Ready") == ("True", "ServingDegraded")


async def test_a_node_that_comes_back_in_time_is_taken_back() -> None:
    rig = await serving(2)
    rig.workers.at("10.0.0.1").unreachable = True
    taken = [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]
    rig.cluster.pod_status("d-0-0", conditions=taken)
    await rig.run(2)
    assert rig.routable() == ["d-1-0"], "at once"
    assert rig.condition("Degraded") == ("True", "NodeLost")
    assert rig.condition("Ready") == ("True", "ServingDegraded")
    rig.workers.at("10.0.0.1").unreachable = False
    rig.cluster.pod_status("d-0-0", conditions=[{"type": "Ready", "status": "True"}, {"type": "ContainersReady", "status": "True"}])
    await rig.run(15)
    assert rig.condition("Ready") == ("True", "Serving")
    assert rig.cluster.names(POD) == ["d-0-0", "d-1-0"]


async def test_a_pod_that_never_ends_is_replaced_and_its_late_return_counts_for_nothing() -> None:
    rig = await serving(1)
    rig.workers.at("10.0.0.1").unreachable = True
    pod = rig.cluster.find(POD, "d-0-0")
    assert pod is not None
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    rig.cluster.pod_status("d-0-0", conditions=[{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}])
    await rig.run(5)
    assert rig.cluster.names(POD) == ["d-0-0", "d-0-1"], "not deleted by force"
    rig.start("d-0-1")
    await rig.run(5)
    rig.workers.at("10.0.0.1").unreachable = False
    rig.cluster.pod_status("d-0-0", conditions=[{"type": "Ready", "status": "True"}])
    await rig.run(20)
    assert (rig.status()["replicas"], rig.status()["replicaStates"][0]["incarnation"]) == (1, 1)
    assert [name for name in rig.routable() if name != "d-0-0"] == ["d-0-1"]
    assert rig.condition("Ready") == ("True", "Serving")
