# SPDX-License-Identifier: Apache-2.0
"""Random sequences of edits, scales, deletes, losses of pods and deaths of the operator, against a real API server and a fake kubelet.

Many at once, each in a namespace of its own, under one operator that is killed again and again: at any moment, or before or after
something it does. Then it is left in peace, and everything must come to what was asked for.
"""

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffusion_operator.api.names import ADAPTER, ANNOTATION_RESTARTED_AT, CONFIG_MAP, DEPLOYMENT, POD, SECRET, SERVICE
from support.operator.fake_kubelet import FakeKubelet
from support.operator.rest_client import RestClient
from support.soak.operator_invariants import untrue
from support.soak.operator_process import OperatorProcess

AT_ONCE = 20
STEPS = (4, 10)
PAUSE_S = 1.0
OPERATOR_LIVES_S = (0.5, 3.0)
LEAST_DEATHS = 3  # of a round
DIE_WITHIN = 600  # places: the first few hundred after a start are applies of children
TRUE_WITHIN_S = 90.0


@dataclass
class Outcome:
    """What a run came to."""

    seed: int
    sequences: int = 0
    steps: Counter[str] = field(default_factory=Counter)
    killed: int = 0
    died_at: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    resident_mib: list[int] = field(default_factory=list)
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def line(self) -> str:
        """All of it, as one line of JSON."""
        return json.dumps(self.__dict__ | {"seconds": round(self.seconds, 1)})


async def run_sequences(folder: Path, kubeconfig: Path, *, seed: int, sequences: int, limit_s: float, at_once: int = AT_ONCE) -> Outcome:
    """Rounds of `at_once` until there were so many, or the time is over."""
    outcome, begun, rng = Outcome(seed), time.monotonic(), random.Random(seed)
    async with RestClient(kubeconfig) as client, FakeKubelet(client, rng) as kubelet:
        operator = OperatorProcess(folder, kubeconfig, control_port=kubelet.port)
        try:
            while outcome.sequences < sequences and time.monotonic() - begun < limit_s:
                count = min(at_once, sequences - outcome.sequences)
                await _round(client, kubelet, operator, outcome, rng, count=count)
        finally:
            await asyncio.to_thread(operator.stop)
        outcome.wrong += kubelet.wrong
    outcome.wrong += [f"the operator complains: {line[:600]}" for line in operator.complaints() if "ClusterUnavailable" not in line]
    outcome.died_at.update(
        line.removeprefix("dies ").split(" ")[1] for line in operator.log.read_text().splitlines() if line.startswith("dies ")
    )
    outcome.seconds = time.monotonic() - begun
    return outcome


async def _round(
    client: RestClient, kubelet: FakeKubelet, operator: OperatorProcess, outcome: Outcome, rng: random.Random, *, count: int
) -> None:
    running = [
        Sequence(client, kubelet, f"sequence-{outcome.sequences + number}", random.Random(rng.random()), outcome.steps)
        for number in range(count)
    ]
    playing = asyncio.gather(*(one.play() for one in running))
    await _kill_again_and_again(operator, outcome, rng, while_lasts=playing)
    await playing
    operator.kill()
    operator.start()
    await asyncio.to_thread(operator.wait_ready)
    begun = time.monotonic()
    outcome.wrong += [what for found in await asyncio.gather(*(one.settle() for one in running)) for what in found]
    outcome.slowest_s = round(max(outcome.slowest_s, time.monotonic() - begun), 1)
    outcome.resident_mib.append(operator.resident_bytes() // 2**20)
    await asyncio.gather(*(one.end() for one in running))
    outcome.sequences += count


async def _kill_again_and_again(
    operator: OperatorProcess, outcome: Outcome, rng: random.Random, *, while_lasts: asyncio.Future[Any]
) -> None:
    """And so often at least that it also dies while it brings about what was asked for last. Mostly it dies by itself, at a place
    that it was told."""
    deaths = 0
    while deaths < LEAST_DEATHS or not while_lasts.done():
        operator.kill()
        operator.start(die_at=rng.randint(1, DIE_WITHIN) if rng.random() < 0.7 else None)
        with contextlib.suppress(AssertionError):  # it died while it was starting
            await asyncio.to_thread(operator.wait_ready)
        await asyncio.sleep(rng.uniform(*OPERATOR_LIVES_S))
        outcome.killed += operator.is_alive()
        deaths += 1


class Sequence:
    """One namespace with at most one deployment, `d`, and a few adapters."""

    def __init__(self, client: RestClient, kubelet: FakeKubelet, namespace: str, rng: random.Random, steps: Counter[str]) -> None:
        self._client = client
        self._kubelet = kubelet
        self._namespace = namespace
        self._rng = rng
        self._steps = steps
        self._crashes = 0
        self.trace: list[str] = []

    async def play(self) -> None:
        """The random part."""
        await self._client.make_namespace(self._namespace)
        await self._deploy()
        choices: list[tuple[int, Callable[[], Awaitable[object]]]] = [
            (4, self._scale), (2, self._scale_by_subresource), (3, self._template), (4, self._sleep), (1, self._suspend),
            (1, self._restart),
            (3, self._put_adapter), (2, self._change_adapter), (2, self._drop_adapter), (3, self._delete_pod), (3, self._kill_pod),
            (2, self._crash), (2, self._delete_child), (1, self._redeploy),
        ]  # fmt: skip
        for _ in range(self._rng.randint(*STEPS)):
            (step,) = self._rng.choices([one for _, one in choices], weights=[weight for weight, _ in choices])
            self.trace.append(step.__name__.strip("_"))
            self._steps[self.trace[-1]] += 1
            await step()
            await asyncio.sleep(self._rng.uniform(0, PAUSE_S))

    async def settle(self) -> list[str]:
        """What is still not true when it should be."""
        deadline = time.monotonic() + TRUE_WITHIN_S
        while wrong := await untrue(self._client, self._kubelet, self._namespace):
            if time.monotonic() > deadline:
                return [f"{self._namespace} after {self.trace}: {what}" for what in wrong]
            await asyncio.sleep(0.5)
        return []

    async def end(self) -> None:
        """All is deleted; the fake garbage collector does the rest."""
        await self._client.delete(DEPLOYMENT, self._namespace, "d")
        for one in await self._client.list(ADAPTER, self._namespace):
            await self._client.delete(ADAPTER, self._namespace, one["metadata"]["name"])

    # steps ------------------------------------------------------------------------------------------------------------

    async def _deploy(self) -> None:
        spec = {"model": {"source": {"path": "/models/m"}}, "resources": {"gpuResourceName": "none"}, "replicas": self._rng.randint(0, 3)}
        document = {"apiVersion": DEPLOYMENT.api_version, "kind": DEPLOYMENT.kind, "metadata": {"name": "d"}, "spec": spec}
        await self._client.create(DEPLOYMENT, self._namespace, document)

    async def _redeploy(self) -> None:
        await self._client.delete(DEPLOYMENT, self._namespace, "d")
        await asyncio.sleep(self._rng.uniform(0, PAUSE_S))
        await self._deploy()

    async def _edit(self, **spec: Any) -> None:
        await self._client.patch(DEPLOYMENT, self._namespace, "d", {"spec": spec})

    async def _scale(self) -> None:
        await self._edit(replicas=self._rng.randint(0, 3))

    async def _scale_by_subresource(self) -> None:
        changes = {"spec": {"replicas": self._rng.randint(0, 3)}}
        await self._client.patch(DEPLOYMENT, self._namespace, "d", changes, subresource="/scale")

    async def _template(self) -> None:
        await self._edit(engine={"maxBatchSize": self._rng.randint(1, 4)})

    async def _sleep(self) -> None:
        await self._edit(
            sleep={"policy": self._rng.choice(("AlwaysAwake", "Asleep")), "level": self._rng.choice(("HostMemory", "Discard"))}
        )

    async def _suspend(self) -> None:
        await self._edit(suspend=self._rng.random() < 0.4)

    async def _restart(self) -> None:
        annotations = {ANNOTATION_RESTARTED_AT: f"{self._rng.random()}"}
        await self._client.patch(DEPLOYMENT, self._namespace, "d", {"metadata": {"annotations": annotations}})

    async def _put_adapter(self) -> None:
        name = self._rng.choice("abc")
        spec = {"deploymentRef": {"name": "d"}, "source": {"path": f"/loras/{name}"}}
        document = {"apiVersion": ADAPTER.api_version, "kind": ADAPTER.kind, "metadata": {"name": name}, "spec": spec}
        await self._client.create(ADAPTER, self._namespace, document)

    async def _change_adapter(self) -> None:
        change = self._rng.choice(
            ({"defaultScale": f"0.{self._rng.randint(1, 9)}"}, {"source": {"path": f"/loras/{self._rng.randint(1, 9)}"}})
        )
        await self._client.patch(ADAPTER, self._namespace, self._rng.choice("abc"), {"spec": change})

    async def _drop_adapter(self) -> None:
        await self._client.delete(ADAPTER, self._namespace, self._rng.choice("abc"))

    async def _some_pod(self) -> Any:
        pods = await self._client.list(POD, self._namespace)
        return self._rng.choice(pods) if pods else None

    async def _delete_pod(self) -> None:
        if pod := await self._some_pod():
            await self._client.delete(POD, self._namespace, pod["metadata"]["name"])

    async def _kill_pod(self) -> None:
        if pod := await self._some_pod():
            await self._client.delete(POD, self._namespace, pod["metadata"]["name"], at_once=True)

    async def _crash(self) -> None:
        """At most twice, so that it is no loop of crashes."""
        self._crashes += 1
        if self._crashes <= 2 and (pod := await self._some_pod()):
            await self._kubelet.crash(pod)

    async def _delete_child(self) -> None:
        kind, name = self._rng.choice(((SERVICE, "d"), (CONFIG_MAP, "d-desired"), (SECRET, "d-control")))
        if kind is not SECRET:  # nobody watches it: it comes back with the next resync
            await self._client.delete(kind, self._namespace, name)
