# SPDX-License-Identifier: Apache-2.0
"""The operator as a process, killed while people edit, against a real API server and a fake kubelet.

A sample of the sequences that `make soak` plays in its parts `operator` and `two-operators`, a namespace that ends, and a storm of edits.
"""

import asyncio
import json
import time
from pathlib import Path

import pytest

from diffusion_operator.api.names import ADAPTER, DEPLOYMENT, POD, SERVICE
from diffusion_operator.reconcile.keyed_queue import JOIN_S
from support.apiserver.real_apiserver import own_apiserver
from support.apiserver.rest_client import RestClient, path_of
from support.operator.fake_kubelet import FakeKubelet
from support.operator.sole_operator import adapter, complaints, deployment, eventually_nothing, running, status_writes
from support.soak.operator_lives import TwoOperators
from support.soak.operator_sequences import run_sequences
from support.soak.operator_truth import untrue

pytestmark = [pytest.mark.apiserver, pytest.mark.slow]
# With this seed the leader is first killed and then ended.
SEED_OF_DEATHS = 4
EDITS, EDITS_WITHIN_S, EDITORS = 100, 30.0, 8
MIB = 2**20


async def test_random_sequences_come_to_what_was_asked_for_however_often_the_operator_dies(kubeconfig: Path, tmp_path: Path) -> None:
    outcome = await run_sequences(tmp_path, kubeconfig, seed=5, count=6, limit_s=600, at_once=6, strangers_s=5.0)
    assert outcome.wrong == []
    assert outcome.obstructed > 1
    assert outcome.killed + sum(outcome.died_at.values()) >= 2


async def test_random_sequences_come_to_what_was_asked_for_while_leaders_die_and_one_operator_writes_at_a_time(tmp_path: Path) -> None:
    with own_apiserver(audited=True) as kubeconfig:
        options = {"lives": TwoOperators, "strangers_s": 5.0}
        outcome = await run_sequences(tmp_path, kubeconfig, seed=SEED_OF_DEATHS, count=6, limit_s=600, at_once=6, **options)
    assert outcome.wrong == []
    assert outcome.steps["leader killed"] >= 1
    assert outcome.lead_changes >= 1
    assert outcome.writes > 20


async def test_nothing_is_made_and_nothing_is_said_in_a_namespace_that_ends(kubeconfig: Path, tmp_path: Path, client: RestClient) -> None:
    await client.make_namespace("ending")
    with running(tmp_path, kubeconfig) as operator:
        await client.create(DEPLOYMENT, "ending", deployment(replicas=2))
        await client.create(ADAPTER, "ending", adapter())

        async def without_pods() -> str:
            pods = [pod["metadata"]["name"] for pod in await client.list(POD, "ending")]
            return "" if len(pods) == 2 else f"not two pods: {pods}; {operator.log.read_text()[-2000:]}"

        await eventually_nothing(without_pods)
        assert (await client.send("DELETE", "/api/v1/namespaces/ending"))[0] == 200
        status, refused = await client.create(SERVICE, "ending", {"metadata": {"name": "x"}, "spec": {"ports": [{"port": 1}]}})
        assert status == 403, refused
        # The namespace's controller deletes children first: the operator must not mind that it cannot recreate them.
        for kind in (POD, SERVICE):
            for one in await client.list(kind, "ending"):
                await client.delete(kind, "ending", one["metadata"]["name"], at_once=True)
        before = operator.passes()
        await asyncio.sleep(5)
        assert operator.passes() - before < 20, "it does not try in a loop"
        assert await client.list(POD, "ending") == []
        for kind in (ADAPTER, DEPLOYMENT):
            assert (await client.send("DELETE", path_of(kind, "ending")))[0] == 200

        async def kept() -> list[str]:
            return await asyncio.to_thread(operator.kept, "ending")

        await eventually_nothing(kept)
        noise = [line for line in operator.log.read_text().splitlines() if "ending" in line and ("WARNING" in line or "ERROR" in line)]
        assert noise == []


async def test_of_a_storm_of_edits_the_last_one_counts_and_few_writes_are_made(
    kubeconfig: Path, tmp_path: Path, client: RestClient, kubelet: FakeKubelet
) -> None:
    await client.make_namespace("storm")
    with running(tmp_path, kubeconfig, control_port=kubelet.port) as operator:
        await client.create(DEPLOYMENT, "storm", deployment())
        await eventually_nothing(lambda: untrue(client, kubelet, "storm"))
        before, passes, resident = status_writes(operator), operator.passes(), operator.resident_bytes()
        begun = time.monotonic()
        number = await _edit_as_fast_as_the_api_allows(client, "storm")
        await client.patch(DEPLOYMENT, "storm", "d", {"spec": {"replicas": 2, "coldRequests": {"maxHeld": number}}})
        await eventually_nothing(lambda: untrue(client, kubelet, "storm"))
        (found,) = await client.list(DEPLOYMENT, "storm")
        assert found["status"]["observedGeneration"] == found["metadata"]["generation"] >= number
        desired = (await client.send("GET", "/api/v1/namespaces/storm/configmaps/d-desired"))[1]
        assert json.loads(desired["data"]["desired.json"])["coldRequests"]["maxHeld"] == number
        assert status_writes(operator) - before <= number + 20, "an edit is worth one write at most"
        assert operator.passes() - passes <= (time.monotonic() - begun) / JOIN_S, "those that come in a burst are worth one pass"
        assert operator.resident_bytes() - resident < 10 * MIB
        assert complaints(operator) == []
    assert kubelet.wrong == []


async def _edit_as_fast_as_the_api_allows(client: RestClient, namespace: str) -> int:
    """Edit the deployment `d` by several clients at once until all edits are made or the time is over; return the number of edits."""
    ends, numbers, made = time.monotonic() + EDITS_WITHIN_S, iter(range(1, EDITS + 1)), []

    async def edit() -> None:
        for number in numbers:
            spec = {"replicas": number % 4, "sleep": {"idleSeconds": 10 + number}, "coldRequests": {"maxHeld": number}}
            status, found = await client.patch(DEPLOYMENT, namespace, "d", {"spec": spec})
            assert status == 200, found
            made.append(number)
            if time.monotonic() > ends:
                break

    await asyncio.gather(*(edit() for _ in range(EDITORS)))
    return len(made)
