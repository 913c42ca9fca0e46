# SPDX-License-Identifier: Apache-2.0
"""Changes between two state documents of a replica, each counted once: loads, evictions and failed verifications."""

from typing import Any

import msgspec
import pytest
from prometheus_client import generate_latest

from diffusion_operator.api.worker_state import AdapterRecord, Operation, RecordState, WireError, WorkerPhase, WorkerState
from diffusion_operator.errors import ClusterUnavailable
from diffusion_operator.plan.results.worker_changes import AdapterLoadTime, WorkerChanges, happened
from support.operator.rig import Rig, adapter, serving, with_adapter
from support.operator.scripted_workers import ScriptedWorker

WRONG = WireError(code="VerificationFailed", message="rank 0: weights: expected the checksum a of the load, found b")
TIMEOUT = WireError(code="Timeout", message="wake: expected the warm-up and the loads of adapters to end within its deadline")


def loaded(name: str = "x", seconds: float | None = 0.5, **change: Any) -> AdapterRecord:
    return AdapterRecord(
        **{"name": name, "state": RecordState.LOADED, "digest": "sha256:1", "size_bytes": 100, "load_seconds": seconds} | change
    )


def says(
    *adapters: AdapterRecord, boot: str = "boot-1", state: WorkerPhase = WorkerPhase.READY, last: Operation | None = None
) -> WorkerState:
    return WorkerState(boot_id=boot, state=state, adapters=adapters, last_operation=last)


def ended(kind: str, number: int, error: WireError | None = None) -> Operation:
    return Operation(operation_id=f"{kind}-{number}", kind=kind, error=error, seconds=1.0)


ONE = (AdapterLoadTime(seconds=0.5, size_bytes=100),)
OUT = loaded(state=RecordState.CACHED)
FOUND_WRONG = loaded(seconds=0.7, verification_failed=True)
AGAIN = (AdapterLoadTime(seconds=0.7, size_bytes=100),)


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        pytest.param(None, says(loaded(), FOUND_WRONG), WorkerChanges(), id="the first look may come long after what it shows"),
        pytest.param(says(loaded()), says(loaded()), WorkerChanges(), id="nothing"),
        pytest.param(says(), says(loaded()), WorkerChanges(loads=ONE), id="a load"),
        pytest.param(says(), says(OUT), WorkerChanges(loads=ONE), id="a load that was evicted before anybody looked"),
        pytest.param(says(), says(loaded(seconds=None)), WorkerChanges(), id="a worker that tells no times"),
        pytest.param(
            says(loaded()), says(loaded(seconds=0.7)), WorkerChanges(loads=AGAIN), id="a load again, as after a restart of the ranks"
        ),
        pytest.param(says(loaded()), says(loaded(scale=0.3)), WorkerChanges(), id="another scale needs no load"),
        pytest.param(says(loaded()), says(loaded(), loaded("y")), WorkerChanges(loads=ONE), id="another one"),
        pytest.param(
            says(loaded()),
            says(loaded(state=RecordState.DRAINING), loaded(digest="sha256:2")),
            WorkerChanges(loads=ONE),
            id="another version",
        ),
        pytest.param(says(loaded()), says(loaded(), boot="boot-2"), WorkerChanges(loads=ONE), id="another process has loaded its own"),
        pytest.param(says(loaded()), says(OUT), WorkerChanges(evictions=1), id="an eviction"),
        pytest.param(says(OUT), says(OUT), WorkerChanges(), id="still evicted"),
        pytest.param(says(loaded()), says(), WorkerChanges(), id="one that was removed"),
        pytest.param(says(loaded()), says(OUT, state=WorkerPhase.ASLEEP), WorkerChanges(), id="a sleep takes all out of memory"),
        pytest.param(says(OUT, state=WorkerPhase.ASLEEP), says(OUT), WorkerChanges(), id="and a wake leaves out what nobody asked for"),
        pytest.param(
            says(loaded()), says(FOUND_WRONG), WorkerChanges(loads=AGAIN, wrong_adapters=1), id="an adapter that a wake found wrong"
        ),
        pytest.param(says(FOUND_WRONG), says(FOUND_WRONG), WorkerChanges(), id="it is told for ten minutes"),
        pytest.param(
            says(last=ended("sleep", 1)), says(last=ended("wake", 2, WRONG)), WorkerChanges(wrong_wakes=1), id="weights found wrong"
        ),
        pytest.param(
            says(last=ended("wake", 2, WRONG)), says(last=ended("wake", 2, WRONG)), WorkerChanges(), id="it stays the last operation"
        ),
        pytest.param(
            says(last=ended("wake", 2, WRONG)), says(last=ended("wake", 3, WRONG)), WorkerChanges(wrong_wakes=1), id="wrong again"
        ),
        pytest.param(says(), says(last=ended("wake", 2, TIMEOUT)), WorkerChanges(), id="a wake that failed otherwise"),
        pytest.param(says(), says(last=ended("wake", 2)), WorkerChanges(), id="a wake that went well"),
    ],
)
def test_two_looks_at_a_replica_tell_what_happened_between_them(
    before: WorkerState | None, after: WorkerState, told: WorkerChanges
) -> None:
    assert happened(before, after) == told


# --- through real reconciles --------------------------------------------------------------------------------------------


def worker(rig: Rig) -> ScriptedWorker:
    return rig.workers.at("10.0.0.1")


def counted(rig: Rig) -> dict[str, float]:
    """Return the metrics of adapters and of failed verifications that are not 0."""
    lines = [line for line in generate_latest(rig.registry).decode().splitlines() if not line.startswith("#")]
    values = {name.removeprefix("diffusion_operator_"): float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
    of = (
        "adapter_load_seconds_count",
        "adapter_load_seconds_sum",
        "adapter_loaded_bytes_total",
        "adapter_evictions_total",
        "verification_",
    )
    return {name: value for name, value in values.items() if name.startswith(of) and "_created" not in name and value}


async def test_loads_and_evictions_are_counted_once_with_their_time_and_size() -> None:
    rig = await with_adapter()
    assert counted(rig) == {"adapter_load_seconds_count": 1, "adapter_load_seconds_sum": 0.5, "adapter_loaded_bytes_total": 100}
    worker(rig).evict("x")
    await rig.run(120)
    assert counted(rig) == {
        "adapter_load_seconds_count": 2,
        "adapter_load_seconds_sum": 1.5,
        "adapter_loaded_bytes_total": 200,
        "adapter_evictions_total": 1,
    }


async def test_an_operator_that_comes_back_counts_nothing_of_before() -> None:
    rig = await with_adapter()
    worker(rig).adapters["x"] = msgspec.structs.replace(worker(rig).adapters["x"], verification_failed=True)
    worker(rig).last_operation = ended("wake", 1, WRONG)
    rig.restart_operator()
    await rig.run(60)
    assert counted(rig) == {}


async def test_what_a_wake_found_wrong_is_counted_once_by_what_it_was() -> None:
    rig = await with_adapter()
    worker(rig).adapters["x"] = msgspec.structs.replace(worker(rig).adapters["x"], verification_failed=True)
    await rig.run(60)
    assert counted(rig)['verification_failures_total{what="adapter"}'] == 1
    worker(rig).last_operation = ended("wake", 1, WRONG)
    await rig.run(60)
    found = {name: value for name, value in counted(rig).items() if name.startswith("verification_")}
    assert found == {'verification_failures_total{what="adapter"}': 1, 'verification_failures_total{what="wake"}': 1}


async def test_a_pass_that_fails_after_its_looks_loses_nothing_and_its_repeat_counts_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = await serving()
    write, failures = rig.cluster.apply_status, iter((True, True))

    async def fail(*args: Any, **options: Any) -> None:
        if next(failures, False):
            raise ClusterUnavailable("connection refused")
        await write(*args, **options)

    monkeypatch.setattr(rig.cluster, "apply_status", fail)
    rig.cluster.put(adapter())
    await rig.run(60)
    assert (len(rig.errors), counted(rig)["adapter_load_seconds_count"]) == (2, 1)
