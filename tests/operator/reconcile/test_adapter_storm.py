# SPDX-License-Identifier: Apache-2.0
"""Random changes of adapters in random order: in the end the replicas have the declared adapters, the status is true, and all is quiet."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from diffusion_operator.api.names import ADAPTER, DEPLOYMENT, POD
from diffusion_operator.api.worker_state import RecordState, WireError
from support.operator.rig import Rig, adapter, serving
from support.operator.scripted_workers import ScriptedWorker
from support.sample import sample

pytestmark = pytest.mark.slow
NAMES = ("a", "b", "c", "d1", "e")
GOOD = ("/loras/1", "/loras/2", "/loras/3")
BAD = "/loras/bad"
BROKEN = WireError(code="InvalidAdapter", message="no LoRA")
STEPS = 60
QUIET_S = 1500.0
"""Seconds of quiet, longer than the longest pause between tries."""


class Storm:
    def __init__(self, rig: Rig, seed: int, *, max_cached: int) -> None:
        self.rig = rig
        self.dice = random.Random(seed)
        self.happened: list[str] = []
        self.script: dict[str, Any] = {"refusals": {BAD: BROKEN}, "max_cached": max_cached}

    def workers(self) -> list[ScriptedWorker]:
        pods = [self.rig.cluster.find(POD, name) for name in self.rig.cluster.names(POD)]
        ips = [pod["status"]["podIP"] for pod in pods if pod and pod.get("status", {}).get("podIP")]
        return [self.rig.workers.at(ip) for ip in ips]

    def one(self) -> None:
        happens = self.dice.choice(
            [self.edit, self.edit, self.edit, self.make, self.delete, self.evict, self.hold, self.restart, self.scale]
        )
        self.happened.append(f"{happens.__name__} {happens()}")

    def make(self) -> str:
        name = self.dice.choice(NAMES)
        if self.rig.cluster.find(ADAPTER, name) is None:
            self.rig.cluster.put(adapter(name, self.dice.choice((*GOOD, BAD))))
        return name

    def delete(self) -> str:
        name = self.dice.choice(NAMES)
        if self.rig.cluster.find(ADAPTER, name) is not None:
            self.rig.cluster.remove(ADAPTER, name)
        return name

    def edit(self) -> str:
        name = self.dice.choice(NAMES)
        change: dict[str, Any] = self.dice.choice(
            [
                {"source": {"path": self.dice.choice((*GOOD, BAD))}},
                {"defaultScale": self.dice.choice(("0.5", "1.0"))},
                {"residency": self.dice.choice(("Resident", "Cached", "OnDemand"))},
                {"suspend": self.dice.random() < 0.5},
            ]
        )
        if self.rig.cluster.find(ADAPTER, name) is not None:
            self.rig.cluster.change(ADAPTER, name, lambda spec: spec.update(change))
        return f"{name} {change}"

    def evict(self) -> str:
        worker = self.dice.choice(self.workers())
        loaded = [name for name, record in worker.adapters.items() if record.state is RecordState.LOADED]
        for name in loaded[:1]:
            worker.evict(name)
        return str(loaded[:1])

    def hold(self) -> str:
        """Hold loads of one source at a random worker, or release them if they are held; return the source."""
        worker, path = self.dice.choice(self.workers()), self.dice.choice(GOOD)
        worker.held ^= {path}
        self.calm(worker)
        return path

    def calm(self, worker: ScriptedWorker) -> None:
        for name in list(worker.loading):
            worker.finish_load(name)

    def restart(self) -> str:
        pods = [name for name in self.rig.cluster.names(POD) if (self.rig.cluster.find(POD, name) or {}).get("status")]
        what: Callable[[], object] = self.dice.choice(
            [self.rig.restart_operator, lambda: self.rig.restart_container(self.dice.choice(pods), **self.script)]
        )
        what()
        return "operator or container"

    def scale(self) -> str:
        change: dict[str, Any] = self.dice.choice([{"replicas": 1}, {"replicas": 2}, {"sleep": {"policy": "Asleep"}}, {"sleep": {}}])
        self.rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(change))
        return str(change)


async def after_the_storm(seed: int, lora: dict[str, Any]) -> Storm:
    rig = await serving(2, lora=lora)
    storm = Storm(rig, seed, max_cached=lora["maxCached"])
    for worker in storm.workers():
        worker.refusals[BAD], worker.max_cached = BROKEN, lora["maxCached"]
    for _ in range(STEPS):
        storm.one()
        await rig.run(storm.dice.choice((0.0, 0.3, 2.0, 12.0)))
        rig.start_all(**storm.script)
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update({"sleep": {}, "replicas": 2}))
    for _ in range(3):
        for worker in storm.workers():
            worker.held.clear()
            storm.calm(worker)
        await rig.run(60)
        rig.start_all(**storm.script)
    await rig.run(QUIET_S)
    return storm


ROOM = {"onMissing": "Load", "maxLoaded": 8, "maxCached": 8}
NO_ROOM = {"onMissing": "Reject", "maxLoaded": 2, "maxCached": 2}


@pytest.mark.parametrize("lora", [ROOM, NO_ROOM], ids=["room", "no room"])
@pytest.mark.parametrize("seed", sample(range(6), 2))
async def test_after_a_storm_the_replicas_have_what_is_declared_and_all_is_quiet(seed: int, lora: dict[str, Any]) -> None:
    storm = await after_the_storm(seed, lora)
    rig, told = storm.rig, "\n".join(storm.happened)
    declared = {name: rig.cluster.find(ADAPTER, name) for name in NAMES}
    running = {name: found["spec"] for name, found in declared.items() if found is not None and not found["spec"].get("suspend")}
    wanted = {name: spec for name, spec in running.items() if rig.adapter_condition("Accepted", name)[1] != "CapacityExceeded"}
    assert wanted == running or sum(spec.get("residency") == "Resident" for spec in running.values()) > lora["maxLoaded"], told
    assert {one["name"] for one in rig.desired()["adapters"]} == set(wanted), told
    assert len(storm.workers()) == 2, told
    for worker in storm.workers():
        assert set(worker.adapters) == set(wanted), told
        for name, spec in wanted.items():
            check(rig, name, spec, worker, told)
    bad = {f"put {name}" for name, spec in wanted.items() if spec["source"]["path"] == BAD}
    calls, writes = [list(worker.calls) for worker in storm.workers()], rig.cluster.status_writes
    await rig.run(QUIET_S)
    later = [worker.calls[len(before) :] for worker, before in zip(storm.workers(), calls, strict=True)]
    assert {call for each in later for call in each} <= bad, f"{later}\n{told}"
    assert all(each.count(call) <= QUIET_S / 600 + 1 for each in later for call in bad), f"{later}\n{told}"
    assert bad or rig.cluster.status_writes == writes, told


def check(rig: Rig, name: str, spec: dict[str, Any], worker: ScriptedWorker, told: str) -> None:
    record, path = worker.adapters[name], spec["source"]["path"]
    about = f"{name} {record} {rig.adapter_status(name)}\n{told}"
    if rig.adapter_condition("Degraded", name) == ("True", "ReloadLoop"):
        return
    if path == BAD and spec.get("residency") != "OnDemand":
        assert rig.adapter_condition("SourceResolved", name) == ("False", "InvalidAdapter"), about
        return
    if path == BAD:
        return
    ready = rig.adapter_condition("Ready", name)
    crowded = ready == ("False", "Evicted") and worker.max_cached == NO_ROOM["maxCached"]
    assert ready[0] == "True" or crowded, about
    assert record.digest in (None, "sha256:" + path.strip("/").replace("/", "-")), about
    assert record.source.path == path, about
    assert record.scale == float(spec.get("defaultScale", "1.0")), about
    assert record.residency.value == spec.get("residency", "Cached"), about
    if spec.get("residency") == "Resident":
        assert record.state is RecordState.LOADED, about
