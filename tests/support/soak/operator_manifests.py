# SPDX-License-Identifier: Apache-2.0
"""Generated manifests against a real API server with the operator running: each is refused with the name of the field, or gets a
status that is true.

In batches, each in a namespace of its own. After a batch all is deleted, also what a garbage collector would, and the operator
must have forgotten it.
"""

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffusion_operator.api.names import ADAPTER, CONFIG_MAP, DEPLOYMENT, EVENT, POD, SECRET, SERVICE, Kind
from support.operator.manifest_strategies import Case, cases, field_names, schema_of
from support.operator.rest_client import RestClient
from support.soak.operator_process import OperatorProcess

BATCH = 100
CHILDREN = (POD, SERVICE, CONFIG_MAP, SECRET)
TRUE_WITHIN_S = 30.0
FORGOTTEN_WITHIN_S = 15.0
# A new object has a pass for itself and one for each child's event; a failing one is tried again after 1, 2, 4 … s.
MOST_PASSES = 60
IDLE_S = 5.0
# Nothing moves, so each is looked at every ten seconds at most; what failed is backing off.
IDLE_PASSES_OF_ONE = 2.0
# After the first tenth: what a longer run might add, and the allocator's whims.
GROWTH_BYTES = 20 * 2**20


@dataclass
class Outcome:
    """What a run came to."""

    seed: int
    manifests: int = 0
    refused: int = 0
    reconciled: Counter[str] = field(default_factory=Counter)
    """By kind and the reason of Ready."""
    most_passes: int = 0
    most_idle_passes_of_one: float = 0.0
    resident_mib: list[int] = field(default_factory=list)
    slowest_s: float = 0.0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def line(self) -> str:
        """All of it, as one line of JSON."""
        resident = self.resident_mib[:: max(1, len(self.resident_mib) // 10)]
        return json.dumps(self.__dict__ | {"seconds": round(self.seconds, 1), "resident_mib": resident})


async def run_manifests(folder: Path, kubeconfig: Path, *, seed: int, manifests: int, limit_s: float) -> Outcome:
    """Batch after batch until there were so many, or the time is over."""
    outcome, begun = Outcome(seed), time.monotonic()
    operator = OperatorProcess(folder, kubeconfig)
    operator.start()
    try:
        await asyncio.to_thread(operator.wait_ready)
        async with RestClient(kubeconfig) as client:
            for number in range(-(-manifests // BATCH)):
                if time.monotonic() - begun > limit_s:
                    break
                batch = cases(seed * 1_000_000 + number, count=min(BATCH, manifests - number * BATCH))
                await _Batch(client, operator, outcome, f"manifests-{number}").run(batch)
        _check_growth(outcome)
    finally:
        operator.stop()
    outcome.wrong += [f"the operator complains: {line[:600]}" for line in operator.complaints()]
    outcome.seconds = time.monotonic() - begun
    return outcome


def _check_growth(outcome: Outcome) -> None:
    found = outcome.resident_mib
    early, late = found[len(found) // 10 :][: len(found) // 10 + 1], found[-max(1, len(found) // 10) :]
    if len(found) >= 20 and max(late) - max(early) > GROWTH_BYTES / 2**20:
        outcome.wrong.append(f"the operator grew from {max(early)} to {max(late)} MiB")


class _Batch:
    def __init__(self, client: RestClient, operator: OperatorProcess, outcome: Outcome, namespace: str) -> None:
        self._client = client
        self._operator = operator
        self._outcome = outcome
        self._namespace = namespace
        self._accepted: dict[tuple[Kind, str], Case] = {}

    async def run(self, batch: Sequence[Case]) -> None:
        await self._client.make_namespace(self._namespace)
        await asyncio.gather(*(self._create(case, f"m{number}{case.suffix}") for number, case in enumerate(batch)))
        begun = time.monotonic()
        wrong = await self._settled(begun + TRUE_WITHIN_S)
        self._outcome.wrong += wrong
        self._outcome.slowest_s = max(self._outcome.slowest_s, time.monotonic() - begun)
        await self._count_passes()
        await self._delete_all()

    async def _create(self, case: Case, name: str) -> None:
        self._outcome.manifests += 1
        document = case.document | {"metadata": case.document["metadata"] | {"name": name}}
        status, answer = await self._client.create(case.kind, self._namespace, document, strict=True)
        if status == 201:
            self._accepted[case.kind, name] = case
        elif status in (400, 422):
            self._outcome.refused += 1
            if not names_the_field(answer["message"], case):
                self._outcome.wrong.append(f"the refusal names no field of {case.touched}: {answer['message'][:600]} of {_short(document)}")
        else:
            self._outcome.wrong.append(f"{status} {str(answer)[:300]} for {_short(document)}")

    async def _settled(self, deadline: float) -> list[str]:
        """What is not true at the end."""
        while wrong := await self._untrue():
            if time.monotonic() > deadline:
                return wrong
            await asyncio.sleep(0.3)
        objects = [*await self._client.list(DEPLOYMENT, self._namespace), *await self._client.list(ADAPTER, self._namespace)]
        self._outcome.reconciled.update(f"{one['kind']} {_ready(one)['reason']}" for one in objects)
        return []

    async def _untrue(self) -> list[str]:
        found = {kind: await self._client.list(kind, self._namespace) for kind in (DEPLOYMENT, ADAPTER, *CHILDREN)}
        objects = {(kind, one["metadata"]["name"]): one for kind in (DEPLOYMENT, ADAPTER) for one in found[kind]}
        wrong = [f"{name} is gone" for _, name in self._accepted.keys() - objects.keys()]
        for (kind, _), one in objects.items():
            wrong += [f"{what}: {_short(one)}" for what in [*_unsaid(one), *(_unlike_children(one, found) if kind is DEPLOYMENT else ())]]
        return wrong

    async def _count_passes(self) -> None:
        metrics = await asyncio.to_thread(self._operator.metrics)
        most = int(metrics["under_test_most_passes"])
        self._outcome.most_passes = max(self._outcome.most_passes, most)
        if most > MOST_PASSES:
            self._outcome.wrong.append(f"{self._namespace}: {most} passes over one object")
        if self._outcome.manifests % (10 * BATCH) == BATCH and self._accepted:
            before = await asyncio.to_thread(self._operator.passes)
            await asyncio.sleep(IDLE_S)
            idle = (await asyncio.to_thread(self._operator.passes) - before) / len(self._accepted)
            self._outcome.most_idle_passes_of_one = max(self._outcome.most_idle_passes_of_one, round(idle, 2))
            if idle > IDLE_PASSES_OF_ONE:
                self._outcome.wrong.append(f"{self._namespace}: {idle:.1f} passes over each object in {IDLE_S:g} s in which nothing moved")

    async def _delete_all(self) -> None:
        """As a user, then as the garbage collector; then nothing is left of it in the operator, and nothing comes back."""
        for kind in (DEPLOYMENT, ADAPTER, *CHILDREN, EVENT):
            path = f"/{'apis' if '/' in kind.api_version else 'api'}/{kind.api_version}/namespaces/{self._namespace}/{kind.plural}"
            status, answer = await self._client.send("DELETE", path, {"gracePeriodSeconds": 0})
            if status != 200:
                self._outcome.wrong.append(f"{self._namespace}: deleting {kind.plural}: {status} {answer}")
            for one in await self._client.list(kind, self._namespace):  # a service is deleted one by one
                if kind in (DEPLOYMENT, ADAPTER) and one["metadata"].get("finalizers"):
                    self._outcome.wrong.append(f"a finalizer on {_short(one)}")
                await self._client.delete(kind, self._namespace, one["metadata"]["name"], at_once=True)
        ends = time.monotonic() + FORGOTTEN_WITHIN_S
        while kept := (await asyncio.to_thread(self._operator.metrics))["under_test_kept"]:
            if time.monotonic() > ends:
                self._outcome.wrong.append(f"{self._namespace}: the operator keeps {kept:g} entries about objects that are gone")
                break
            await asyncio.sleep(0.1)
        left = [one["metadata"]["name"] for kind in CHILDREN for one in await self._client.list(kind, self._namespace)]
        if left:
            self._outcome.wrong.append(f"{self._namespace}: {left} came back after they were deleted")
        self._outcome.resident_mib.append(self._operator.resident_bytes() // 2**20)


def names_the_field(message: str, case: Case) -> bool:
    """One that was changed or one around it; where none was, any of the schema."""
    words = set(re.findall(r"\w+", message))
    if case.touched[-1:] == ("spec",) and "spec" in words:
        return True
    known = {*field_names(schema_of(case.kind)), *(word for name in case.touched for word in re.findall(r"\w+", name)), "metadata"}
    return bool(words & (known - {"spec"}))


def _unsaid(one: Any) -> list[str]:
    status = one.get("status", {})
    if status.get("observedGeneration") != one["metadata"]["generation"]:
        return ["not observed"]
    ready = _ready(one)
    if not (ready and ready["reason"] and ready["status"] in ("True", "False", "Unknown")):
        return ["no Ready condition"]
    if ready["status"] == "True" and one["kind"] == DEPLOYMENT.kind:
        return ["Ready without a kubelet"]
    return []


def _unlike_children(one: Any, found: dict[Kind, list[Any]]) -> list[str]:
    """The status against what is there; without a kubelet no pod goes beyond Pending."""
    uid, status, spec = one["metadata"]["uid"], one.get("status", {}), one["spec"]
    own = {kind: [child for child in found[kind] if _is_owned(child, uid)] for kind in CHILDREN}
    refused = any(condition["reason"] not in ("Starting", "Pending", "NoReplicas") for condition in [_ready(one) or {"reason": ""}])
    wrong = []
    if status.get("replicas") != len(own[POD]):
        wrong.append(f"status.replicas is {status.get('replicas')}, and there are {len(own[POD])} pods")
    if len(own[POD]) != spec["replicas"] and not refused and not spec.get("suspend"):
        wrong.append(f"{len(own[POD])} of {spec['replicas']} pods, and Ready does not say why: {_ready(one)}")
    if not refused and not (own[SERVICE] and own[CONFIG_MAP] and own[SECRET]):
        wrong.append(f"children are missing, and Ready does not say why: {_ready(one)}")
    return wrong


def _is_owned(child: Any, uid: str) -> bool:
    return any(owner["uid"] == uid for owner in child["metadata"].get("ownerReferences", ()))


def _ready(one: Any) -> Any:
    return next((condition for condition in one.get("status", {}).get("conditions", ()) if condition["type"] == "Ready"), None)


def _short(document: Any) -> str:
    kept = {key: document[key] for key in ("kind", "metadata", "spec", "status") if key in document}
    kept["metadata"] = {"name": document["metadata"].get("name")}
    return json.dumps(kept)[:1500]
