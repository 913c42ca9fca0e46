# SPDX-License-Identifier: Apache-2.0
"""Random sequences of edits, scales, deletes, losses of pods and deaths of the operator, against a real API server and a fake kubelet.

Many at once, each in a namespace of its own, under one operator that is killed again and again: at any moment, or before or after
something it does. Then it is left in peace, and everything must come to what was asked for.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from diffusion_operator.api.names import ADAPTER, ANNOTATION_RESTARTED_AT, CONFIG_MAP, DEPLOYMENT, POD, SERVICE, Kind
from support.operator.fake_kubelet import FakeKubelet
from support.operator.rest_client import RestClient
from support.operator.sole_operator import complaints, running
from support.soak.frame import Outcome
from support.soak.operator_invariants import still_found, untrue
from support.soak.operator_process import OperatorProcess

AT_ONCE = 20
LENGTH = (4, 10)
PAUSE_S = 1.0
OPERATOR_LIVES_S = (0.5, 3.0)
LEAST_DEATHS = 3  # of a round
DIE_WITHIN = 600  # places: the first few hundred after a start are applies of children
TRUE_WITHIN_S = 90.0
POLICIES, LEVELS = ("AlwaysAwake", "Asleep"), ("HostMemory", "Discard")
# How often each step is taken, and what is done.
STEPS: dict[str, tuple[int, Callable[["Sequence", Random], Awaitable[Any]]]] = {
    "scale": (4, lambda one, rng: one.edit({"spec": {"replicas": rng.randint(0, 3)}})),
    "scale_by_subresource": (2, lambda one, rng: one.edit({"spec": {"replicas": rng.randint(0, 3)}}, subresource="/scale")),
    "template": (3, lambda one, rng: one.edit({"spec": {"engine": {"maxBatchSize": rng.randint(1, 4)}}})),
    "sleep": (4, lambda one, rng: one.edit({"spec": {"sleep": {"policy": rng.choice(POLICIES), "level": rng.choice(LEVELS)}}})),
    "suspend": (1, lambda one, rng: one.edit({"spec": {"suspend": rng.random() < 0.4}})),
    "restart": (1, lambda one, rng: one.edit({"metadata": {"annotations": {ANNOTATION_RESTARTED_AT: f"{rng.random()}"}}})),
    "put_adapter": (3, lambda one, rng: one.put_adapter(rng.choice("abc"))),
    "change_adapter": (2, lambda one, rng: one.change_adapter(rng.choice("abc"))),
    "drop_adapter": (2, lambda one, rng: one.delete(ADAPTER, rng.choice("abc"))),
    "delete_pod": (3, lambda one, rng: one.delete_pod()),
    "kill_pod": (3, lambda one, rng: one.delete_pod(at_once=True)),
    "crash": (2, lambda one, rng: one.crash()),
    # Not the Secret, which nobody watches: it comes back with the next resync.
    "delete_child": (2, lambda one, rng: one.delete(*rng.choice(((SERVICE, "d"), (CONFIG_MAP, "d-desired"))))),
    "redeploy": (1, lambda one, rng: one.redeploy()),
}


async def run_sequences(folder: Path, kubeconfig: Path, *, seed: int, count: int, limit_s: float, at_once: int = AT_ONCE) -> Outcome:
    """Rounds of `at_once` until there were so many, or the time is over.

    Real: the API server and the operator's process. Not real: the kubelet, the workers and the garbage collector, all `FakeKubelet`.
    """
    counts = {"sequences": 0, "steps": Counter(), "killed": 0, "died_at": Counter()}
    outcome, rng = Outcome(seed, "sequences", **counts, slowest_s=0.0, resident_mib=[]), Random(seed)
    async with RestClient(kubeconfig) as client, FakeKubelet(client, rng) as kubelet:
        with running(folder, kubeconfig, control_port=kubelet.port) as operator:
            for done in outcome.until(count, limit_s):
                names = [f"sequence-{done + number}" for number in range(min(at_once, count - done))]
                sequences = [Sequence(client, kubelet, name, Random(rng.random()), outcome.steps) for name in names]
                await _round(sequences, operator, outcome, rng)
        outcome.wrong += kubelet.wrong
    outcome.wrong += [f"the operator complains: {line[:600]}" for line in complaints(operator)]
    outcome.died_at.update(line.split(" ")[2] for line in operator.log.read_text().splitlines() if line.startswith("dies "))
    return outcome


async def _round(sequences: list["Sequence"], operator: OperatorProcess, outcome: Outcome, rng: Random) -> None:
    playing = asyncio.gather(*(one.play() for one in sequences))
    deaths = 0
    # So often at least that it also dies while it brings about what was asked for last. Mostly it dies by itself, at a place.
    while deaths < LEAST_DEATHS or not playing.done():
        operator.kill()
        operator.start(die_at=rng.randint(1, DIE_WITHIN) if rng.random() < 0.7 else None)
        with contextlib.suppress(AssertionError):  # it died while it was starting
            await asyncio.to_thread(operator.wait_ready)
        await asyncio.sleep(rng.uniform(*OPERATOR_LIVES_S))
        outcome.killed += operator.is_alive()
        deaths += 1
    await playing
    operator.kill()
    operator.start()
    await asyncio.to_thread(operator.wait_ready)
    begun = time.monotonic()
    outcome.wrong += [what for found in await asyncio.gather(*(one.settle() for one in sequences)) for what in found]
    outcome.slowest_s = round(max(outcome.slowest_s, time.monotonic() - begun), 1)
    outcome.resident_mib.append(operator.resident_bytes() // 2**20)
    await asyncio.gather(*(one.end() for one in sequences))
    outcome.sequences += len(sequences)


class Sequence:
    """One namespace with at most one deployment, `d`, and a few adapters."""

    def __init__(self, client: RestClient, kubelet: FakeKubelet, namespace: str, rng: Random, steps: Counter[str]) -> None:
        self._client, self._kubelet, self._namespace = client, kubelet, namespace
        self._rng, self._steps, self._crashes = rng, steps, 0
        self._trace: list[str] = []

    async def play(self) -> None:
        """The random part."""
        await self._client.make_namespace(self._namespace)
        await self._deploy()
        for name in self._rng.choices([*STEPS], [often for often, _ in STEPS.values()], k=self._rng.randint(*LENGTH)):
            self._trace.append(name)
            self._steps[name] += 1
            await STEPS[name][1](self, self._rng)
            await self._pause()

    async def settle(self) -> list[str]:
        """What is still not true when it should be."""
        wrong = await still_found(partial(untrue, self._client, self._kubelet, self._namespace), within_s=TRUE_WITHIN_S, every_s=0.5)
        return [f"{self._namespace} after {self._trace}: {what}" for what in wrong]

    async def end(self) -> None:
        """All is deleted; the fake garbage collector does the rest."""
        for kind in (DEPLOYMENT, ADAPTER):
            for one in await self._client.list(kind, self._namespace):
                await self.delete(kind, one["metadata"]["name"])

    async def _pause(self) -> None:
        await asyncio.sleep(self._rng.uniform(0, PAUSE_S))

    async def _create(self, kind: Kind, name: str, spec: dict[str, Any]) -> None:
        document = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": {"name": name}, "spec": spec}
        await self._client.create(kind, self._namespace, document)

    async def edit(self, changes: dict[str, Any], kind: Kind = DEPLOYMENT, name: str = "d", *, subresource: str = "") -> None:
        await self._client.patch(kind, self._namespace, name, changes, subresource=subresource)

    async def delete(self, kind: Kind, name: str, *, at_once: bool = False) -> None:
        await self._client.delete(kind, self._namespace, name, at_once=at_once)

    async def _deploy(self) -> None:
        base = {"model": {"source": {"path": "/models/m"}}, "resources": {"gpuResourceName": "none"}}
        await self._create(DEPLOYMENT, "d", base | {"replicas": self._rng.randint(0, 3)})

    async def redeploy(self) -> None:
        await self.delete(DEPLOYMENT, "d")
        await self._pause()
        await self._deploy()

    async def put_adapter(self, name: str) -> None:
        await self._create(ADAPTER, name, {"deploymentRef": {"name": "d"}, "source": {"path": f"/loras/{name}"}})

    async def change_adapter(self, name: str) -> None:
        scale, source = f"0.{self._rng.randint(1, 9)}", {"path": f"/loras/{self._rng.randint(1, 9)}"}
        await self.edit({"spec": self._rng.choice(({"defaultScale": scale}, {"source": source}))}, ADAPTER, name)

    async def _some_pod(self) -> list[Any]:
        pods = await self._client.list(POD, self._namespace)
        return [self._rng.choice(pods)] if pods else []

    async def delete_pod(self, *, at_once: bool = False) -> None:
        for pod in await self._some_pod():
            await self.delete(POD, pod["metadata"]["name"], at_once=at_once)

    async def crash(self) -> None:
        """At most twice, so that it is no loop of crashes."""
        self._crashes += 1
        for pod in await self._some_pod() if self._crashes <= 2 else ():
            await self._kubelet.crash(pod)
