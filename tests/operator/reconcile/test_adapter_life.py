# SPDX-License-Identifier: Apache-2.0
"""The life of an adapter on its replicas, through real reconciles: fetched, replaced, evicted, drained, and counted by use."""

import msgspec
import pytest

from diffusion_operator.api.names import ADAPTER, DEPLOYMENT, POD
from diffusion_operator.api.worker_state import RecordState, WireError
from support.operator.rig import Rig, adapter, serving, with_adapter
from support.operator.scripted_workers import ScriptedWorker

MIB = 1024 * 1024
BROKEN = WireError(code="InvalidAdapter", message="tensor 'a.lora_A' has NaN")


def worker_of(rig: Rig, number: int = 1) -> ScriptedWorker:
    return rig.workers.at(f"10.0.0.{number}")


async def fetching() -> tuple[Rig, ScriptedWorker]:
    """Start a fetch of an adapter that does not end by itself; return the rig and its worker."""
    rig = await serving()
    worker = worker_of(rig)
    worker.held.add("/loras/x")
    rig.cluster.put(adapter())
    await rig.run()
    return rig, worker


# Fetching


async def test_a_fetch_shows_its_progress_and_then_the_adapter() -> None:
    """Check that a slow fetch is reported by its bytes and not as a failure, and is not begun twice."""
    rig, worker = await fetching()
    worker.fetched("x", 10 * MIB, 340 * MIB)
    await rig.run(20)
    assert rig.adapter_condition("Ready") == ("False", "Loading")
    assert "replica 0: Fetching, 10 of 340 MiB" in rig.adapter_message("Ready")
    instance = rig.instance()
    assert (instance["state"], instance["fetchedBytes"], instance["totalBytes"]) == ("Fetching", 10 * MIB, 340 * MIB)
    assert rig.adapter_condition("Loaded") == ("False", "WaitingForEngine")
    assert worker.calls == ["put x"], "a call that outlives its limit is no failure, and not made again while it is at work"
    worker.held.clear()
    worker.finish_load("x")
    await rig.run(20)
    assert rig.adapter_condition("Ready") == ("True", "LoadedEverywhere")
    assert "fetchedBytes" not in rig.instance()


async def test_progress_is_written_at_most_every_five_seconds_and_in_steps_of_five_percent() -> None:
    rig, worker = await fetching()
    worker.fetched("x", 0, 1000 * MIB)
    await rig.run(20)
    before = rig.cluster.status_writes
    for done in range(1, 101):  # 50 s in steps of half a second, 1 % each
        worker.fetched("x", done * 10 * MIB, 1000 * MIB)
        await rig.run(0.5)
    assert 8 <= rig.cluster.status_writes - before <= 11
    before = rig.cluster.status_writes
    worker.fetched("x", 1000 * MIB - 1, 1000 * MIB)
    await rig.run(60)
    assert rig.cluster.status_writes == before, "less than five percent is nothing to tell"


async def test_a_fetch_that_fails_after_its_call_backs_off_like_any_other() -> None:
    """Let the worker end a fetch that gets no byte for a minute; the operator shows the error and tries again after a pause."""
    rig, worker = await fetching()
    worker.refusals["/loras/x"] = WireError(code="NetworkError", message="no byte for 60 s, 12 of 340 MiB")
    worker.finish_load("x")
    await rig.run(2)
    assert rig.adapter_condition("SourceResolved") == ("False", "NetworkError")
    assert rig.adapter_condition("Ready") == ("False", "SourceError")
    assert "12 of 340 MiB" in rig.adapter_message("Ready")
    instance = rig.instance()
    assert (instance["state"], instance["attempts"], instance["lastError"]["retryable"]) == ("Failed", 1, True)
    assert "nextRetryTime" in instance
    assert worker.calls == ["put x"]
    await rig.run(12)
    assert worker.calls == ["put x"] * 2
    worker.held.clear()
    worker.refusals.clear()
    worker.finish_load("x")
    await rig.run()
    assert rig.adapter_condition("Ready") == ("True", "LoadedEverywhere")


async def test_a_load_that_its_worker_never_ends_is_asked_for_again_after_its_deadline() -> None:
    rig = await serving()
    worker = worker_of(rig)
    worker.held.add("/loras/x")
    rig.cluster.put(adapter(loadTimeoutSeconds=60))
    await rig.run(85)
    assert worker.calls == ["put x"]
    await rig.run(25)
    assert worker.calls == ["put x", "put x"]


# Changing


async def test_the_old_version_serves_until_the_new_one_is_there() -> None:
    rig = await with_adapter()
    worker = worker_of(rig)
    worker.held.add("/loras/y")
    rig.cluster.change(ADAPTER, "x", lambda spec: spec.update(source={"path": "/loras/y"}))
    await rig.run(20)
    assert rig.adapter_condition("UpToDate") == ("False", "OldDigestStillLoaded")
    assert rig.adapter_message("UpToDate") == "another version, sha256:loras-x, still serves on replica 0"
    assert rig.adapter_condition("Ready") == ("False", "Loading")
    assert rig.adapter_condition("Degraded") == ("False", "AsExpected"), "no drift: the source was changed"
    assert worker.adapters["x"].state is RecordState.LOADED
    assert rig.desired()["adapters"][0]["digest"] is None
    worker.held.clear()
    worker.finish_load("x")
    await rig.run()
    assert rig.adapter_condition("UpToDate") == ("True", "Current")
    assert rig.adapter_condition("Ready") == ("True", "LoadedEverywhere")
    assert rig.adapter_status()["resolved"]["digest"] == rig.desired()["adapters"][0]["digest"] == "sha256:loras-y"


async def test_an_error_of_the_source_is_said_until_a_try_has_found_out_more() -> None:
    """Check that SourceResolved keeps a source's error while tries are under way. Once each try turned the condition to Unknown and
    back."""
    rig, worker = await fetching()
    worker.refusals["/loras/x"] = WireError(code="NetworkError", message="no byte for 60 s, 12 of 340 MiB")
    worker.finish_load("x")
    await rig.run(2)
    since = next(one for one in rig.adapter_status()["conditions"] if one["type"] == "SourceResolved")["lastTransitionTime"]
    for _ in range(2):
        await rig.run(30)
        assert rig.instance()["state"] == "Fetching", "a try is under way"
        assert rig.adapter_condition("SourceResolved") == ("False", "NetworkError")
        assert rig.adapter_message("SourceResolved") == (
            "replica 0: NetworkError: no byte for 60 s, 12 of 340 MiB; "
            "no replica has a newer answer from the source yet: see the condition Loaded"
        )
        worker.finish_load("x")
        await rig.run(2)
        assert rig.adapter_message("SourceResolved") == "replica 0: NetworkError: no byte for 60 s, 12 of 340 MiB"
    found = next(one for one in rig.adapter_status()["conditions"] if one["type"] == "SourceResolved")
    assert found["lastTransitionTime"] == since
    worker.refusals.clear()
    worker.held.clear()
    await rig.run(120)
    assert rig.adapter_condition("SourceResolved") == ("True", "Resolved")


async def test_after_an_edit_nothing_is_said_of_the_earlier_source() -> None:
    rig, worker = await fetching()
    assert rig.adapter_condition("SourceResolved") == ("Unknown", "NotKnown")
    worker.refusals["/loras/x"] = BROKEN
    worker.finish_load("x")
    await rig.run(2)
    assert rig.adapter_condition("SourceResolved") == ("False", "InvalidAdapter")
    worker.held.add("/loras/y")
    rig.cluster.change(ADAPTER, "x", lambda spec: spec.update(source={"path": "/loras/y"}))
    await rig.run(20)
    assert rig.adapter_condition("SourceResolved") == ("Unknown", "NotKnown")


async def test_a_commit_that_a_replica_found_is_resolved_while_its_load_fails_and_is_tried_again() -> None:
    """Check that the source counts as resolved though the replica has no memory for the adapter's file."""
    rig = await serving()
    worker = worker_of(rig)
    worker.refusals["hf://someone/x@main"] = WireError(code="InsufficientMemory", message="3 of 5 bytes free", retryable=True)
    worker.revisions["hf://someone/x@main"] = "c0ffee"
    rig.cluster.put(adapter() | {"spec": {"deploymentRef": {"name": "d"}, "source": {"huggingFace": {"repo": "someone/x"}}}})
    await rig.run()
    assert rig.adapter_condition("Ready") == ("False", "Failed")
    assert rig.adapter_condition("SourceResolved") == ("True", "Resolved")
    assert "c0ffee; status.resolved is set when one has loaded it: see the condition Loaded" in rig.adapter_message("SourceResolved")
    assert "resolved" not in rig.adapter_status()


async def test_a_new_source_that_is_broken_leaves_the_old_version_serving() -> None:
    rig = await with_adapter()
    worker = worker_of(rig)
    worker.refusals["/loras/y"] = BROKEN
    rig.cluster.change(ADAPTER, "x", lambda spec: spec.update(source={"path": "/loras/y"}))
    await rig.run(900)
    assert rig.adapter_condition("Ready") == ("False", "SourceError")
    assert rig.adapter_message("Ready").endswith("another version, sha256:loras-x, still serves on replica 0")
    assert rig.adapter_condition("SourceResolved") == ("False", "InvalidAdapter")
    assert worker.adapters["x"].digest == "sha256:loras-x"
    assert worker.calls == ["put x"] * 3, "the same bytes are tried again after ten minutes"


async def test_a_broken_new_source_that_only_the_document_tells_of_is_an_error_too() -> None:
    rig = await with_adapter()
    worker = worker_of(rig)
    worker.held.add("/loras/y")
    worker.refusals["/loras/y"] = BROKEN
    rig.cluster.change(ADAPTER, "x", lambda spec: spec.update(source={"path": "/loras/y"}))
    await rig.run(20)
    worker.finish_load("x")
    worker.held.clear()
    await rig.run(900)
    assert rig.adapter_condition("SourceResolved") == ("False", "InvalidAdapter")
    assert len(worker.calls) == 3


async def test_scale_residency_and_priority_are_told_without_a_load() -> None:
    rig = await with_adapter()
    worker = worker_of(rig)
    rig.cluster.change(ADAPTER, "x", lambda spec: spec.update(defaultScale="0.5", residency="Resident", priority=3))
    await rig.run()
    record = worker.adapters["x"]
    assert (record.scale, record.residency.value, record.priority) == (0.5, "Resident", 3)
    assert worker.loads == ["x"]
    assert rig.adapter_status()["observedGeneration"] == 2
    assert rig.adapter_condition("Ready") == ("True", "LoadedEverywhere")


async def test_other_components_are_another_adapter_even_of_the_same_bytes() -> None:
    rig = await serving()
    worker = worker_of(rig)
    worker.components = ("transformer", "text_encoder")
    rig.cluster.put(adapter(components=["Transformer"]))
    await rig.run()
    assert worker.adapters["x"].components == ("transformer", "transformer_2")
    rig.cluster.change(ADAPTER, "x", lambda spec: spec.pop("components"))
    await rig.run()
    assert worker.adapters["x"].components == ("transformer", "text_encoder")
    assert rig.adapter_status()["resolved"]["components"] == ("Transformer", "TextEncoder")


async def test_an_edit_that_is_taken_back_at_once_leaves_what_was() -> None:
    """Edit an adapter and take the edit back at once. The generation moves twice, and nothing is loaded again."""
    rig = await with_adapter()
    rig.cluster.change(ADAPTER, "x", lambda spec: spec.update(source={"path": "/loras/y"}))
    rig.cluster.change(ADAPTER, "x", lambda spec: spec.update(source={"path": "/loras/x"}))
    await rig.run()
    assert worker_of(rig).loads == ["x"]
    assert rig.adapter_status()["observedGeneration"] == 3
    assert rig.adapter_condition("UpToDate") == ("True", "Current")


async def test_an_edit_during_a_fetch_ends_with_what_was_asked_for_last() -> None:
    rig, worker = await fetching()
    rig.cluster.change(ADAPTER, "x", lambda spec: spec.update(source={"path": "/loras/y"}))
    await rig.run(2)
    assert worker.adapters["x"].digest == "sha256:loras-y"
    worker.held.clear()
    worker.finish_load("x")  # the load that the edit replaced ends late
    await rig.run()
    assert worker.adapters["x"].digest == "sha256:loras-y"
    assert rig.adapter_status()["resolved"]["digest"] == "sha256:loras-y"
    assert rig.adapter_condition("Ready") == ("True", "LoadedEverywhere")


# Cached and OnDemand


async def test_an_evicted_adapter_that_requests_load_again_is_ready() -> None:
    rig = await serving(lora={"onMissing": "Load"})
    rig.cluster.put(adapter())
    await rig.run()
    worker = worker_of(rig)
    worker.evict("x")
    await rig.run(30)
    assert worker.calls == ["put x"], "eviction is the engine's own business"
    assert rig.adapter_condition("Ready") == ("True", "CachedOnDemand")
    assert "not in memory on replica 0, where the next request for it loads it" in rig.adapter_message("Ready")
    assert rig.adapter_condition("Loaded") == ("False", "CachedOnDemand")
    assert rig.adapter_condition("Degraded") == ("False", "AsExpected")
    assert rig.condition("AdaptersReady") == ("True", "AllReady")
    assert rig.instance()["state"] == "Cached"


async def crowded(*evicted: str) -> Rig:
    """Start a replica with room for two of its four adapters, of which `d1` has a higher priority. Evict those in `evicted`, and return
    the rig 30 s later."""
    rig = await serving(lora={"maxLoaded": 1, "maxCached": 2})
    for name in ("a", "b", "c", "d1"):
        rig.cluster.put(adapter(name, f"/loras/{name}", priority=1 if name == "d1" else 0))
    await rig.run()
    for name in evicted:
        worker_of(rig).evict(name)
    worker_of(rig).loads.clear()
    await rig.run(30)
    return rig


async def test_an_evicted_adapter_whose_requests_are_refused_is_not_ready_and_says_what_to_change() -> None:
    rig = await crowded("a", "d1")
    assert rig.adapter_condition("Ready", "a") == ("False", "Evicted")
    for word in ("replica 0", "503 AdapterNotLoaded", "maxCached", "onMissing", "Resident"):
        assert word in rig.adapter_message("Ready", "a")
    assert rig.adapter_condition("Loaded", "a") == ("False", "Evicted")
    assert rig.adapter_condition("Ready", "b") == ("True", "LoadedEverywhere")
    assert rig.condition("AdaptersReady") == ("False", "CapacityExceeded")
    assert "2 adapters fit" in rig.message("AdaptersReady")


async def test_evicted_adapters_come_back_as_room_allows_by_their_priority_and_no_more_than_fit() -> None:
    rig = await crowded("a", "d1")
    assert worker_of(rig).loads == [], "there is no room: one more would push another one out"
    rig.cluster.remove(ADAPTER, "b")
    await rig.run(60)
    assert worker_of(rig).loads == ["d1"]
    assert rig.adapter_condition("Ready", "d1") == ("True", "LoadedEverywhere")
    assert rig.adapter_condition("Ready", "a") == ("False", "Evicted")
    rig.cluster.remove(ADAPTER, "c")
    await rig.run(60)
    assert worker_of(rig).loads == ["d1", "a"]
    assert rig.condition("AdaptersReady") == ("True", "AllReady")


async def test_a_replica_with_less_room_than_the_spec_says_is_not_filled_up() -> None:
    """Raise the spec's maxCached. A replica that still runs with the lower value must load nothing more."""
    rig = await crowded("a", "d1")
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(replicas=2, lora={"maxLoaded": 1, "maxCached": 4}))
    await rig.run(30)
    assert rig.cluster.names(POD) == ["d-0-0", "d-1-0"]
    assert worker_of(rig).loads == []


async def test_an_adapter_on_demand_is_ready_before_anybody_has_fetched_it() -> None:
    rig = await with_adapter(residency="OnDemand")
    worker = worker_of(rig)
    assert worker.loads == []
    assert rig.adapter_condition("Ready") == ("True", "CachedOnDemand")
    assert rig.adapter_condition("SourceResolved") == ("Unknown", "NotTried")
    assert rig.adapter_message("SourceResolved") == "no replica has fetched the adapter yet: its first request does"
    await rig.run(60)
    assert worker.calls == ["put x"]


async def test_an_adapter_on_demand_whose_last_request_could_not_load_it_is_not_ready() -> None:
    rig = await with_adapter(residency="OnDemand")
    worker = worker_of(rig)
    worker.evict("x", error=WireError(code="NetworkError", message="connection refused", retryable=True))
    await rig.run(60)
    assert rig.adapter_condition("Ready") == ("False", "SourceError")
    assert rig.adapter_condition("SourceResolved") == ("False", "NetworkError")
    assert worker.calls == ["put x"], "the next request tries it again, a put would not"
    worker.evict("x")
    await rig.run(30)
    assert rig.adapter_condition("Ready") == ("True", "CachedOnDemand")


async def test_a_resident_adapter_that_is_evicted_comes_back() -> None:
    rig = await with_adapter(residency="Resident")
    worker = worker_of(rig)
    worker.evict("x")
    await rig.run(15)
    assert worker.adapters["x"].state is RecordState.LOADED
    assert rig.adapter_condition("Degraded") == ("True", "EvictedUnexpectedly")
    assert "evicted the adapter 1 times" in rig.adapter_message("Degraded")
    assert rig.adapter_condition("Ready") == ("True", "LoadedEverywhere")
    await rig.run(620)
    assert rig.adapter_condition("Degraded") == ("False", "AsExpected")


async def test_a_resident_adapter_that_is_evicted_again_and_again_is_loaded_again_after_ten_minutes() -> None:
    """Check that reloads of an evicted adapter pause for ten minutes after three, since each would evict another adapter."""
    rig = await with_adapter(residency="Resident")
    worker = worker_of(rig)
    for _ in range(4):
        worker.evict("x")
        await rig.run(15)
    assert worker.loads == ["x"] * 4, "the first load and three more"
    assert rig.adapter_condition("Degraded") == ("True", "ReloadLoop")
    assert rig.adapter_condition("Ready") == ("False", "Failed")
    assert "evicted 4 times in 10 minutes" in rig.adapter_message("Ready")
    rig.restart_operator()
    await rig.run(500)
    assert worker.loads == ["x"] * 4, "a restart of the operator begins it no sooner"
    await rig.run(120)
    assert worker.loads == ["x"] * 5
    assert rig.adapter_condition("Ready") == ("True", "LoadedEverywhere")
    assert rig.adapter_condition("Degraded") == ("False", "AsExpected")


async def test_evictions_that_are_far_apart_are_no_loop() -> None:
    rig = await with_adapter(residency="Resident")
    worker = worker_of(rig)
    for _ in range(6):
        worker.evict("x")
        await rig.run(300)
    assert rig.adapter_condition("Ready") == ("True", "LoadedEverywhere")


# The pinned digest


async def test_a_replica_that_found_other_bytes_is_told_from_one_that_has_the_old_source() -> None:
    """Let two replicas resolve a moving branch at different commits. The second is reported as DigestDrift until it has the pinned
    bytes."""
    rig = await serving(2)
    hub = {"huggingFace": {"repo": "org/style"}}
    for number, commit in ((1, "c1"), (2, "c2")):
        worker = worker_of(rig, number)
        worker.revisions["hf://org/style@main"] = commit
        worker.digests |= {"hf://org/style@main": f"sha256:{commit}", "hf://org/style@c1": "sha256:c1"}
    worker_of(rig, 2).held.add("hf://org/style@c1")
    rig.cluster.put(adapter(source=hub))
    await rig.run(8)
    assert rig.adapter_status()["resolved"]["digest"] == "sha256:c1"
    assert rig.adapter_condition("Degraded") == ("True", "DigestDrift")
    assert rig.adapter_message("Degraded") == "replica 1 has sha256:c2, every replica must have sha256:c1"
    assert rig.cluster.notes("DigestMismatch") == ["replica 1 has sha256:c2, every replica must have sha256:c1"]
    pinned = rig.desired()["adapters"][0]
    assert (pinned["source"]["huggingFace"]["revision"], pinned["digest"]) == ("c1", "sha256:c1")
    worker_of(rig, 2).held.clear()
    worker_of(rig, 2).finish_load("x")
    await rig.run()
    assert rig.adapter_condition("Degraded") == ("False", "AsExpected")
    assert rig.adapter_condition("Ready") == ("True", "LoadedEverywhere")
    assert worker_of(rig, 1).loads == ["x"], "the pin is no reason to load the same bytes again"


async def test_an_adapter_that_a_wake_found_wrong_says_so_for_as_long_as_its_worker_does() -> None:
    """Check that the adapter is Degraded with VerificationFailed while its worker reports `verification_failed`, and stays Ready."""
    rig = await with_adapter()
    worker = worker_of(rig)
    worker.adapters["x"] = msgspec.structs.replace(worker.adapters["x"], verification_failed=True)
    await rig.run(15)
    assert rig.adapter_condition("Degraded") == ("True", "VerificationFailed")
    assert rig.adapter_message("Degraded").startswith("replica 0: after a wake")
    assert rig.adapter_condition("Ready") == ("True", "LoadedEverywhere")
    worker.adapters["x"] = msgspec.structs.replace(worker.adapters["x"], verification_failed=False)
    await rig.run(15)
    assert rig.adapter_condition("Degraded") == ("False", "AsExpected")


async def test_a_source_that_is_gone_leaves_what_is_loaded_alone() -> None:
    """Check that a replica keeps an adapter whose source is gone, while a new replica fails to load it until the source is back."""
    rig = await with_adapter()
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(replicas=2))
    await rig.run()
    gone = WireError(code="SourceNotFound", message="/loras/x: nothing there")
    rig.start("d-1-0", refusals={"/loras/x": gone})
    await rig.run(20)
    assert rig.adapter_condition("SourceResolved") == ("False", "SourceNotFound")
    assert rig.adapter_condition("Ready") == ("False", "PartiallyLoaded")
    assert rig.adapter_condition("UpToDate") == ("Unknown", "SourceNotResolved")
    assert (rig.instance(group=0)["state"], rig.instance(group=1)["state"]) == ("Loaded", "Failed")
    worker_of(rig, 2).refusals.clear()
    await rig.run(120)
    assert rig.adapter_condition("Ready") == ("True", "LoadedEverywhere"), "a file may come back"


# Leaving


async def test_an_adapter_in_use_drains_and_both_steps_are_told() -> None:
    rig = await with_adapter()
    worker = worker_of(rig)
    worker.use("x", requests=2, age_s=0, running=2)
    await rig.run(15)
    rig.cluster.remove(ADAPTER, "x")
    await rig.run(15)
    assert worker.calls == ["put x", "remove x"], "told once, however long it drains"
    assert rig.cluster.notes("AdapterUnloaded") == ["Draining: 2 requests still use the adapter on replica 0 and have 120 s to finish"]
    worker.drained("x")
    await rig.run(15)
    assert rig.cluster.notes("AdapterUnloaded")[1:] == ["Removed: replica 0 has unloaded the adapter"]


async def test_a_suspended_adapter_shows_where_it_is_still_in_use() -> None:
    rig = await with_adapter()
    worker = worker_of(rig)
    worker.use("x", requests=1, age_s=0, running=1)
    rig.cluster.change(ADAPTER, "x", lambda spec: spec.update(suspend=True))
    await rig.run()
    assert rig.adapter_condition("Ready") == ("False", "Suspended")
    assert rig.adapter_message("Ready") == "spec.suspend is true; the adapter is still being unloaded on replica 0"
    assert (rig.instance()["state"], rig.adapter_status()["desiredReplicas"]) == ("Draining", 0)
    worker.drained("x")
    await rig.run()
    assert rig.adapter_message("Ready") == "spec.suspend is true"
    assert (worker.adapters, rig.status()["adapters"]["desired"]) == ({}, 0)
    assert "replicaInstances" not in rig.adapter_status()
    rig.cluster.change(ADAPTER, "x", lambda spec: spec.update(suspend=False))
    await rig.run()
    assert rig.adapter_condition("Ready") == ("True", "LoadedEverywhere")


async def test_the_next_owner_of_a_name_waits_until_the_last_one_is_unloaded() -> None:
    """Check that an adapter is refused while the last owner of its name is being unloaded, because requests could reach either of them."""
    rig = await serving()
    worker = worker_of(rig)
    rig.cluster.put(adapter("old", "/loras/old", adapterName="style"))
    await rig.run()
    rig.cluster.put(adapter("new", "/loras/new", adapterName="style"))
    await rig.run()
    worker.use("style", requests=1, age_s=0, running=1)
    rig.cluster.remove(ADAPTER, "old")
    await rig.run(30)
    assert rig.adapter_condition("Accepted", "new") == ("False", "NameConflict")
    assert rig.adapter_message("Accepted", "new") == (
        "an earlier adapter of the name 'style' is still being unloaded; this one is accepted after that"
    )
    assert "style" not in worker.adapters
    assert rig.desired()["adapters"] == []
    worker.drained("style")
    await rig.run()
    assert rig.adapter_condition("Ready", "new") == ("True", "LoadedEverywhere")
    assert worker.adapters["style"].digest == "sha256:loras-new"


async def test_a_new_object_of_the_same_name_with_another_source_is_loaded_after_the_old_one_went() -> None:
    rig = await with_adapter()
    rig.cluster.remove(ADAPTER, "x")
    rig.cluster.put(adapter(path="/loras/y"))
    await rig.run()
    assert worker_of(rig).calls == ["put x", "remove x", "put x"]
    assert rig.adapter_condition("Ready") == ("True", "LoadedEverywhere")
    assert worker_of(rig).adapters["x"].digest == "sha256:loras-y"


# Usage


async def test_usage_is_told_once_a_minute() -> None:
    rig = await with_adapter(2)
    assert "usage" not in rig.adapter_status()
    worker_of(rig, 1).use("x", requests=3, age_s=5)
    await rig.run(120)
    assert rig.adapter_status()["usage"]["requestsTotal"] == 3
    before = rig.cluster.status_writes
    for _ in range(60):
        worker_of(rig, 2).use("x", requests=1, age_s=1)
        await rig.run(5)
    assert 4 <= rig.cluster.status_writes - before <= 6, "300 s"
    await rig.run(60)
    usage = rig.adapter_status()["usage"]
    assert usage["requestsTotal"] == 63
    before = rig.cluster.status_writes
    await rig.run(600)
    assert rig.cluster.status_writes == before, "without requests nothing changes"


# The reason of SourceResolved for each code of a failure.
PASSING = {
    "RankFailed": "NotKnown",
    "CacheFull": "NotKnown",
    "Timeout": "NotKnown",
    "CapacityExceeded": "NotKnown",
    "SecretMissing": "SecretMissing",
    "SourceUnauthorized": "Unauthorized",
    "NetworkError": "NetworkError",
    "SourceNotFound": "SourceNotFound",
}
LASTING = {
    "InvalidAdapter": "InvalidAdapter",
    "NoMatchingModules": "InvalidAdapter",
    "UnsupportedFormat": "UnsupportedFormat",
    "TooLarge": "TooLarge",
    "RankTooLarge": "NotKnown",
    "ModulesOutsideEnvelope": "NotKnown",
}


@pytest.mark.parametrize(("code", "reason"), PASSING.items())
async def test_a_failure_that_may_pass_is_tried_again(code: str, reason: str) -> None:
    """Check that the operator soon tries again after a failure whose cause may go away by itself."""
    rig = await serving()
    worker = worker_of(rig)
    worker.refusals["/loras/x"] = WireError(code=code, message="rank 1 says no")
    rig.cluster.put(adapter())
    await rig.run(25)
    instance = rig.instance()
    assert (instance["state"], instance["attempts"], instance["lastError"]["code"]) == ("Failed", 2, code)
    assert rig.adapter_condition("SourceResolved")[1] == reason
    assert rig.adapter_condition("Ready") == ("False", "Failed" if reason == "NotKnown" else "SourceError")
    worker.refusals.clear()
    await rig.run(30)
    assert rig.adapter_condition("Ready") == ("True", "LoadedEverywhere")


@pytest.mark.parametrize(("code", "reason"), LASTING.items())
async def test_a_failure_that_lasts_is_tried_again_every_ten_minutes_after_an_edit_and_in_a_new_process(code: str, reason: str) -> None:
    rig = await serving()
    worker = worker_of(rig)
    worker.refusals["/loras/x"] = WireError(code=code, message="the bytes are what they are", retryable=False)
    rig.cluster.put(adapter())
    await rig.run(100)
    assert worker.calls == ["put x"]
    assert rig.adapter_condition("SourceResolved")[1] == reason
    assert rig.adapter_condition("Ready") == ("False", "NotAccepted" if reason == "NotKnown" else "SourceError")
    assert rig.desired()["adapters"] != [], "declared still, so that a process with other settings tries it"
    await rig.run(1200)
    assert worker.calls == ["put x"] * 3
    rig.cluster.change(ADAPTER, "x", lambda spec: spec.update(expectedRank=8))
    await rig.run()
    assert worker.calls == ["put x"] * 4
    rig.restart_container("d-0-0")
    await rig.run()
    assert rig.adapter_condition("Ready") == ("True", "LoadedEverywhere")


async def test_a_file_that_is_mended_where_it_lies_is_loaded_without_an_edit() -> None:
    """Check that a broken file is tried again after ten minutes: the worker may have read it while somebody copied it."""
    rig = await serving()
    worker = worker_of(rig)
    worker.refusals["/loras/x"] = BROKEN
    rig.cluster.put(adapter())
    await rig.run(30)
    assert rig.adapter_condition("Ready") == ("False", "SourceError")
    error, again_at = rig.instance()["lastError"], rig.instance()["nextRetryTime"]
    assert (error["retryable"], again_at) == (False, "2026-01-01T00:10:10Z")
    worker.refusals.clear()
    rig.restart_operator()
    await rig.run(600)
    assert worker.calls == ["put x"] * 2
    assert rig.adapter_condition("Ready") == ("True", "LoadedEverywhere")


async def test_a_rank_that_a_smaller_deployment_has_no_room_for_is_told_with_both_numbers() -> None:
    """Check that the worker's error with both ranks is shown, since the worker alone knows the rank, from the file."""
    rig = await serving(lora={"maxRank": 8})
    rig.cluster.put(adapter())
    await rig.run()
    assert rig.adapter_condition("Ready") == ("True", "LoadedEverywhere")
    worker_of(rig).rank = 16
    worker_of(rig).refusals["/loras/y"] = WireError(code="RankTooLarge", message="rank 16, at most 8")
    rig.cluster.change(ADAPTER, "x", lambda spec: spec.update(source={"path": "/loras/y"}))
    await rig.run()
    assert rig.adapter_condition("Accepted") == ("False", "RankTooLarge")
    assert rig.adapter_message("Accepted") == "rank 16, at most 8"
    assert "AdapterRejected" in rig.cluster.events()


async def test_a_replica_that_is_about_to_go_does_not_speak_for_the_new_settings() -> None:
    """Raise the spec's maxRank. Refusals of old replicas must not count, since new ones may accept the adapter."""
    rig = await serving(2, lora={"maxRank": 8})
    too_large = WireError(code="RankTooLarge", message="rank 16, at most 8")
    for number in (1, 2):
        worker_of(rig, number).refusals["/loras/x"] = too_large
    rig.cluster.put(adapter())
    await rig.run()
    assert rig.adapter_condition("Accepted") == ("False", "RankTooLarge")
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(lora={"maxRank": 16}))
    await rig.run()
    rig.start_all()
    await rig.run(0.5)
    assert rig.adapter_condition("Accepted") == ("True", "Accepted")
    assert rig.adapter_condition("Ready") == ("False", "PartiallyLoaded")
    assert rig.cluster.names(POD) == ["d-0-0", "d-1-1"], "one replica of before is there still"
    await rig.run(30)
    rig.start_all()
    await rig.run(30)
    assert rig.adapter_condition("Ready") == ("True", "LoadedEverywhere")


async def test_events_are_not_repeated_with_every_try() -> None:
    rig = await serving()
    worker_of(rig).refusals["/loras/x"] = WireError(code="NetworkError", message="connection refused", retryable=True)
    rig.cluster.put(adapter())
    await rig.run(600)
    assert len(worker_of(rig).calls) > 4
    assert rig.cluster.notes("AdapterLoadFailed") == ["replica 0 could not load the adapter: NetworkError: connection refused"]


async def test_a_pod_that_is_gone_takes_nothing_of_an_adapter_with_it() -> None:
    rig = await with_adapter()
    rig.cluster.remove(POD, "d-0-0")
    await rig.run()
    assert rig.adapter_status()["resolved"]["digest"] == "sha256:loras-x"
    rig.start("d-0-1", digests={"/loras/x": "sha256:other"})
    await rig.run()
    assert rig.adapter_condition("SourceResolved") == ("False", "DigestMismatch")
    failure = "DigestMismatch: expected sha256:loras-x, found sha256:other"
    assert rig.cluster.notes("DigestMismatch") == [f"replica 0 could not load the adapter: {failure}"]


async def test_a_sleeper_that_fetches_by_itself_what_it_could_not_before_is_not_asked_again() -> None:
    rig = await serving(sleep={"policy": "Asleep"})
    worker = worker_of(rig)
    worker.refusals["/loras/x"] = WireError(code="SourceNotFound", message="no such file", retryable=True)
    rig.cluster.put(adapter())
    await rig.run(2)
    assert rig.instance()["state"] == "Failed"
    worker.adapters["x"] = msgspec.structs.replace(worker.adapters["x"], state=RecordState.DEFERRED, error=None)
    puts = len(worker.calls)
    await rig.run(15)
    assert rig.instance()["state"] == "Deferred"
    plan = next(iter(rig.runtime.memories.values())).adapters
    assert (plan.again_at, plan.pushes) == (None, ()), "nothing is due again, so nothing hurries"
    assert len(worker.calls) == puts


# The pinned identity


async def test_the_identity_is_pinned_with_the_digest_and_stands_in_the_status_and_in_the_mounted_file() -> None:
    rig = await serving(2)
    for number in (1, 2):
        worker_of(rig, number).identities["/loras/x"] = "v1:a"
    rig.cluster.put(adapter())
    await rig.run(8)
    assert rig.adapter_status()["resolved"]["identity"] == "v1:a"
    assert [one["identity"] for one in rig.adapter_status()["replicaInstances"]] == ["v1:a"] * 2
    assert rig.desired()["adapters"][0]["identity"] == "v1:a"
    assert rig.adapter_condition("Degraded") == ("False", "AsExpected")


async def test_a_replica_that_applies_the_same_weights_in_another_way_is_an_identity_mismatch() -> None:
    rig = await serving(2)
    for number, effect in ((1, "v1:a"), (2, "v1:b")):
        worker_of(rig, number).identities["/loras/x"] = effect
    rig.cluster.put(adapter())
    await rig.run(8)
    assert rig.adapter_status()["resolved"]["identity"] == "v1:a"
    assert rig.adapter_condition("Degraded") == ("True", "IdentityMismatch")
    assert rig.adapter_message("Degraded").endswith("with another configuration: identity v1:b, expected v1:a")
    assert rig.adapter_condition("SourceResolved") == ("False", "IdentityMismatch")
    assert rig.cluster.notes("IdentityMismatch")


async def test_a_worker_that_reports_no_identity_is_fine_and_the_first_report_fills_it_in() -> None:
    rig = await serving(1)
    worker = worker_of(rig)
    rig.cluster.put(adapter())
    await rig.run(8)
    assert "identity" not in rig.adapter_status()["resolved"] and rig.desired()["adapters"][0]["identity"] is None
    assert rig.adapter_condition("Ready") == ("True", "LoadedEverywhere")
    worker.adapters["x"] = msgspec.structs.replace(worker.adapters["x"], identity="v1:a")
    await rig.run(8)
    assert rig.adapter_status()["resolved"]["identity"] == "v1:a"
    assert worker.calls == ["put x"]


async def test_another_converter_pins_again_where_the_weights_are_the_same() -> None:
    rig = await serving(1)
    worker = worker_of(rig)
    worker.identities["/loras/x"] = "v1:a"
    rig.cluster.put(adapter())
    await rig.run(8)
    worker.adapters["x"] = msgspec.structs.replace(worker.adapters["x"], identity="v2:z")
    await rig.run(8)
    assert rig.adapter_status()["resolved"]["identity"] == "v2:z"
    assert rig.adapter_condition("Degraded") == ("False", "AsExpected")
