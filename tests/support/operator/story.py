# SPDX-License-Identifier: Apache-2.0
"""A deployment's whole life in virtual time, with operators that may die or be two, and its result.

A run with faults is compared with a run without any. Real: the reconciles. Not real: the cluster and the workers, which are Rig's.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from diffusion_operator.api.names import ADAPTER, DEPLOYMENT, EVENT, KINDS, POD, SERVICE
from support.operator.fault_points import Action, FaultPoints, OperatorDied, Wrapped
from support.operator.rig import Rig, adapter, deployment
from support.operator.scripted_workers import ScriptedWorker

STEP_S = 30

STORY: tuple[Callable[[Rig], object], ...] = (
    lambda rig: rig.cluster.put(deployment(replicas=2)),
    lambda rig: rig.cluster.put(adapter()),
    lambda rig: rig.cluster.change(ADAPTER, "x", lambda spec: spec.update(defaultScale="0.5")),
    lambda rig: rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(sleep={"policy": "Asleep"})),
    lambda rig: rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(sleep={"policy": "AlwaysAwake"})),
    lambda rig: rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(engine={"maxBatchSize": 2})),
    lambda rig: rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(replicas=1)),
    lambda rig: rig.cluster.remove(POD, rig.cluster.names(POD)[0]),
    lambda rig: rig.cluster.remove(SERVICE, "d"),
    lambda rig: rig.cluster.remove(ADAPTER, "x"),
    lambda rig: rig.cluster.remove(DEPLOYMENT, "d"),
)


class End(NamedTuple):
    """The state at the end of a step, and the actions until then. The choice between two equal replicas is left out."""

    standing: dict[str, Any]
    pods_made: int
    operations: list[list[str]]
    """The sleeps, wakes and loads of each worker; calls that changed nothing are left out."""
    events: Counter[tuple[str, str]]


@dataclass
class Told:
    """The result of a story: the state after each step, the places of the deaths, the faults found, and the count of status writes."""

    ends: list[End] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    status_writes: int = 0


class Teller:
    """A run of the story. The n-th operator dies at the place with the n-th number in `deaths`, counted over its own life.

    Operators after these do not die. With `second` another operator runs beside, by its random numbers.
    """

    def __init__(self, *deaths: int, second: random.Random | None = None) -> None:
        self._deaths = list(deaths)
        self.rig = Rig()
        self.told = Told()
        self._rigs = [self.rig]
        self._workers: list[ScriptedWorker] = []
        self._pods_made = 0
        self._listeners = [self.rig.cluster.on_change]
        self._begin_life()
        if second is not None:
            self._add_second(second)
        self.rig.cluster.on_change = self._changed

    def _begin_life(self) -> None:
        at = self._deaths.pop(0) if self._deaths else None
        self.points = FaultPoints(self._die, at=at)
        self.rig.runtime.cluster = self.points.wrap(self.rig.cluster)
        self.rig.runtime.workers = self.points.wrap(self.rig.workers)

    def _add_second(self, rng: random.Random) -> None:
        """Start another operator on the same objects and pods. Each call to a port yields to the event loop a random number of times, so
        that the two interleave."""
        other = Rig()
        self._listeners.append(other.cluster.on_change)
        self._rigs.append(other)

        async def hesitate(_name: str, action: Action, *given: Any, **more: Any) -> Any:
            """Yield to the event loop a random number of times before and after an action."""
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            result = await action(*given, **more)
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            return result

        for rig in self._rigs:
            rig.runtime.cluster, rig.runtime.workers = Wrapped(self.rig.cluster, hesitate), Wrapped(self.rig.workers, hesitate)

    def _die(self, place: str) -> None:
        self.told.deaths.append(place)
        raise OperatorDied(place)

    def _changed(self, change: str, manifest: dict[str, Any]) -> None:
        for listener in self._listeners:
            listener(change, manifest)
        if (change, manifest["kind"]) == ("ADDED", POD.kind):
            name = manifest["metadata"]["name"]
            replica = name.rpartition("-")[0]
            others = [one for one in self.rig.cluster.names(POD) if one.rpartition("-")[0] == replica and one != name and self._stays(one)]
            self.told.wrong += [f"pod {name} was made beside {others}"] if others else []
            self._pods_made += 1

    def _stays(self, pod: str) -> bool:
        """Return whether a pod's worker is not drained, or does not run yet; a drained one does not count among the replicas."""
        ip = (self.rig.cluster.find(POD, pod) or {}).get("status", {}).get("podIP")
        return ip is None or not self.rig.workers.at(ip).drains

    async def tell(self, *, to_the_end: bool = True) -> Told:
        """Play the steps of the story and return all that was seen. Without `to_the_end` it stops after the step that follows the first
        death."""
        slice_s = 1.0 if len(self._rigs) == 1 else 0.25
        for step in STORY:
            had_died = bool(self.told.deaths)
            step(self.rig)
            for _ in range(int(STEP_S / slice_s)):
                await self._slice(slice_s)
            self.told.ends.append(await self._end())
            if had_died and not to_the_end:
                break
        self.told.wrong += [error for rig in self._rigs for error in rig.errors]
        self.told.status_writes = self.rig.cluster.status_writes
        return self.told

    async def _slice(self, slice_s: float) -> None:
        """Run a slice of the operators' time, restarting one that died; then of the kubelet's."""
        try:
            await asyncio.gather(*(rig.run(slice_s) for rig in self._rigs))
        except OperatorDied:
            self.rig.restart_operator()
            self._begin_life()
        self._workers += self.rig.start_all()

    async def _end(self) -> End:
        events = Counter((one["reason"], one["involvedObject"]["name"]) for one in await self.rig.cluster.list(EVENT, "default"))
        return End(self._standing(), self._pods_made, sorted(map(_operations, self._workers)), events)

    def _standing(self) -> dict[str, Any]:
        rig, pods = self.rig, self.rig.cluster.names(POD)
        found: dict[str, Any] = {kind.kind: rig.cluster.names(kind) for kind in KINDS.values() if kind not in (EVENT, POD)}
        found |= {"pods": len(pods), "routable": len(rig.routable())}
        if rig.cluster.find(DEPLOYMENT, "d"):
            status = rig.status()
            told = sorted(f"d-{one['index']}-{one['incarnation']}" for one in status["replicaStates"])
            self.told.wrong += [f"the status tells of {told}, and there are {pods}"] if told != pods else []
            found |= {"conditions": _facts(status), "replicaStates": sorted(one["state"] for one in status["replicaStates"])}
            found |= {"observed": status["observedGeneration"], "desired": [one["name"] for one in rig.desired()["adapters"]]}
        if rig.cluster.find(ADAPTER, "x"):
            found |= {"adapter": _facts(rig.adapter_status())}
        return found


def _operations(worker: ScriptedWorker) -> list[str]:
    begun = [call.split()[0] for call in worker.calls]
    return sorted([*(one for one in begun if one in ("sleep", "wake")), *(f"load {name}" for name in worker.loads)])


def _facts(status: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(one["type"], one["status"], one["reason"]) for one in status["conditions"]]
