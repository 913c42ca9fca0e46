# SPDX-License-Identifier: Apache-2.0
"""Random sequences of edits, scales, deletes, losses of pods and deaths of the operator, against a real API server and a fake kubelet.

Many at once, each in a namespace of its own, under one operator that is killed again and again: at any moment, or before or after
something it does. Then it is left in peace, and everything must come to what was asked for.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from diffusion_operator.api.names import ADAPTER, ANNOTATION_RESTARTED_AT, CONFIG_MAP, DEPLOYMENT, POD, SECRET, SERVICE, Kind
from support.operator.fake_kubelet import FakeKubelet
from support.operator.rest_client import RestClient
from support.soak.frame import Outcome
from support.soak.operator_invariants import still_found, untrue
from support.soak.operator_process import OperatorProcess

AT_ONCE = 20
STEPS = (4, 10)
PAUSE_S = 1.0
OPERATOR_LIVES_S = (0.5, 3.0)
LEAST_DEATHS = 3  # of a round
DIE_WITHIN = 600  # places: the first few hundred after a start are applies of children
TRUE_WITHIN_S = 90.0
POLICIES, LEVELS = ("AlwaysAwake", "Asleep"), ("HostMemory", "Discard")
# The steps, and how often each is taken.
WEIGHTS = {
    "scale": 4, "scale_by_subresource": 2, "template": 3, "sleep": 4, "suspend": 1, "restart": 1, "put_adapter": 3, "change_adapter": 2,
    "drop_adapter": 2, "delete_pod": 3, "kill_pod": 3, "crash": 2, "delete_child": 2, "redeploy": 1,
}  # fmt: skip
# Those that change the deployment.
EDITS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "scale": lambda rng: {"spec": {"replicas": rng.randint(0, 3)}},
    "scale_by_subresource": lambda rng: {"spec": {"replicas": rng.randint(0, 3)}},
    "template": lambda rng: {"spec": {"engine": {"maxBatchSize": rng.randint(1, 4)}}},
    "sleep": lambda rng: {"spec": {"sleep": {"policy": rng.choice(POLICIES), "level": rng.choice(LEVELS)}}},
    "suspend": lambda rng: {"spec": {"suspend": rng.random() < 0.4}},
    "restart": lambda rng: {"metadata": {"annotations": {ANNOTATION_RESTARTED_AT: f"{rng.random()}"}}},
}


async def run_sequences(folder: Path, kubeconfig: Path, *, seed: int, count: int, limit_s: float, at_once: int = AT_ONCE) -> Outcome:
    """Rounds of `at_once` until there were so many, or the time is over.

    Real: the API server and the operator's process. Not real: the kubelet, the workers and the garbage collector, all `FakeKubelet`.
    """
    counts = {"sequences": 0, "steps": Counter(), "killed": 0, "died_at": Counter()}
    outcome, rng = Outcome(seed, "sequences", **counts, slowest_s=0.0, resident_mib=[]), random.Random(seed)
    async with RestClient(kubeconfig) as client, FakeKubelet(client, rng) as kubelet:
        operator = OperatorProcess(folder, kubeconfig, control_port=kubelet.port)
        try:
            for done in outcome.until(count, limit_s):
                names = [f"sequence-{done + number}" for number in range(min(at_once, count - done))]
                running = [Sequence(client, kubelet, name, random.Random(rng.random()), outcome.steps) for name in names]
                await _round(running, operator, outcome, rng)
        finally:
            await asyncio.to_thread(operator.stop)
        outcome.wrong += kubelet.wrong
    outcome.wrong += [f"the operator complains: {line[:600]}" for line in operator.complaints() if "ClusterUnavailable" not in line]
    outcome.died_at.update(line.split(" ")[2] for line in operator.log.read_text().splitlines() if line.startswith("dies "))
    return outcome


async def _round(running: list["Sequence"], operator: OperatorProcess, outcome: Outcome, rng: random.Random) -> None:
    playing = asyncio.gather(*(one.play() for one in running))
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
    outcome.wrong += [what for found in await asyncio.gather(*(one.settle() for one in running)) for what in found]
    outcome.slowest_s = round(max(outcome.slowest_s, time.monotonic() - begun), 1)
    outcome.resident_mib.append(operator.resident_bytes() // 2**20)
    await asyncio.gather(*(one.end() for one in running))
    outcome.sequences += len(running)


class Sequence:
    """One namespace with at most one deployment, `d`, and a few adapters."""

    def __init__(self, client: RestClient, kubelet: FakeKubelet, namespace: str, rng: random.Random, steps: Counter[str]) -> None:
        self._client, self._kubelet, self._namespace = client, kubelet, namespace
        self._rng, self._steps, self._crashes = rng, steps, 0
        self.trace: list[str] = []

    async def play(self) -> None:
        """The random part."""
        await self._client.make_namespace(self._namespace)
        await self._deploy()
        for _ in range(self._rng.randint(*STEPS)):
            (name,) = self._rng.choices([*WEIGHTS], weights=[*WEIGHTS.values()])
            self.trace.append(name)
            self._steps[name] += 1
            if name in EDITS:
                subresource = "/scale" if name == "scale_by_subresource" else ""
                await self._client.patch(DEPLOYMENT, self._namespace, "d", EDITS[name](self._rng), subresource=subresource)
            else:
                await getattr(self, f"_{name}")()
            await asyncio.sleep(self._rng.uniform(0, PAUSE_S))

    async def settle(self) -> list[str]:
        """What is still not true when it should be."""
        wrong = await still_found(partial(untrue, self._client, self._kubelet, self._namespace), within_s=TRUE_WITHIN_S, every_s=0.5)
        return [f"{self._namespace} after {self.trace}: {what}" for what in wrong]

    async def end(self) -> None:
        """All is deleted; the fake garbage collector does the rest."""
        for kind in (DEPLOYMENT, ADAPTER):
            for one in await self._client.list(kind, self._namespace):
                await self._client.delete(kind, self._namespace, one["metadata"]["name"])

    async def _create(self, kind: Kind, name: str, spec: dict[str, Any]) -> None:
        document = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": {"name": name}, "spec": spec}
        await self._client.create(kind, self._namespace, document)

    async def _deploy(self) -> None:
        base = {"model": {"source": {"path": "/models/m"}}, "resources": {"gpuResourceName": "none"}}
        await self._create(DEPLOYMENT, "d", base | {"replicas": self._rng.randint(0, 3)})

    async def _redeploy(self) -> None:
        await self._client.delete(DEPLOYMENT, self._namespace, "d")
        await asyncio.sleep(self._rng.uniform(0, PAUSE_S))
        await self._deploy()

    async def _put_adapter(self) -> None:
        name = self._rng.choice("abc")
        await self._create(ADAPTER, name, {"deploymentRef": {"name": "d"}, "source": {"path": f"/loras/{name}"}})

    async def _change_adapter(self) -> None:
        scale, source = f"0.{self._rng.randint(1, 9)}", {"path": f"/loras/{self._rng.randint(1, 9)}"}
        change = self._rng.choice(({"defaultScale": scale}, {"source": source}))
        await self._client.patch(ADAPTER, self._namespace, self._rng.choice("abc"), {"spec": change})

    async def _drop_adapter(self) -> None:
        await self._client.delete(ADAPTER, self._namespace, self._rng.choice("abc"))

    async def _some_pod(self) -> list[Any]:
        pods = await self._client.list(POD, self._namespace)
        return [self._rng.choice(pods)] if pods else []

    async def _delete_pod(self, *, at_once: bool = False) -> None:
        for pod in await self._some_pod():
            await self._client.delete(POD, self._namespace, pod["metadata"]["name"], at_once=at_once)

    async def _kill_pod(self) -> None:
        await self._delete_pod(at_once=True)

    async def _crash(self) -> None:
        """At most twice, so that it is no loop of crashes."""
        self._crashes += 1
        for pod in await self._some_pod() if self._crashes <= 2 else ():
            await self._kubelet.crash(pod)

    async def _delete_child(self) -> None:
        kind, name = self._rng.choice(((SERVICE, "d"), (CONFIG_MAP, "d-desired"), (SECRET, "d-control")))
        if kind is not SECRET:  # nobody watches it: it comes back with the next resync
            await self._client.delete(kind, self._namespace, name)
