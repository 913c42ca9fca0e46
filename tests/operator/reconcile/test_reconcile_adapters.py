# SPDX-License-Identifier: Apache-2.0
"""LoRAAdapters through real reconciles: accepted, loaded, replaced, removed, deferred and failed, with a true status of their own."""

from diffusion_operator.api.names import ADAPTER, DEPLOYMENT
from diffusion_operator.api.worker_state import RecordState, WireError, WorkerPhase
from support.operator.rig import Rig, adapter, deployment, serving, with_adapter

INVALID = WireError(code="InvalidAdapter", message="adapter folder '/loras/x': no adapter_config.json")
NO_MEMORY = WireError(code="InsufficientMemory", message="no room", retryable=True)


async def test_an_adapter_is_pushed_to_every_replica_and_its_digest_pinned() -> None:
    rig = await with_adapter(2)
    status = rig.adapter_status()
    assert rig.adapter_condition("Ready") == ("True", "LoadedEverywhere")
    assert rig.adapter_condition("Accepted") == ("True", "Accepted")
    assert rig.adapter_condition("SourceResolved") == ("True", "Resolved")
    assert rig.adapter_condition("Loaded") == ("True", "AllReplicas")
    assert (status["desiredReplicas"], status["loadedReplicas"], status["failedReplicas"], status["deferredReplicas"]) == (2, 2, 0, 0)
    resolved = {key: value for key, value in status["resolved"].items() if key != "resolvedAt"}
    assert resolved == {
        "source": "/loras/x", "digest": "sha256:loras-x", "sizeBytes": 100, "rank": 8, "alpha": "8", "modules": 24,
        "components": ("Transformer",), "format": "PEFT", "baseModelHint": "digits",
    }  # fmt: skip
    assert [(one["replica"], one["state"], one["bootId"], one["digest"]) for one in status["replicaInstances"]] == [
        (0, "Loaded", "boot-1", "sha256:loras-x"),
        (1, "Loaded", "boot-2", "sha256:loras-x"),
    ]
    assert rig.desired()["adapters"][0]["digest"] == "sha256:loras-x"
    assert rig.condition("AdaptersReady") == ("True", "AllReady")
    assert rig.status()["adapters"] == {"desired": 1, "ready": 1, "failed": 0}
    assert rig.cluster.events().count("AdapterLoaded") == 2
    assert rig.workers.at("10.0.0.1").calls == ["put x"]


async def test_a_new_adapter_does_not_take_an_awake_replica_out_of_service() -> None:
    rig = await serving()
    rig.workers.at("10.0.0.1").refusals["/loras/x"] = NO_MEMORY
    rig.cluster.put(adapter())
    await rig.run()
    assert rig.states() == ["Awake"]
    assert rig.routable() == ["d-0-0"]


async def test_an_adapter_before_its_deployment_says_so_and_is_loaded_when_it_comes() -> None:
    rig = Rig()
    rig.cluster.put(adapter())
    await rig.run()
    assert rig.adapter_condition("Accepted") == ("False", "DeploymentNotFound")
    assert rig.adapter_condition("Ready") == ("False", "DeploymentMissing")
    rig.cluster.put(deployment())
    await rig.run()
    assert rig.adapter_condition("Ready") == ("False", "Loading")
    rig.start_all()
    await rig.run()
    assert rig.adapter_condition("Ready") == ("True", "LoadedEverywhere")
    assert rig.workers.at("10.0.0.1").calls == [], "the worker loaded it from the mounted file"


async def test_a_deleted_adapter_leaves_the_file_and_every_replica() -> None:
    rig = await with_adapter(2)
    rig.cluster.remove(ADAPTER, "x")
    await rig.run()
    assert rig.desired()["adapters"] == []
    assert [rig.workers.at(ip).adapters for ip in ("10.0.0.1", "10.0.0.2")] == [{}, {}]
    assert rig.condition("AdaptersReady") == ("True", "NoAdapters")


async def test_a_replica_that_restarted_while_the_operator_was_away_is_found_as_it_is() -> None:
    """Restart a replica and the operator. The ConfigMap holds the adapters, so the operator calls nothing."""
    rig = await with_adapter()
    worker = rig.restart_container("d-0-0")
    rig.restart_operator()
    await rig.run()
    assert worker.calls == []
    assert rig.adapter_condition("Ready") == ("True", "LoadedEverywhere")
    assert rig.instance()["bootId"] == "boot-2"


async def test_a_worker_that_lost_its_adapter_gets_it_again() -> None:
    rig = await with_adapter()
    rig.workers.at("10.0.0.1").adapters.clear()
    await rig.run(30)
    assert rig.adapter_condition("Ready") == ("True", "LoadedEverywhere")
    assert rig.workers.at("10.0.0.1").calls == ["put x", "put x"]


async def test_an_invalid_adapter_fails_with_the_workers_words_and_the_base_still_serves() -> None:
    rig = await serving()
    rig.workers.at("10.0.0.1").refusals["/loras/x"] = INVALID
    rig.cluster.put(adapter())
    await rig.run(400)
    assert rig.adapter_condition("Ready") == ("False", "SourceError")
    assert rig.adapter_condition("SourceResolved") == ("False", "InvalidAdapter")
    assert rig.adapter_condition("Loaded") == ("False", "SomeReplicasFailed")
    assert rig.adapter_status()["replicaInstances"][0]["lastError"] == {
        "code": "InvalidAdapter",
        "message": INVALID.message,
        "retryable": False,
    }
    assert rig.workers.at("10.0.0.1").calls == ["put x"], "the same bytes are not tried again so soon"
    assert rig.condition("Ready") == ("True", "Serving")
    assert rig.condition("AdaptersReady") == ("False", "SomeFailed")
    assert "AdapterLoadFailed" in rig.cluster.events()
    rig.cluster.change(ADAPTER, "x", lambda spec: spec.update(source={"path": "/loras/good"}))
    await rig.run()
    assert rig.adapter_condition("Ready") == ("True", "LoadedEverywhere")


async def test_an_invalid_adapter_does_not_hold_a_starting_replica_back() -> None:
    rig = Rig()
    rig.cluster.put(deployment())
    rig.cluster.put(adapter())
    await rig.run()
    rig.start("d-0-0", refusals={"/loras/x": INVALID})
    await rig.run()
    assert rig.states() == ["Awake"]
    assert rig.adapter_condition("Ready") == ("False", "SourceError")


async def test_a_failure_that_may_pass_is_tried_again_with_growing_pauses_that_survive_the_operator() -> None:
    rig = await serving()
    worker = rig.workers.at("10.0.0.1")
    worker.refusals["/loras/x"] = NO_MEMORY
    rig.cluster.put(adapter())
    await rig.run(5)
    instance = rig.adapter_status()["replicaInstances"][0]
    assert (instance["state"], instance["attempts"], instance["lastError"]["code"]) == ("Failed", 1, "InsufficientMemory")
    assert "nextRetryTime" in instance
    rig.restart_operator()
    await rig.run(2)
    assert worker.calls == ["put x"], "the pause goes on"
    await rig.run(60)
    assert len(worker.calls) == 3, "after 10 s, then after 20 s more"
    worker.refusals.clear()
    await rig.run(90)
    assert rig.adapter_condition("Ready") == ("True", "LoadedEverywhere")


async def test_a_digest_that_does_not_match_is_never_loaded() -> None:
    rig = await with_adapter(digest="sha256:" + "0" * 64)
    assert rig.adapter_condition("SourceResolved") == ("False", "DigestMismatch")
    assert "resolved" not in rig.adapter_status()


async def test_the_older_of_two_adapters_has_the_name_and_the_newer_takes_over_when_it_goes() -> None:
    rig = await serving()
    rig.cluster.put(adapter("old", "/loras/old", adapterName="style"))
    await rig.run()
    rig.cluster.put(adapter("new", "/loras/new", adapterName="style"))
    await rig.run()
    assert rig.adapter_condition("Accepted", "new") == ("False", "NameConflict")
    assert rig.adapter_status("new")["owner"] == {"servedName": "style", "conflictWith": "old"}
    assert rig.adapter_condition("Ready", "old") == ("True", "LoadedEverywhere")
    assert "AdapterRejected" in rig.cluster.events()
    rig.cluster.remove(ADAPTER, "old")
    await rig.run()
    assert rig.adapter_condition("Ready", "new") == ("True", "LoadedEverywhere")
    assert rig.workers.at("10.0.0.1").adapters["style"].source.path == "/loras/new"


async def test_an_adapter_may_not_have_the_served_name() -> None:
    rig = await with_adapter(adapterName="d")
    assert rig.adapter_condition("Accepted") == ("False", "NameReserved")
    assert rig.workers.at("10.0.0.1").adapters == {}


async def test_the_resident_adapter_over_the_limit_is_refused_and_the_others_stay() -> None:
    """Check that a second Resident adapter is refused at a limit of one, since it would never be evicted. It loads once the first is
    gone."""
    rig = await serving(lora={"maxLoaded": 1})
    rig.cluster.put(adapter("a", "/loras/a", residency="Resident"))
    await rig.run()
    rig.cluster.put(adapter("b", "/loras/b", residency="Resident"))
    rig.cluster.put(adapter("c", "/loras/c"))
    await rig.run()
    assert rig.adapter_condition("Ready", "a") == ("True", "LoadedEverywhere")
    assert rig.adapter_condition("Accepted", "b") == ("False", "CapacityExceeded")
    assert rig.adapter_condition("Ready", "c") == ("True", "LoadedEverywhere"), "one that may be evicted takes no place for good"
    assert rig.condition("AdaptersReady") == ("False", "CapacityExceeded")
    assert "is 1, and it has as many older adapters with the residency Resident" in rig.message("AdaptersReady")
    rig.cluster.remove(ADAPTER, "a")
    await rig.run()
    assert rig.adapter_condition("Ready", "b") == ("True", "LoadedEverywhere")


async def test_a_sleeping_replica_is_not_woken_for_an_adapter_and_has_it_before_it_serves() -> None:
    rig = await serving(sleep={"policy": "Asleep"})
    worker = rig.workers.at("10.0.0.1")
    worker.calls.clear()
    rig.cluster.put(adapter())
    await rig.run()
    assert worker.calls == ["put x"], "told, and not woken"
    assert worker.adapters["x"].state is RecordState.DEFERRED
    assert rig.adapter_condition("Ready") == ("False", "Deferred")
    assert rig.adapter_condition("Loaded") == ("False", "WaitingForWake")
    assert rig.adapter_status()["deferredReplicas"] == 1
    assert rig.condition("AdaptersReady") == ("False", "Deferred")
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(sleep={}))
    await rig.run()
    assert [call.split("-")[0] for call in worker.calls] == ["put x", "wake wake"], "it loaded by itself what it knew"
    assert rig.adapter_condition("Ready") == ("True", "LoadedEverywhere")


async def test_an_adapter_that_a_sleeping_replica_cannot_fetch_is_told_before_anybody_wakes_it() -> None:
    rig = await serving(sleep={"policy": "Asleep"})
    worker = rig.workers.at("10.0.0.1")
    worker.refusals["/loras/x"] = WireError(code="SourceNotFound", message="/loras/x: no such file", retryable=True)
    rig.cluster.put(adapter())
    await rig.run()
    assert rig.instance()["state"] == "Failed"
    assert rig.adapter_condition("SourceResolved") == ("False", "SourceNotFound")
    del worker.refusals["/loras/x"]
    await rig.run(60)
    assert rig.instance()["state"] == "Deferred"
    assert (rig.states(), rig.adapter_condition("Ready")) == (["Asleep"], ("False", "Deferred"))


async def test_a_sleep_that_discards_defers_what_was_loaded_and_the_wake_brings_it_back() -> None:
    rig = await with_adapter()
    worker = rig.workers.at("10.0.0.1")
    worker.calls.clear()
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(sleep={"policy": "Asleep", "level": "Discard"}))
    await rig.run(60)
    assert worker.adapters["x"].state is RecordState.DEFERRED
    assert rig.instance()["state"] == "Deferred"
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(sleep={}))
    await rig.run()
    assert rig.adapter_condition("Ready") == ("True", "LoadedEverywhere")
    assert not [call for call in worker.calls if call.startswith("put")], "the worker knew what it had"


async def test_a_new_strength_reaches_a_sleeping_replica_once() -> None:
    rig = await with_adapter()
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(sleep={"policy": "Asleep"}))
    await rig.run()
    worker = rig.workers.at("10.0.0.1")
    worker.calls.clear()
    rig.cluster.change(ADAPTER, "x", lambda spec: spec.update(defaultScale="0.5"))
    await rig.run(120)
    assert worker.calls == ["put x"]
    assert worker.adapters["x"].scale == 0.5
    assert rig.states() == ["Asleep"]


async def test_an_adapter_deleted_while_its_replica_sleeps_is_gone_before_it_serves() -> None:
    """Delete an adapter while its replica sleeps. It leaves the ConfigMap and the sleeping worker at once."""
    rig = await with_adapter()
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(sleep={"policy": "Asleep"}))
    await rig.run()
    rig.cluster.remove(ADAPTER, "x")
    await rig.run()
    assert rig.desired()["adapters"] == []
    assert rig.workers.at("10.0.0.1").adapters == {}, "told at once"
    assert rig.states() == ["Asleep"]
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(sleep={}))
    await rig.run()
    assert rig.workers.at("10.0.0.1").adapters == {}
    assert rig.states() == ["Awake"]
    assert rig.cluster.notes("AdapterUnloaded") == ["Removed: replica 0 has unloaded the adapter"]


async def test_a_replica_that_wakes_is_not_awake_before_its_adapters_are_in_place() -> None:
    rig = await serving(2, sleep={"policy": "Asleep"})
    rig.cluster.put(adapter())
    await rig.run()
    first = rig.workers.at("10.0.0.1")
    first.phase = WorkerPhase.READY
    first.adapters.clear()
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(sleep={}))
    await rig.run(0.04)
    await rig.run(0.02)
    assert rig.states()[0] == "Verifying"
    await rig.run()
    assert rig.states() == ["Awake", "Awake"]


async def test_an_adapter_whose_deployment_is_deleted_says_so_and_one_made_again_serves_it() -> None:
    rig = await with_adapter()
    rig.cluster.remove(DEPLOYMENT, "d")
    await rig.run()
    status = rig.adapter_status()
    assert rig.adapter_condition("Accepted") == ("False", "DeploymentNotFound")
    assert "replicaInstances" not in status
    assert "resolved" not in status
    assert status["loadedReplicas"] == 0
    assert (rig.adapter_condition("UpToDate"), rig.adapter_condition("Degraded")) == (
        ("Unknown", "NotLoaded"),
        ("True", "DeploymentMissing"),
    )
    rig.cluster.put(deployment())
    await rig.run()
    rig.start_all(digests={"/loras/x": "sha256:new"})
    await rig.run()
    assert rig.adapter_condition("Ready") == ("True", "LoadedEverywhere")
    assert rig.adapter_status()["resolved"]["digest"] == "sha256:new", "the new deployment pins again"


async def test_adapters_of_another_deployment_are_left_alone() -> None:
    rig = await serving()
    rig.cluster.put(adapter("other", deployment="e"))
    await rig.run()
    assert rig.workers.at("10.0.0.1").adapters == {}
    assert rig.adapter_condition("Ready", "other") == ("False", "DeploymentMissing")


async def test_a_new_replica_loads_by_itself_while_the_adapter_stays_ready_elsewhere() -> None:
    rig = await with_adapter()
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(replicas=2))
    await rig.run()
    assert rig.adapter_condition("Ready") == ("True", "LoadedWhereAwake")
    assert rig.adapter_message("Ready") == "loaded on 1 of 2 replicas"
    assert rig.adapter_condition("Loaded") == ("False", "WaitingForEngine")
    rig.start_all()
    await rig.run()
    assert rig.adapter_condition("Loaded") == ("True", "AllReplicas")


async def test_a_replica_that_comes_while_the_adapter_failed_elsewhere_tries_by_itself() -> None:
    """Check that a new replica loads an adapter that failed in another one: each replica resolves the source by itself."""
    rig = await serving()
    rig.workers.at("10.0.0.1").refusals["/loras/x"] = INVALID
    rig.cluster.put(adapter())
    await rig.run()
    assert rig.adapter_condition("Ready") == ("False", "SourceError")
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(replicas=2))
    await rig.run()
    rig.start_all()
    await rig.run(30)
    assert [rig.instance(group=group)["state"] for group in (0, 1)] == ["Failed", "Loaded"]
    assert rig.adapter_condition("Ready") == ("False", "PartiallyLoaded")
