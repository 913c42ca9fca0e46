# SPDX-License-Identifier: Apache-2.0
"""Generated manifests against a real API server with the operator running: the refusal names the field, or the status is true.

They come in batches, each in a namespace of its own. Some names of children are taken by other owners' objects, and in most batches a
policy or the like refuses new objects for a while. After a batch everything is deleted, including what a garbage collector would delete,
and the operator must have forgotten it.
"""

import asyncio
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from diffusion_operator.api.names import ADAPTER, DEPLOYMENT, EVENT, POD, Kind
from support.apiserver.admission import Webhook, refusing_policy
from support.apiserver.kind_api import object_schema
from support.apiserver.rest_client import RestClient, path_of
from support.operator.manifest_strategies import Case, cases, field_names
from support.operator.sole_operator import running
from support.soak.frame import Outcome, those_that_hold
from support.soak.operator_obstacles import MEANS, Refusals, Strangers, child_names
from support.soak.operator_process import OperatorProcess
from support.soak.operator_truth import CHILDREN, condition, owns, still_found

BATCH = 100
TRUE_WITHIN_S = 30.0
# The shares of names that are taken in a batch, and of batches with refusals.
TAKEN, REFUSED = 0.3, 0.6
# The next try comes so late after a refusal that lasted TRUE_WITHIN_S.
FREE_WITHIN_S = 60.0
FORGOTTEN_WITHIN_S = 15.0
# A new object has a pass for itself and a pass for each child's event; a failing pass is repeated after 1, 2, 4 … s.
MOST_PASSES = 60
IDLE_S = 5.0
# Nothing changes, so each object has a pass every ten seconds at most, and failed ones back off.
IDLE_PASSES_OF_ONE = 2.0
# Growth after the first tenth of the run, with a margin for the allocator.
GROWTH_MIB = 20


async def run_manifests(folder: Path, kubeconfig: Path, *, seed: int, count: int, limit_s: float) -> Outcome:
    """Create and judge batches of generated manifests until `count` are done or `limit_s` ends. The outcome also has the operator's growth
    and complaints as faults.

    Real: the API server and the operator's process. Not real: the kubelet and the garbage collector, which are missing.
    """
    counts = "refused strangers obstructed most_passes most_idle_passes_of_one slowest_s"
    outcome = Outcome(seed, counts=counts, tallies="reconciled", resident_mib=[])
    with running(folder, kubeconfig) as operator:
        async with RestClient(kubeconfig) as client, Webhook(client, folder) as webhook, refusing_policy(client):
            for number, done in enumerate(outcome.until(count, limit_s)):
                own = seed * 1_000_000 + number
                batch = _Batch(client, operator, outcome, f"manifests-{number}", webhook, Random(own))
                await batch.run(cases(own, count=min(BATCH, count - done)))
    part = len(outcome.resident_mib) // 10
    if part > 1:
        early, late = max(outcome.resident_mib[part : 2 * part + 1]), max(outcome.resident_mib[-part:])
        outcome.wrong += [f"the operator grew from {early} to {late} MiB"] if late - early > GROWTH_MIB else []
    outcome.resident_mib = outcome.resident_mib[:: max(1, part)]
    outcome.wrong += [f"the operator complains: {line[:600]}" for line in operator.complaints() if "ClusterUnavailable" not in line]
    return outcome


class _Batch:
    """A namespace in which a batch of generated manifests is created, judged and deleted. The reasons of Ready are tallied by kind in
    the outcome."""

    def __init__(
        self, client: RestClient, operator: OperatorProcess, outcome: Outcome, namespace: str, webhook: Webhook, rng: Random
    ) -> None:
        self._client, self._operator, self._outcome, self._namespace, self._rng = client, operator, outcome, namespace, rng
        self._accepted: set[tuple[str, str]] = set()
        self._strangers, self._refusals = Strangers(client, namespace), Refusals(client, webhook, namespace)

    async def run(self, batch: Sequence[Case]) -> None:
        outcome = self._outcome
        await self._client.make("/api/v1/namespaces", {"metadata": {"name": self._namespace, "labels": {"webhook": "yes"}}})
        await asyncio.gather(*(self._take_a_name(f"m{number}") for number in range(len(batch)) if self._rng.random() < TAKEN))
        if self._rng.random() < REFUSED:
            await self._refusals.begin(self._rng.choice(MEANS), self._rng.choice(CHILDREN))
        await asyncio.gather(*(self._create(case, f"m{number}{case.suffix}") for number, case in enumerate(batch)))
        begun = time.monotonic()
        wrong = await still_found(self._untrue, within_s=TRUE_WITHIN_S, every_s=0.3)
        if self._refusals.there and not wrong:
            outcome.obstructed += 1
            await self._refusals.end(*MEANS)
            wrong = await still_found(self._untrue, within_s=FREE_WITHIN_S, every_s=0.3)
        if not wrong:
            objects = [one for kind in (DEPLOYMENT, ADAPTER) for one in await self._client.list(kind, self._namespace)]
            outcome.reconciled.update(f"{one['kind']} {condition(one.get('status', {}), 'Ready')['reason']}" for one in objects)
        outcome.wrong += wrong
        outcome.slowest_s = max(outcome.slowest_s, time.monotonic() - begun)
        await self._count_passes()
        outcome.strangers += len(self._strangers.made)
        await self._strangers.leave_all()
        outcome.wrong += self._strangers.touched
        await self._delete_all()
        outcome.resident_mib.append(self._operator.resident_bytes() // 2**20)

    def _wrong(self, what: str) -> None:
        self._outcome.wrong.append(f"{self._namespace}: {what}")

    async def _take_a_name(self, deployment: str) -> None:
        """Take the name of one of the deployment's children, or of its first pod."""
        kind, name = self._rng.choice([*child_names(deployment).items(), (POD, f"{deployment}-0-0")])
        await self._strangers.make(kind, name)

    async def _create(self, case: Case, name: str) -> None:
        self._outcome.done += 1
        document = case.document | {"metadata": case.document["metadata"] | {"name": name}}
        status, answer = await self._client.create(case.kind, self._namespace, document, strict=True)
        if status == 201:
            self._accepted.add((case.kind.kind, name))
        elif status in (400, 422):
            self._outcome.refused += 1
            if not names_the_field(answer["message"], case):
                self._wrong(f"the refusal names no field of {case.touched}: {answer['message'][:600]} of {_short(document)}")
        else:
            self._wrong(f"{status} {str(answer)[:300]} for {_short(document)}")

    async def _untrue(self) -> list[str]:
        """List the false statements of all statuses. A status must name the obstacles and the children that are missing for them."""
        found = {kind: await self._client.list(kind, self._namespace) for kind in (DEPLOYMENT, ADAPTER, *CHILDREN)}
        objects = found[DEPLOYMENT] + found[ADAPTER]
        gone = self._accepted - {(one["kind"], one["metadata"]["name"]) for one in objects}
        return [f"{gone} are gone"] * bool(gone) + [f"{what}: {_short(one)}" for one in objects for what in self._wrong_status(one, found)]

    def _wrong_status(self, one: Any, found: dict[Kind, list[Any]]) -> list[str]:
        """List the false statements of an object's status beside the objects that exist. Without a kubelet no pod gets beyond Pending."""
        metadata, spec, status = one["metadata"], one["spec"], one.get("status", {})
        ready = condition(status, "Ready")
        wrong = {
            "not observed": status.get("observedGeneration") != metadata["generation"],
            "no Ready condition": not (ready["reason"] and ready["status"] in ("True", "False", "Unknown")),
        }
        if one["kind"] == DEPLOYMENT.kind:
            own = {kind: [child for child in found[kind] if owns(one, child)] for kind in CHILDREN}
            count, silent = len(own[POD]), ready["reason"] in ("Starting", "Pending", "NoReplicas")
            short, children = count != spec["replicas"] and not spec.get("suspend"), condition(status, "ChildrenReady")
            missing = [kind for kind in CHILDREN[1:] if not own[kind]]
            named = child_names(metadata["name"])
            wrong |= {
                "Ready without a kubelet": ready["status"] == "True",
                f"status.replicas is {status.get('replicas')}, and there are {count} pods": status.get("replicas") != count,
                f"{count} of {spec['replicas']} pods, and Ready does not say why: {ready}": short and silent,
                f"{missing} are missing, and ChildrenReady does not say why: {children}": missing and not told(children, missing, named),
                f"{missing} are missing though nothing refuses them": missing and not self._excused(missing, named),
            }
        return those_that_hold(wrong)

    def _excused(self, missing: Sequence[Kind], named: dict[Kind, str]) -> bool:
        return bool(self._refusals.there) or all((kind, named[kind]) in self._strangers.made for kind in missing)

    async def _count_passes(self) -> None:
        outcome, most = self._outcome, int(self._operator.metrics()["under_test_most_passes"])
        outcome.most_passes = max(outcome.most_passes, most)
        if most > MOST_PASSES:
            self._wrong(f"{most} passes over one object")
        if outcome.done % (10 * BATCH) == BATCH and self._accepted:
            before = self._operator.passes()
            await asyncio.sleep(IDLE_S)
            idle = (self._operator.passes() - before) / len(self._accepted)
            outcome.most_idle_passes_of_one = max(outcome.most_idle_passes_of_one, round(idle, 2))
            if idle > IDLE_PASSES_OF_ONE:
                self._wrong(f"{idle:.1f} passes over each object in {IDLE_S:g} s in which nothing moved")

    async def _delete_all(self) -> None:
        """Delete everything as a user and then as the garbage collector would; check that the operator forgets it and remakes nothing.

        An operator that hears of a child's end before that of its owner makes the child again, and the collector takes that too. So
        children are deleted a second time once the operator has forgotten their owners.
        """
        await self._delete(DEPLOYMENT, ADAPTER)
        for _ in range(2):
            await self._delete(*CHILDREN, EVENT)
            if entries := await still_found(self._kept, within_s=FORGOTTEN_WITHIN_S, every_s=0.1):
                self._wrong(f"the operator keeps entries about objects that are gone: {entries}")
        if left := [one["metadata"]["name"] for kind in CHILDREN for one in await self._client.list(kind, self._namespace)]:
            self._wrong(f"{left} came back after they were deleted")

    async def _delete(self, *kinds: Kind) -> None:
        for kind in kinds:
            status, answer = await self._client.send("DELETE", path_of(kind, self._namespace), {"gracePeriodSeconds": 0})
            if status != 200:
                self._wrong(f"deleting {kind.plural}: {status} {answer}")
            for one in await self._client.list(kind, self._namespace):  # a service is deleted one by one
                if kind in (DEPLOYMENT, ADAPTER) and one["metadata"].get("finalizers"):
                    self._wrong(f"a finalizer on {_short(one)}")
                await self._client.delete(kind, self._namespace, one["metadata"]["name"], at_once=True)

    async def _kept(self) -> list[str]:
        return self._operator.kept(self._namespace)


def names_the_field(message: str, case: Case) -> bool:
    """Return whether a refusal names any field of the kind's schema, or a changed one. The name `spec` counts only if it was changed
    last."""
    touched = {word for name in case.touched for word in re.findall(r"\w+", name)}
    known = {*field_names(object_schema(case.kind.plural)), "metadata"} | touched
    return bool({*re.findall(r"\w+", message)} & (known if case.touched[-1:] == ("spec",) else known - {"spec"}))


def told(children: Any, missing: Sequence[Kind], named: dict[Kind, str]) -> bool:
    """Return whether the condition is False or Unknown, and its message names each of the missing children."""
    return children["status"] in ("False", "Unknown") and all(f"{kind.kind} {named[kind]}" in children["message"] for kind in missing)


def _short(document: Any) -> str:
    kept = {key: document[key] for key in ("kind", "metadata", "spec", "status") if key in document}
    return json.dumps(kept | {"metadata": {"name": document["metadata"].get("name")}})[:1500]
