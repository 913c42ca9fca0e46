# SPDX-License-Identifier: Apache-2.0
"""A deployment that sleeps when nobody needs it, through real reconciles over scripted workers in virtual time."""

from datetime import datetime
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from diffusion_operator.api.deployment_spec import SleepPolicy
from diffusion_operator.api.names import DEPLOYMENT, POD
from diffusion_operator.api.worker_state import AdapterRecord, Operation, RecordState, WireError, WorkerPhase, WorkerState
from diffusion_operator.errors import ClusterUnavailable
from diffusion_operator.metrics import Replicas
from support.operator.rig import LOOK_S, Rig, adapter, serving
from support.operator.scripted_workers import ScriptedWorker

SHORT = {"policy": "OnIdle", "idleSeconds": 60, "minAwakeSeconds": 20}


def worker(rig: Rig, number: int = 1) -> ScriptedWorker:
    return rig.workers.at(f"10.0.0.{number}")


def _time(text: str) -> datetime:
    return msgspec.convert(text, datetime)


def scraped(rig: Rig) -> dict[str, float]:
    """Return the metrics server's values, by name and labels."""
    registry = CollectorRegistry()
    registry.register(Replicas(rig.runtime.statuses))
    lines = [line for one in (registry, rig.registry) for line in generate_latest(one).decode().splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def kinds(one: ScriptedWorker) -> list[str]:
    return [call.split()[0] for call in one.calls]


async def idle(replicas: int = 1, **sleep: Any) -> Rig:
    """Return a rig with replicas that serve under OnIdle and had a request a moment ago."""
    rig = await serving(replicas, sleep=SHORT | sleep)
    for number in range(1, replicas + 1):
        worker(rig, number).request()
        worker(rig, number).calls.clear()
    return rig


async def test_an_adapter_of_a_model_that_a_request_wakes_is_ready_if_its_replica_will_load_it() -> None:
    rig = await idle()
    rig.cluster.put(adapter())
    await rig.run(70)
    assert (rig.states(), rig.instance()["state"]) == (["Asleep"], "Deferred")
    assert rig.adapter_condition("Ready") == ("True", "AsleepWakeable")
    assert rig.adapter_condition("Loaded") == ("False", "WaitingForWake")
    assert rig.condition("AdaptersReady") == ("True", "AllReady")

    worker(rig).refusals["/loras/y"] = WireError(code="SourceNotFound", message="/loras/y: no such file", retryable=True)
    rig.cluster.put(adapter("y", "/loras/y"))
    await rig.run()
    assert rig.adapter_condition("Ready", "y") == ("False", "SourceError")
    del worker(rig).refusals["/loras/y"]
    await rig.run(60)
    assert rig.adapter_condition("Ready", "y") == ("True", "AsleepWakeable"), "it was put while the model slept"

    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(sleep=SHORT | {"policy": "Asleep"}))
    await rig.run()
    assert rig.adapter_condition("Ready") == ("False", "Deferred"), "no request wakes it now"


async def test_a_model_that_nobody_asks_sleeps_after_the_idle_time_and_a_request_wakes_it() -> None:
    rig = await idle()
    await rig.run(58)
    assert (rig.states(), kinds(worker(rig))) == (["Awake"], [])
    await rig.run(10)
    assert (rig.states(), kinds(worker(rig))) == (["Asleep"], ["sleep"])
    assert rig.condition("Ready") == ("True", "AsleepWakeable")
    assert rig.condition("Awake") == ("False", "AllAsleep")
    assert rig.condition("Available") == ("False", "Sleeping")
    status = rig.status()
    assert (status["awakeReplicas"], status["asleepReplicas"], status["readyReplicas"]) == (0, 1, 1)
    assert rig.routable() == ["d-0-0"], "its server takes requests"
    worker(rig).slow = True
    worker(rig).request()
    await rig.run(3)
    assert (rig.states(), rig.condition("Ready")) == (["Waking"], ("True", "AsleepWakeable"))
    worker(rig).finish()
    await rig.run(3)
    assert (rig.states(), rig.condition("Ready")) == (["Awake"], ("True", "Serving"))
    assert kinds(worker(rig)) == ["sleep", "wake"], "the operator woke nobody"
    assert rig.cluster.notes("Slept") == ["replica 0 fell asleep in 0.250 s at the level HostMemory and freed 2.98 GiB of memory"]
    assert rig.cluster.notes("Woke") == [
        "replica 0 woke in 0.250 s from a sleep of the level HostMemory; 5 bytes of weights are in memory again"
    ]


async def test_each_cycle_is_one_sleep_and_one_event_though_the_operator_restarts_in_it() -> None:
    rig = await idle()
    for _ in range(5):
        await rig.run(70)
        assert rig.states() == ["Asleep"]
        rig.restart_operator()
        await rig.run(10)
        worker(rig).request()
        await rig.run(3)
        rig.restart_operator()
        await rig.run(3)
        assert rig.states() == ["Awake"]
    assert kinds(worker(rig)) == ["sleep", "wake"] * 5
    assert len(set(worker(rig).calls)) == 10
    assert len(rig.cluster.notes("Slept")) == len(rig.cluster.notes("Woke")) == 5


async def test_an_event_is_one_though_the_status_could_not_be_written_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = await idle()
    write = rig.cluster.apply_status

    async def fail_while_asleep(*args: Any, **options: Any) -> None:
        if "Slept" in rig.cluster.events() and len(rig.errors) < 3:
            raise ClusterUnavailable("connection refused")
        await write(*args, **options)

    monkeypatch.setattr(rig.cluster, "apply_status", fail_while_asleep)
    await rig.run(90)
    assert len(rig.errors) == 3
    assert (rig.states(), len(rig.cluster.notes("Slept"))) == (["Asleep"], 1)


async def test_a_lost_answer_starts_no_second_sleep() -> None:
    rig = await idle()
    worker(rig).slow, worker(rig).lost_answers = True, 1
    await rig.run(70)
    rig.restart_operator()
    await rig.run(15)
    assert kinds(worker(rig)) == ["sleep"]
    worker(rig).finish()
    await rig.run(5)
    assert (rig.states(), len(rig.cluster.notes("Slept"))) == (["Asleep"], 1)


async def test_a_request_that_came_after_the_look_wins_and_nothing_is_said_of_it() -> None:
    rig = await idle()
    asked, poll = worker(rig), rig.workers.state

    async def look_then_ask(ip: str, **more: Any) -> WorkerState:
        seen = await poll(ip, **more)
        if (seen.last_request_age_seconds or 0) >= 60 - LOOK_S:  # the last look before the time is over
            asked.request()
        return seen

    rig.workers.state = look_then_ask  # type: ignore[method-assign]
    await rig.run(200)
    assert (rig.states(), asked.calls) == (["Awake"], [])
    assert scraped(rig)['diffusion_operator_control_call_seconds_count{code="Busy",verb="sleep"}'] >= 1
    assert rig.condition("Degraded") == ("False", "AsExpected")


async def test_busy_and_conflict_are_no_failures() -> None:
    rig = await idle()
    busy = worker(rig)
    refused = WireError(code="Busy", retryable=True)
    busy.refuse_operations = [refused, WireError(code="Conflict", retryable=True), refused]
    await rig.run(70)
    assert (rig.states(), kinds(busy)) == (["Asleep"], ["sleep"])
    assert "sleep-1-1-" in busy.calls[0], "the first attempt"
    assert "SleepFailed" not in rig.cluster.events()


async def test_nothing_is_written_while_it_sleeps_or_is_idle() -> None:
    rig = await idle()
    await rig.run(20)
    writes = rig.cluster.status_writes
    await rig.run(35)
    assert rig.cluster.status_writes == writes, "idle, and not yet asleep"
    await rig.run(30)
    writes = rig.cluster.status_writes
    await rig.run(200)
    assert (rig.states(), rig.cluster.status_writes) == (["Asleep"], writes)


async def test_a_model_that_sleeps_is_not_looked_at_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = await idle(2)
    listed = []
    listing = rig.cluster.list

    async def counted_list(*args: Any, **kwargs: Any) -> Any:
        listed.append(rig.now)
        return await listing(*args, **kwargs)

    await rig.run(90)
    assert rig.states() == ["Asleep", "Asleep"]
    monkeypatch.setattr(rig.cluster, "list", counted_list)
    await rig.run(300)
    assert listed == []
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(replicas=3))
    await rig.run(1)
    assert len(rig.cluster.names(POD)) == 3, "what somebody changes is seen at once"


async def test_a_change_that_a_failing_api_server_hid_is_seen_when_it_is_back() -> None:
    rig = await idle()
    await rig.run(90)
    rig.cluster.broken = ClusterUnavailable("connection refused")
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(replicas=2))
    await rig.run(2.5)
    rig.cluster.broken = None
    await rig.run(2)
    assert rig.cluster.names(POD) == ["d-0-0", "d-1-0"]


async def test_an_adapter_that_a_sleeper_lets_go_when_it_wakes_does_not_keep_it_looked_at() -> None:
    rig = await idle()
    await rig.run(90)
    gone = AdapterRecord(name="x", state=RecordState.DRAINING)
    worker(rig).draining["x"] = gone
    await rig.run(20)
    listed = []
    listing = rig.cluster.list

    async def counted_list(*args: Any, **kwargs: Any) -> Any:
        listed.append(rig.now)
        return await listing(*args, **kwargs)

    rig.cluster.list = counted_list  # type: ignore[method-assign]
    await rig.run(60)
    assert listed == []


async def test_the_status_tells_the_last_request_and_when_sleep_comes_and_requests_alone_write_it_once_a_minute() -> None:
    rig = await idle()
    asked = rig.now
    await rig.run(20)
    status = rig.status()
    assert abs((_time(status["lastRequestTime"]) - asked).total_seconds()) <= 2
    assert 58 <= (_time(status["sleepEligibleTime"]) - asked).total_seconds() <= 62
    writes = rig.cluster.status_writes
    for _ in range(60):
        worker(rig).request()
        await rig.run(1)
    assert rig.cluster.status_writes - writes <= 2
    await rig.run(20)
    assert (rig.now - _time(rig.status()["lastRequestTime"])).total_seconds() < 85
    await rig.run(60)
    assert rig.states() == ["Asleep"]
    assert "sleepEligibleTime" not in rig.status()
    assert "lastRequestTime" in rig.status(), "what was known stays"


async def test_held_requests_are_told() -> None:
    rig = await idle()
    await rig.run(70)
    worker(rig).slow = True
    worker(rig).request()
    worker(rig).request()
    await rig.run(20)
    assert rig.status()["held"] == {"current": 2, "oldestSeconds": 1}
    assert scraped(rig)['diffusion_operator_held_requests{object_namespace="default"}'] == 2
    worker(rig).finish()
    await rig.run(20)
    assert rig.status()["held"] == {"current": 0}


async def test_of_several_the_one_that_is_woken_gets_the_requests() -> None:
    rig = await idle(3)
    await rig.run(75)
    assert (rig.states(), rig.routable()) == (["Asleep"] * 3, ["d-0-0", "d-1-0", "d-2-0"])
    worker(rig, 2).request()
    await rig.run(3)
    assert (rig.states(), rig.routable()) == (["Asleep", "Awake", "Asleep"], ["d-1-0"])
    assert rig.condition("Ready") == ("True", "Serving")
    assert rig.condition("Available") == ("True", "MinimumAvailable")
    assert rig.message("Ready") == "1 of 3 replicas serve, 2 sleep until they are needed"
    worker(rig, 2).in_flight = 9
    await rig.run(12)
    assert rig.states().count("Awake") == 2, "more than one batch: another one is woken"


async def test_a_new_replica_starts_awake_and_then_sleeps_for_idleness() -> None:
    rig = await idle()
    await rig.run(70)
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(replicas=2))
    await rig.run(5)
    rig.start("d-1-0")
    await rig.run(5)
    assert (rig.states(), rig.routable()) == (["Asleep", "Awake"], ["d-1-0"])
    await rig.run(65)
    assert (rig.states(), rig.routable()) == (["Asleep", "Asleep"], ["d-0-0", "d-1-0"])
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(replicas=1))
    await rig.run(5)
    assert rig.cluster.names(POD) == ["d-0-0"]


async def test_min_awake_is_kept_and_raised_it_wakes() -> None:
    rig = await idle(2, minAwake=1)
    await rig.run(100)
    assert sorted(rig.states()) == ["Asleep", "Awake"]
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec["sleep"].update(minAwake=2))
    await rig.run(10)
    assert rig.states() == ["Awake", "Awake"]
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec["sleep"].update(minAwake=0))
    await rig.run(100)
    assert rig.states() == ["Asleep", "Asleep"]


async def test_a_template_changed_during_sleep_replaces_the_sleeper_which_then_sleeps_again() -> None:
    rig = await idle()
    await rig.run(70)
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(engine={"maxBatchSize": 4}))
    await rig.run(5)
    assert (rig.cluster.names(POD), kinds(worker(rig))) == (["d-0-1"], ["sleep"]), "it was not woken for it"
    rig.start("d-0-1")
    await rig.run(5)
    assert rig.states() == ["Awake"]
    await rig.run(70)
    assert rig.states() == ["Asleep"]


async def test_a_changed_policy_is_told_to_a_sleeper() -> None:
    rig = await idle()
    await rig.run(70)
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(sleep={"policy": "Asleep"}))
    await rig.run(60)
    assert (worker(rig).policy, kinds(worker(rig))) == (SleepPolicy.ASLEEP, ["sleep", "tell"])
    assert rig.condition("Ready") == ("False", "SleepRequested")
    worker(rig).request()
    await rig.run(5)
    assert rig.states() == ["Asleep"], "a person asked for it"
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(sleep=SHORT))
    await rig.run(5)
    assert (worker(rig).policy, rig.condition("Ready")) == (SleepPolicy.ON_IDLE, ("True", "AsleepWakeable"))
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(sleep={}))
    await rig.run(5)
    assert rig.states() == ["Awake"]
    assert len(rig.cluster.notes("Slept")) == 1, "to be told is no sleep"


async def test_a_policy_changed_back_calls_back_what_drains() -> None:
    rig = await serving()
    worker(rig).slow, worker(rig).in_flight = True, 1
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(sleep={"policy": "Asleep"}))
    await rig.run(5)
    assert rig.states() == ["Draining"]
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(sleep={}))
    await rig.run(5)
    assert (rig.states(), kinds(worker(rig))) == (["Awake"], ["sleep", "wake"])
    assert rig.condition("Degraded") == ("False", "AsExpected")
    assert "SleepFailed" not in rig.cluster.events()


async def test_a_crash_while_asleep_comes_back_asleep_and_is_no_second_sleep() -> None:
    rig = await idle()
    await rig.run(70)
    rig.restart_container("d-0-0", phase=WorkerPhase.ASLEEP, policy=SleepPolicy.ON_IDLE)
    await rig.run(10)
    assert (rig.states(), rig.condition("Ready")) == (["Asleep"], ("True", "AsleepWakeable"))
    assert len(rig.cluster.notes("Slept")) == 1


FAILURES = [
    ("InsufficientMemory", "WakeRefusedMemory", ("False", "InsufficientGPUMemory")),
    ("VerificationFailed", "VerificationFailed", ("False", "WakeFailed")),
    ("Timeout", "WakeFailed", ("False", "WakeFailed")),
]


@pytest.mark.parametrize(("code", "event", "awake"), FAILURES)
async def test_a_wake_on_demand_that_fails_is_told_once_and_its_success_too(code: str, event: str, awake: tuple[str, str]) -> None:
    rig = await idle()
    await rig.run(70)
    worker(rig).failing_operations, worker(rig).operation_error = 3, WireError(code=code, message="why", retryable=True)
    for _ in range(3):
        worker(rig).request()
        await rig.run(5)
        assert rig.condition("Awake") == awake
    assert len(rig.cluster.notes(event)) == 1
    assert f"{code}: why" in rig.cluster.notes(event)[0]
    worker(rig).request()
    await rig.run(5)
    assert (rig.states(), rig.condition("Degraded")) == (["Awake"], ("False", "AsExpected"))
    assert len(rig.cluster.notes("Woke")) == 1


async def test_a_sleep_without_room_for_its_mirror_is_told_as_a_sleep_that_failed_and_not_as_a_wake() -> None:
    rig = await idle()
    no_room = WireError(code="InsufficientMemory", message="a mirror needs 5 bytes, found 4 free", retryable=True)
    worker(rig).failing_operations, worker(rig).operation_error = 1, no_room
    await rig.run(70)
    assert "InsufficientMemory: a mirror needs 5 bytes, found 4 free" in rig.cluster.notes("SleepFailed")[0]
    assert "WakeRefusedMemory" not in rig.cluster.events()


async def test_weights_that_are_not_what_they_were_are_told_while_the_ranks_start_again() -> None:
    rig = await idle()
    await rig.run(70)
    broken = worker(rig)
    broken.phase, broken.failure = WorkerPhase.RESTARTING, WireError(code="VerificationFailed", message="rank 0: 1 of 9 digests differ")
    broken.operation = Operation(operation_id="demand-1", kind="wake")
    await rig.run(10)
    assert rig.condition("Degraded") == ("True", "VerificationFailed")
    assert rig.condition("Ready") == ("False", "VerificationFailed")
    assert "1 of 9 digests differ" in rig.message("Degraded")
    broken.phase, broken.failure, broken.operation = WorkerPhase.READY, None, None
    broken.last_operation = Operation(operation_id="demand-1", kind="wake", error=WireError(code="VerificationFailed", message="differ"))
    await rig.run(10)
    assert (rig.condition("Degraded"), rig.condition("Ready")) == (("False", "AsExpected"), ("True", "Serving"))
    assert len(rig.cluster.notes("VerificationFailed")) == 1


async def test_metrics_count_calls_wakes_and_replicas() -> None:
    rig = await idle(2)
    await rig.run(75)
    worker(rig).request()
    await rig.run(5)
    found = scraped(rig)
    assert found['diffusion_operator_control_call_seconds_count{code="OK",verb="sleep"}'] == 2
    assert found['diffusion_operator_wake_seconds_count{level="HostMemory"}'] == 1
    assert found['diffusion_operator_wake_seconds_sum{level="HostMemory"}'] == 0.25
    replicas = 'diffusion_operator_replicas{object_namespace="default",state="%s"}'
    assert [found[replicas % state] for state in ("Asleep", "Awake", "Failed")] == [1, 1, 0]
    rig.cluster.remove(DEPLOYMENT, "d")
    await rig.run(5)
    assert replicas % "Awake" not in scraped(rig), "a namespace without deployments has no rows"
