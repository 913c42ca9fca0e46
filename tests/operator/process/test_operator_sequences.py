# SPDX-License-Identifier: Apache-2.0
"""The operator as a process, killed while people edit, against a real API server and a fake kubelet: a sample of the sequences that
`make soak SOAK="--part operator"` plays, two operators at once (RF6), a namespace that ends, and a storm of edits.
"""

import asyncio
import json
import time
from pathlib import Path

import pytest

from diffusion_operator.api.names import ADAPTER, DEPLOYMENT, POD, SERVICE
from diffusion_operator.reconcile.keyed_queue import JOIN_S
from support.operator.fake_kubelet import FakeKubelet
from support.operator.rest_client import RestClient, path_of
from support.operator.sole_operator import adapter, complaints, deployment, eventually_nothing, running, status_writes
from support.soak.operator_sequences import run_sequences, untrue

pytestmark = [pytest.mark.apiserver, pytest.mark.slow]
EDITS, EDITS_WITHIN_S = 500, 60.0
MIB = 2**20


async def test_rf5_random_sequences_come_to_what_was_asked_for_however_often_the_operator_dies(kubeconfig: Path, tmp_path: Path) -> None:
    outcome = await run_sequences(tmp_path, kubeconfig, seed=5, count=12, limit_s=60, at_once=12)
    assert outcome.wrong == []
    assert outcome.killed + sum(outcome.died_at.values()) >= 2


async def test_rf6_two_operators_at_once_do_nothing_twice(
    kubeconfig: Path, tmp_path: Path, client: RestClient, kubelet: FakeKubelet
) -> None:
    await client.make_namespace("two-operators")
    port = kubelet.port
    with (
        running(tmp_path / "a", kubeconfig, control_port=port) as one,
        running(tmp_path / "b", kubeconfig, control_port=port) as other,
    ):

        async def settled() -> None:
            await eventually_nothing(lambda: untrue(client, kubelet, "two-operators"))

        await client.create(DEPLOYMENT, "two-operators", deployment(replicas=2))
        await settled()
        await client.create(ADAPTER, "two-operators", adapter())
        await settled()
        for spec in ({"sleep": {"policy": "Asleep"}}, {"sleep": {"policy": "AlwaysAwake"}}):
            await client.patch(DEPLOYMENT, "two-operators", "d", {"spec": spec})
            await settled()
        workers = [one.worker for one in kubelet.containers.values()]
        await client.patch(DEPLOYMENT, "two-operators", "d", {"spec": {"engine": {"maxBatchSize": 2}}})
        await settled()
        writes = status_writes(one) + status_writes(other)
        assert writes < 150
        await asyncio.sleep(6)
        assert status_writes(one) + status_writes(other) - writes <= 4, "neither takes back what the other wrote"
    assert [worker.loads for worker in workers] == [["a"], ["a"]]
    assert [[call.split()[0] for call in worker.calls if call.startswith(("sleep", "wake"))] for worker in workers] == [
        ["sleep", "wake"]
    ] * 2
    pods = await client.list(POD, "two-operators")
    assert sorted(pod["metadata"]["name"] for pod in pods) == ["d-0-1", "d-1-1"], "each was replaced once"
    assert kubelet.wrong == []
    assert complaints(one) + complaints(other) == []


async def test_nothing_is_made_and_nothing_is_said_in_a_namespace_that_ends(kubeconfig: Path, tmp_path: Path, client: RestClient) -> None:
    await client.make_namespace("ending")
    with running(tmp_path, kubeconfig) as operator:
        await client.create(DEPLOYMENT, "ending", deployment(replicas=2))
        await client.create(ADAPTER, "ending", adapter())

        async def without_pods() -> bool:
            return len(await client.list(POD, "ending")) != 2

        await eventually_nothing(without_pods)
        assert (await client.send("DELETE", "/api/v1/namespaces/ending"))[0] == 200
        status, refused = await client.create(SERVICE, "ending", {"metadata": {"name": "x"}, "spec": {"ports": [{"port": 1}]}})
        assert status == 403, refused
        # What the namespace's controller does, children first: the operator must not mind that it cannot make them again.
        for kind in (POD, SERVICE):
            for one in await client.list(kind, "ending"):
                await client.delete(kind, "ending", one["metadata"]["name"], at_once=True)
        before = operator.passes()
        await asyncio.sleep(5)
        assert operator.passes() - before < 20, "it does not try in a loop"
        assert await client.list(POD, "ending") == []
        for kind in (ADAPTER, DEPLOYMENT):
            assert (await client.send("DELETE", path_of(kind, "ending")))[0] == 200

        async def kept() -> bool:
            return bool((await asyncio.to_thread(operator.metrics))["under_test_kept"])

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
        await client.patch(DEPLOYMENT, "storm", "d", {"spec": {"replicas": 2}})
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
    """How many times; on a machine that is busy otherwise it is fewer."""
    ends, number = time.monotonic() + EDITS_WITHIN_S, 0
    while number < EDITS and time.monotonic() < ends:
        number += 1
        edit = {"replicas": number % 4, "sleep": {"idleSeconds": 10 + number}, "coldRequests": {"maxHeld": number}}
        status, found = await client.patch(DEPLOYMENT, namespace, "d", {"spec": edit})
        assert status == 200, found
    return number
