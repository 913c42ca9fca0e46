# SPDX-License-Identifier: Apache-2.0
"""Random sequences of edits, scales, deletes, losses of pods, obstacles and deaths of the operator, against a real API server and a fake
kubelet.

Many run at once, each in a namespace of its own. The operator is killed again and again, or the leader of two operators is. When the
sequences are over, every status must be true of the obstacles that are left. Then the obstacles are removed, and everything must become as
the specs say, without an edit and without a restart of an operator.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from diffusion_operator.api import names
from diffusion_operator.api.names import ADAPTER, CONFIG_MAP, DEPLOYMENT, POD, SERVICE, Kind
from support.apiserver.admission import Webhook, refusing_policy
from support.apiserver.rest_client import RestClient
from support.operator.fake_kubelet import FakeKubelet
from support.operator.rig import adapter, deployment
from support.soak.frame import Outcome
from support.soak.operator_lives import OneOperator, TwoOperators
from support.soak.operator_obstacles import Obstacles
from support.soak.operator_truth import overclaimed, owners, still_found, unsound, untrue

AT_ONCE = 20
LENGTH = (4, 10)
PAUSE_S = 1.0
TRUE_WITHIN_S = 90.0
NAMESPACE_ENDS_WITHIN_S = 30.0
# The pause after a node's fault must not be longer than a test.
RECOVERY = {"backoffSeconds": 1, "backoffMaxSeconds": 4}
POLICIES, LEVELS = ("AlwaysAwake", "Asleep"), ("HostMemory", "Discard")
# The steps by name: a weight, and the action.
Steps = dict[str, tuple[int, Callable[["Sequence", Random], Awaitable[Any]]]]
EDITS: Steps = {
    "scale": (4, lambda one, rng: one.edit({"spec": {"replicas": rng.randint(0, 3)}})),
    "scale_by_subresource": (2, lambda one, rng: one.edit({"spec": {"replicas": rng.randint(0, 3)}}, subresource="/scale")),
    "template": (3, lambda one, rng: one.edit({"spec": {"engine": {"maxBatchSize": rng.randint(1, 4)}}})),
    "sleep": (4, lambda one, rng: one.edit({"spec": {"sleep": {"policy": rng.choice(POLICIES), "level": rng.choice(LEVELS)}}})),
    "suspend": (1, lambda one, rng: one.edit({"spec": {"suspend": rng.random() < 0.4}})),
    "restart": (1, lambda one, rng: one.edit({"metadata": {"annotations": {names.ANNOTATION_RESTARTED_AT: f"{rng.random()}"}}})),
    "put_adapter": (3, lambda one, rng: one.put_adapter(rng.choice("abc"))),
    "change_adapter": (2, lambda one, rng: one.change_adapter(rng.choice("abc"))),
    "drop_adapter": (2, lambda one, rng: one.delete(ADAPTER, rng.choice("abc"))),
    "delete_pod": (3, lambda one, rng: one.delete_pod()),
    "kill_pod": (3, lambda one, rng: one.delete_pod(at_once=True)),
    "crash": (2, lambda one, rng: one.crash()),
    # Not the Secret, which the operator does not watch: it comes back with the next resync.
    "delete_child": (2, lambda one, rng: one.delete_child(*rng.choice(((SERVICE, "d"), (CONFIG_MAP, "d-desired"))))),
    "redeploy": (1, lambda one, rng: one.redeploy()),
    "orphan": (1, lambda one, rng: one.orphan()),
    "end_namespace": (1, lambda one, rng: one.end_namespace()),
}
OBSTACLES: dict[str, tuple[int, Callable[[Obstacles, Random], Awaitable[Any]]]] = {
    "stranger_comes": (3, lambda some, rng: some.put_stranger(rng)),
    "strange_pod_comes": (2, lambda some, rng: some.put_strange_pod(rng)),
    "stranger_goes": (2, lambda some, rng: some.take_stranger(rng)),
    "refuse": (4, lambda some, rng: some.refuse(rng)),
    "admit": (2, lambda some, rng: some.admit(rng)),
    "node": (2, lambda some, rng: some.reject_pods(rejecting=rng.random() < 0.6)),
    "drift": (4, lambda some, rng: some.drift(rng)),
}


async def run_sequences(
    folder: Path,
    kubeconfig: Path,
    *,
    seed: int,
    count: int,
    limit_s: float,
    at_once: int = AT_ONCE,
    lives: type[OneOperator | TwoOperators] = OneOperator,
    **options: Any,
) -> Outcome:
    """Run rounds of `at_once` sequences until `count` are done, or the time is over. `options` are the operators'.

    Real: the API server and the operators' processes. Not real: the kubelet, its workers and the controllers, all `FakeKubelet`.
    """
    counts = "killed obstructed slowest_s lead_changes writes"
    outcome, rng = Outcome(seed, counts=counts, tallies="steps died_at", resident_mib=[]), Random(seed)
    async with (
        RestClient(kubeconfig) as client,
        Webhook(client, folder) as webhook,
        refusing_policy(client),
        FakeKubelet(client, Random(rng.random())) as kubelet,
    ):
        operators = lives(folder, kubeconfig, control_port=kubelet.port, **options)
        try:
            await operators.begin(client)
            for done in outcome.until(count, limit_s):
                ways = {f"sequence-{number}": Random(rng.random()) for number in range(done, min(done + at_once, count))}
                sequences = [
                    Sequence(client, kubelet, name, way, outcome.steps, obstacles=Obstacles(client, kubelet, webhook, name))
                    for name, way in ways.items()
                ]
                await _round(sequences, operators, outcome, rng)
        finally:
            await asyncio.gather(*(asyncio.to_thread(one.stop) for one in operators.processes))
        outcome.wrong += kubelet.wrong
    for operator in operators.processes:
        outcome.wrong += [f"the operator complains: {line[:600]}" for line in operator.complaints() if "ClusterUnavailable" not in line]
        outcome.died_at.update(line.split(" ")[2] for line in operator.log.read_text().splitlines() if line.startswith("dies "))
    return outcome


async def _round(sequences: list["Sequence"], operators: OneOperator | TwoOperators, outcome: Outcome, rng: Random) -> None:
    playing = asyncio.gather(*(one.play() for one in sequences))
    deaths = 0
    # At least so often that an operator also dies while it works on the last edits.
    while deaths < operators.least_deaths or not playing.done():
        await operators.disturb(outcome, rng)
        deaths += 1
    await playing
    await operators.calm()
    outcome.wrong += [what for found in await asyncio.gather(*(one.obstructed() for one in sequences)) for what in found]
    begun = time.monotonic()
    outcome.obstructed += sum(one.obstacles is not None and one.obstacles.there for one in sequences)
    outcome.wrong += [what for found in await asyncio.gather(*(one.settle() for one in sequences)) for what in found]
    outcome.slowest_s = round(max(outcome.slowest_s, time.monotonic() - begun), 1)
    outcome.resident_mib.append(max(one.resident_bytes() for one in operators.processes) // 2**20)
    await asyncio.gather(*(one.end() for one in sequences))
    operators.judge(outcome)
    outcome.done += len(sequences)


class Sequence:
    """A random series of edits, and obstacles if given, in a namespace with at most one deployment, `d`, and some adapters."""

    def __init__(
        self,
        client: RestClient,
        kubelet: FakeKubelet,
        namespace: str,
        rng: Random,
        steps: Counter[str],
        *,
        obstacles: Obstacles | None = None,
    ) -> None:
        """Prepare a sequence that counts its steps in `steps`; without `obstacles` there are none."""
        self._client, self._kubelet, self._namespace = client, kubelet, namespace
        self._rng, self._steps, self._crashes = rng, steps, 0
        self.obstacles = obstacles
        self._trace: list[str] = []

    async def play(self) -> None:
        """Do the random steps. The first obstacle may come before the deployment."""
        await self._make_namespace()
        if self.obstacles is not None and self._rng.random() < 0.3:
            await self.obstacles.put_stranger(self._rng)
        await self._deploy()
        steps = {name: often for name, (often, _) in (EDITS | (OBSTACLES if self.obstacles is not None else {})).items()}
        for name in self._rng.choices([*steps], [*steps.values()], k=self._rng.randint(*LENGTH)):
            self._trace.append(name)
            self._steps[name] += 1
            await self._step(name)
            await asyncio.sleep(self._rng.uniform(0, PAUSE_S))

    async def _step(self, name: str) -> None:
        if name in EDITS:
            await EDITS[name][1](self, self._rng)
        elif self.obstacles is not None:
            await OBSTACLES[name][1](self.obstacles, self._rng)

    async def obstructed(self) -> list[str]:
        """Wait until statuses claim nothing false while the obstacles are there, and list the claims that stay false for too long."""
        strangers = self.obstacles.strangers.made if self.obstacles is not None else {}
        look = partial(overclaimed, self._client, self._kubelet, self._namespace, strangers)
        return self._told(await still_found(look, within_s=TRUE_WITHIN_S, every_s=0.5))

    async def settle(self) -> list[str]:
        """Remove the obstacles; list what was done to other owners' objects, and what stays wrong."""
        wrong = await self.obstacles.all_go() if self.obstacles is not None else []
        return self._told(wrong + await still_found(self._untrue, within_s=TRUE_WITHIN_S, every_s=0.5))

    async def _untrue(self) -> list[str]:
        wrong = await unsound(self._client, self._namespace) if self.obstacles is not None else []
        return wrong + await untrue(self._client, self._kubelet, self._namespace)

    def _told(self, wrong: list[str]) -> list[str]:
        return [f"{self._namespace} after {self._trace}: {what}" for what in wrong]

    async def end(self) -> None:
        """Delete the namespace's deployments and adapters. Their children are left to the fake garbage collector."""
        for kind in (DEPLOYMENT, ADAPTER):
            for one in await self._client.list(kind, self._namespace):
                await self.delete(kind, one["metadata"]["name"])

    async def edit(self, changes: dict[str, Any], kind: Kind = DEPLOYMENT, name: str = "d", *, subresource: str = "") -> None:
        await self._client.patch(kind, self._namespace, name, changes, subresource=subresource)

    async def delete(self, kind: Kind, name: str, *, at_once: bool = False) -> None:
        await self._client.delete(kind, self._namespace, name, at_once=at_once)

    async def _make_namespace(self) -> None:
        """Create the namespace, with the label that subjects it to the webhook."""
        await self._client.make("/api/v1/namespaces", {"metadata": {"name": self._namespace, "labels": {"webhook": "yes"}}})

    async def _deploy(self) -> None:
        made = deployment(replicas=self._rng.randint(0, 3), replicaRecovery=RECOVERY)
        await self._client.create(DEPLOYMENT, self._namespace, made)

    async def orphan(self) -> None:
        """Delete the deployment without its children, and create another of the same name."""
        await self._kubelet.controllers.delete_alone(self._namespace, "d")
        await self._deploy()

    async def end_namespace(self) -> None:
        """Delete the namespace with all its objects, wait until it is gone, and create another of the same name with a deployment."""
        path = f"/api/v1/namespaces/{self._namespace}"
        await self._client.send("DELETE", path)

        async def there() -> bool:
            return (await self._client.send("GET", path))[0] == 200

        assert not await still_found(there, within_s=NAMESPACE_ENDS_WITHIN_S, every_s=0.2), f"{self._namespace} does not end"
        if self.obstacles is not None:
            await self.obstacles.namespace_is_gone()
        await self._make_namespace()
        await self._deploy()

    async def redeploy(self) -> None:
        await self.delete(DEPLOYMENT, "d")
        await asyncio.sleep(self._rng.uniform(0, PAUSE_S))
        await self._deploy()

    async def delete_child(self, kind: Kind, name: str) -> None:
        """Delete the child of this name if it has an owner. An object without owners, such as a stranger's, stays."""
        for one in await self._client.list(kind, self._namespace):
            if one["metadata"]["name"] == name and owners(one):
                await self._client.delete(kind, self._namespace, name, uid=one["metadata"]["uid"])

    async def put_adapter(self, name: str) -> None:
        await self._client.create(ADAPTER, self._namespace, adapter(name, f"/loras/{name}"))

    async def change_adapter(self, name: str) -> None:
        scale, source = f"0.{self._rng.randint(1, 9)}", {"path": f"/loras/{self._rng.randint(1, 9)}"}
        await self.edit({"spec": self._rng.choice(({"defaultScale": scale}, {"source": source}))}, ADAPTER, name)

    async def _some_pod(self) -> list[Any]:
        pods = [pod for pod in await self._client.list(POD, self._namespace) if owners(pod)]
        return [self._rng.choice(pods)] if pods else []

    async def delete_pod(self, *, at_once: bool = False) -> None:
        for pod in await self._some_pod():
            await self.delete(POD, pod["metadata"]["name"], at_once=at_once)

    async def crash(self) -> None:
        """Crash a random pod, at most twice in a sequence, which makes no crash loop."""
        self._crashes += 1
        for pod in await self._some_pod() if self._crashes <= 2 else ():
            await self._kubelet.crash(pod)
