# SPDX-License-Identifier: Apache-2.0
"""A deployment's life through real reconciles: create, scale, replace, sleep, failures, and the status of each."""

from typing import Any

from diffusion_operator.api.names import CONFIG_MAP, DEPLOYMENT, EVENT, POD, SECRET, SERVICE
from diffusion_operator.api.worker_state import LoadReport, LossReport, WireError, WorkerPhase
from support.operator.rig import Rig, deployment, serving


async def events(rig: Rig, reason: str) -> list[Any]:
    return [event for event in await rig.cluster.list(EVENT, "default") if event["reason"] == reason]


async def test_a_new_deployment_gets_its_children_and_serves() -> None:
    rig = Rig()
    rig.cluster.put(deployment(replicas=2))
    await rig.run()
    assert rig.cluster.names(POD) == ["d-0-0", "d-1-0"]
    assert rig.cluster.names(SERVICE) == ["d"]
    assert rig.cluster.names(CONFIG_MAP) == ["d-desired"]
    assert rig.cluster.names(SECRET) == ["d-control"]
    assert rig.condition("Ready") == ("False", "Starting")
    rig.start_all()
    await rig.run()
    assert rig.condition("Ready") == ("True", "Serving")
    assert rig.condition("Available") == ("True", "MinimumAvailable")
    assert rig.condition("Progressing") == ("True", "RolloutComplete")
    assert rig.condition("Scheduled") == ("True", "AllScheduled")
    assert rig.condition("Awake") == ("True", "AllAwake")
    assert rig.condition("AdaptersReady") == ("True", "NoAdapters")
    assert rig.condition("Degraded") == ("False", "AsExpected")
    status = rig.status()
    assert (status["replicas"], status["readyReplicas"], status["awakeReplicas"], status["updatedReplicas"]) == (2, 2, 2, 2)
    assert status["model"] == {"source": "/models/digits", "pipeline": "StableDiffusion3Pipeline", "sizeBytes": 5}
    assert status["servedName"] == "d"
    assert rig.routable() == ["d-0-0", "d-1-0"]
    assert rig.cluster.events() == ["ReplicaReady", "ReplicaReady"]


async def test_scaling_down_spares_the_busy_replica_and_unroutes_the_victim_first() -> None:
    rig = await serving(2)
    rig.workers.at("10.0.0.1").in_flight = 0
    rig.workers.at("10.0.0.2").in_flight = 3
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(replicas=1))
    await rig.run(0.9)
    assert rig.routable() == ["d-1-0"]
    assert rig.cluster.names(POD) == ["d-0-0", "d-1-0"], "unrouted first, deleted when every node has heard of it"
    await rig.run()
    assert rig.cluster.names(POD) == ["d-1-0"]
    assert rig.condition("Ready") == ("True", "Serving")


async def test_a_changed_template_replaces_the_replicas_one_by_one() -> None:
    rig = await serving(2)
    old = rig.status()["currentRevision"]
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(engine={"env": [{"name": "A", "value": "1"}]}))
    await rig.run()
    assert len(rig.cluster.names(POD)) == 2
    assert rig.condition("Progressing") == ("True", "RolloutProgressing")
    assert rig.condition("Ready") == ("True", "ServingDegraded")
    assert rig.status()["awakeReplicas"] == 1, "only one is taken down at a time"
    assert rig.status()["currentRevision"] == old
    rig.start_all()
    await rig.run()
    rig.start_all()
    await rig.run()
    assert rig.cluster.names(POD) == ["d-0-1", "d-1-1"]
    assert rig.condition("Progressing") == ("True", "RolloutComplete")
    assert rig.status()["currentRevision"] == rig.status()["updateRevision"] != old
    assert "RolloutComplete" in rig.cluster.events()


async def test_a_template_that_cannot_start_leaves_the_other_replicas_alone_and_can_be_taken_back() -> None:
    rig = await serving(3)
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(engine={"image": "nowhere/none:1"}))
    await rig.run()
    pending = [name for name in rig.cluster.names(POD) if name.endswith("-1")]
    assert len(pending) == 1
    rig.cluster.waiting(pending[0], "ImagePullBackOff", 'Back-off pulling image "nowhere/none:1"')
    await rig.run(60)
    assert rig.status()["awakeReplicas"] == 2
    assert rig.condition("Ready") == ("True", "ServingDegraded")
    assert 'Back-off pulling image "nowhere/none:1"' in rig.message("Ready")
    assert rig.condition("Progressing") == ("False", "ImagePullError")
    assert rig.condition("Degraded") == ("True", "ReplicaFailed")
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(engine={}))
    await rig.run()
    rig.start_all()
    await rig.run()
    assert rig.condition("Ready") == ("True", "Serving")


async def test_the_default_image_stays_over_edits_that_are_taken_back_until_a_restart_by_annotation() -> None:
    rig = await serving(1)
    first = rig.status()["updateRevision"]
    rig.restart_operator()
    rig.runtime.settings = type(rig.runtime.settings)(engine_image="worker:2", operator_key=b"k" * 32)
    await rig.run()
    assert rig.cluster.names(POD) == ["d-0-0"]
    assert rig.condition("DefaultImage") == ("False", "NewerExists")
    for edit in ({"maxBatchSize": 4}, {"image": "own:1"}):
        rig.cluster.change(DEPLOYMENT, "d", lambda spec, edit=edit: spec.update(engine=edit))
        await rig.run()
        assert (rig.status()["defaultEngineImage"], rig.status()["engineImage"]) == ("worker:1", edit.get("image", "worker:1"))
    assert rig.condition("DefaultImage") == ("", ""), "the spec names an image"
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.pop("engine"))
    await rig.run()
    assert rig.status()["updateRevision"] == first
    assert "kubectl annotate -n default dd d diffusion-operator.dev/restartedAt=" in rig.message("DefaultImage")
    found = rig.cluster.find(DEPLOYMENT, "d")
    assert found is not None
    found["metadata"]["annotations"] = {"diffusion-operator.dev/restartedAt": "now"}
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(replicas=0))
    await rig.run()
    assert (rig.status()["engineImage"], rig.condition("DefaultImage")) == ("worker:2", ("True", "Current"))


async def test_a_model_that_does_not_exist_is_told_in_the_workers_own_words() -> None:
    rig = Rig()
    rig.cluster.put(deployment())
    await rig.run()
    rig.cluster.waiting("d-0-0", "ContainerCreating")
    rig.cluster.crashed("d-0-0", code=1, message="--model '/models/digits': no such folder")
    await rig.run()
    assert rig.condition("Ready") == ("False", "ModelError")
    assert "--model '/models/digits': no such folder" in rig.message("Ready")
    assert rig.states() == ["Failed"]
    failure = rig.status()["replicaStates"][0]["lastFailure"]
    assert (failure["exitCode"], failure["code"]) == (1, "StartupFailed")
    assert "ReplicaRestarted" in rig.cluster.events()
    rig.cluster.running("d-0-0", "10.9.9.9", restarts=2, last={"exitCode": 1, "message": "--model '/models/digits': no such folder"})
    await rig.run()
    assert rig.condition("Ready") == ("False", "ModelError"), "another try does not hide the reason"


async def test_a_restarted_container_is_a_new_boot_and_keeps_its_last_failure() -> None:
    rig = await serving(1)
    rig.restart_container("d-0-0", code=70, message="rank 0 died")
    await rig.run()
    group = rig.status()["replicaStates"][0]
    assert (group["state"], group["bootId"], group["restarts"], group["incarnation"]) == ("Awake", "boot-2", 1, 0)
    assert (group["lastFailure"]["exitCode"], group["lastFailure"]["message"]) == (70, "rank 0 died")
    assert rig.condition("Ready") == ("True", "Serving")


async def test_the_load_is_shown_while_it_lasts() -> None:
    rig = Rig()
    rig.cluster.put(deployment())
    await rig.run()
    worker = rig.start("d-0-0", phase=WorkerPhase.STARTING, load=LoadReport(stage="LoadingWeights", bytes_done=30, bytes_total=60))
    await rig.run()
    assert rig.states() == ["Starting"]
    assert rig.status()["replicaStates"][0]["load"] == {"stage": "LoadingWeights", "bytesDone": 30, "bytesTotal": 60, "percent": 50}
    assert rig.condition("Progressing") == ("True", "LoadingModel")
    worker.phase = WorkerPhase.READY
    await rig.run()
    assert rig.states() == ["Awake"]
    assert "load" not in rig.status()["replicaStates"][0]


async def test_progress_is_written_at_most_each_five_seconds() -> None:
    rig = Rig()
    rig.cluster.put(deployment())
    await rig.run()
    worker = rig.start("d-0-0", phase=WorkerPhase.STARTING, load=LoadReport(stage="LoadingWeights", bytes_done=0, bytes_total=1000))
    await rig.run()
    writes = rig.cluster.status_writes
    for step in range(20):
        worker.load = LoadReport(stage="LoadingWeights", bytes_done=step, bytes_total=1000)
        await rig.run(1)
    assert rig.cluster.status_writes - writes <= 5


async def test_going_to_sleep_and_waking_up_is_told_at_every_step() -> None:
    rig = await serving(2)
    for ip in ("10.0.0.1", "10.0.0.2"):
        rig.workers.at(ip).slow = True
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(sleep={"policy": "Asleep"}))
    await rig.run()
    assert rig.states() == ["Draining", "Draining"]
    assert rig.condition("Ready") == ("False", "SleepRequested")
    assert rig.condition("Awake") == ("False", "GoingToSleep")
    assert rig.condition("Available") == ("False", "Sleeping")
    for ip in ("10.0.0.1", "10.0.0.2"):
        rig.workers.at(ip).finish()
    await rig.run()
    assert rig.states() == ["Asleep", "Asleep"]
    assert rig.condition("Awake") == ("False", "AllAsleep")
    assert rig.condition("Degraded") == ("False", "AsExpected")
    assert rig.status()["asleepReplicas"] == 2
    assert rig.status()["readyReplicas"] == 2
    assert rig.routable() == ["d-0-0", "d-1-0"], "the live servers answer 503 Asleep"
    assert rig.desired()["sleep"]["policy"] == "Asleep"
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(sleep={}))
    await rig.run()
    assert rig.states() == ["Waking", "Waking"]
    assert rig.condition("Ready") == ("False", "Waking")
    rig.workers.at("10.0.0.1").finish()
    await rig.run()
    assert rig.condition("Ready") == ("True", "ServingDegraded")
    assert rig.routable() == ["d-0-0"], "while one is awake only awake ones are routed to"
    rig.workers.at("10.0.0.2").finish()
    await rig.run()
    assert rig.condition("Ready") == ("True", "Serving")
    assert rig.routable() == ["d-0-0", "d-1-0"]
    assert rig.cluster.events().count("Slept") == 2
    assert rig.cluster.events().count("Woke") == 2


async def test_a_wake_that_fails_is_told_and_tried_again_under_another_id() -> None:
    rig = await serving(1, sleep={"policy": "Asleep"})
    worker = rig.workers.at("10.0.0.1")
    assert rig.states() == ["Asleep"]
    worker.failing_operations, worker.operation_error = 2, WireError(code="RankFailed", message="rank 1 refused", retryable=True)
    worker.calls.clear()
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(sleep={}))
    await rig.run(2)
    assert rig.condition("Awake") == ("False", "WakeFailed")
    assert rig.condition("Degraded") == ("True", "WakeFailing")
    assert "rank 1 refused" in rig.message("Awake")
    await rig.run(60)
    assert [call.rpartition("-")[0] for call in worker.calls] == ["wake wake-2-1", "wake wake-2-2", "wake wake-2-3"]
    assert len(set(worker.calls)) == 3
    assert rig.cluster.events().count("WakeFailed") == 1, "not with every try"
    assert rig.condition("Ready") == ("True", "Serving")


async def test_one_failed_poll_changes_nothing_and_three_over_fifteen_seconds_are_told() -> None:
    rig = await serving(2)
    rig.workers.at("10.0.0.1").unreachable = True
    await rig.run(12)
    assert rig.condition("Ready") == ("True", "Serving")
    await rig.run(30)
    assert rig.condition("Ready") == ("True", "ServingDegraded"), "the kubelet's probe says that the data path is fine"
    assert rig.condition("Degraded") == ("True", "ControlUnreachable")
    assert rig.routable() == ["d-0-0", "d-1-0"]
    assert "calls to its control port failed" in rig.message("Degraded")
    rig.workers.at("10.0.0.1").unreachable = False
    await rig.run(10)
    assert rig.condition("Ready") == ("True", "Serving")


async def test_an_unreachable_replica_whose_data_port_fails_too_is_not_ready() -> None:
    rig = await serving(1)
    rig.workers.at("10.0.0.1").unreachable = True
    rig.cluster.running("d-0-0", "10.0.0.1", ready=False)
    await rig.run(40)
    assert rig.condition("Ready") == ("False", "ControlUnreachable")


async def test_a_replica_is_not_counted_ready_before_its_probe_passes() -> None:
    rig = await serving(1)
    rig.cluster.running("d-0-0", "10.0.0.1", ready=False)
    await rig.run()
    assert rig.condition("Ready") == ("False", "Starting")
    assert "the readiness probe of replica 0 does not pass" in rig.message("Ready")
    assert rig.status()["readyReplicas"] == 0


async def test_a_lost_rank_group_is_told_with_its_reason() -> None:
    rig = await serving(1)
    worker = rig.workers.at("10.0.0.1")
    worker.phase, worker.failure = WorkerPhase.FAILED, WireError(code="EngineFailed", message="rank 1 was ended by SIGKILL")
    await rig.run(15)
    assert rig.condition("Degraded") == ("True", "RankLost")
    assert "rank 1 was ended by SIGKILL" in rig.message("Ready")


async def test_a_replica_that_starts_its_ranks_again_is_told_as_degraded_and_left_to_itself() -> None:
    rig = await serving(1)
    worker = rig.workers.at("10.0.0.1")
    words = "rank 1 (pid 7) was ended by SIGKILL"
    worker.phase, worker.failure = WorkerPhase.RESTARTING, WireError(code="RankFailed", message=words, retryable=True)
    worker.generation, worker.last_loss = 2, LossReport(fault="Died", message=words)
    await rig.run(15)
    assert (rig.condition("Degraded"), rig.condition("Ready")) == (("True", "RankLost"), ("False", "RankLost"))
    assert rig.condition("Progressing") == ("True", "LoadingModel")
    assert words in rig.message("Degraded")
    # The worker's server keeps its requests and takes new ones.
    assert rig.routable() == ["d-0-0"]
    worker.phase, worker.failure = WorkerPhase.READY, None
    await rig.run(15)
    assert (rig.condition("Degraded"), rig.condition("Ready")) == (("False", "AsExpected"), ("True", "Serving"))
    assert rig.cluster.names(POD) == ["d-0-0"]
    [event] = await events(rig, "RankLost")
    assert (event["type"], words in event["message"]) == ("Warning", True)


async def test_a_rank_lost_between_two_looks_is_an_event_all_the_same() -> None:
    rig = await serving(1)
    worker = rig.workers.at("10.0.0.1")
    worker.generation, worker.last_loss = 3, LossReport(fault="Stalled", message="rank 0 (pid 9) was stopped by a signal")
    rig.restart_operator()
    await rig.run(60)
    [event] = await events(rig, "RankLost")
    assert "Stalled: rank 0 (pid 9) was stopped by a signal" in event["message"]


async def test_the_operator_restarts_without_a_trace() -> None:
    rig = await serving(2)
    writes, calls = rig.cluster.status_writes, [list(rig.workers.at(ip).calls) for ip in ("10.0.0.1", "10.0.0.2")]
    rig.restart_operator()
    await rig.run(60)
    assert rig.cluster.status_writes == writes
    assert calls == [rig.workers.at(ip).calls for ip in ("10.0.0.1", "10.0.0.2")]
    assert rig.cluster.names(POD) == ["d-0-0", "d-1-0"]


async def test_a_deployment_made_again_under_the_same_name_avoids_the_names_of_old_pods() -> None:
    rig = await serving(1)
    old = rig.cluster.find(POD, "d-0-0")
    rig.cluster.remove(DEPLOYMENT, "d")
    assert old is not None
    old["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    rig.cluster.put(old)  # the old object is still draining
    rig.cluster.put(deployment())
    await rig.run()
    assert rig.cluster.names(POD) == ["d-0-0", "d-0-1"]
    assert [group["leaderPod"] for group in rig.status()["replicaStates"]] == ["d-0-1"]


async def test_tokens_differ_by_deployment() -> None:
    rig = await serving(1)
    first = set(rig.workers.tokens)
    rig.cluster.put(deployment("e"))
    await rig.run()
    rig.start("e-0-0")
    await rig.run()
    assert len(first) == 1
    assert len(rig.workers.tokens) == 2
