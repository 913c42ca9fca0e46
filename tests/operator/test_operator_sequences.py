# SPDX-License-Identifier: Apache-2.0
"""The operator as a process, killed while people edit, against a real API server and a fake kubelet: a sample of the sequences that
`make soak SOAK="--part operator"` plays, two operators at once (RF6), a namespace that ends, and a storm of edits.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from diffusion_operator.api.names import ADAPTER, DEPLOYMENT, POD, SERVICE
from fake_kubelet import FakeKubelet
from rest_client import RestClient, path_of
from soak_operator_invariants import untrue
from soak_operator_process import OperatorProcess, own_apiserver
from soak_operator_sequences import run_sequences

pytestmark = [pytest.mark.apiserver, pytest.mark.slow]
DEADLINE_S = 60.0
EDITS = 200


@pytest.fixture(scope="module")
def kubeconfig() -> Iterator[Path]:
    with own_apiserver() as made:
        yield made


@pytest.fixture
async def client(kubeconfig: Path) -> AsyncIterator[RestClient]:
    """What a test made is gone after it, because each operator watches all namespaces."""
    async with RestClient(kubeconfig) as made:
        yield made
        for namespace in (one["metadata"]["name"] for one in (await made.send("GET", "/api/v1/namespaces"))[1]["items"]):
            for kind in (ADAPTER, DEPLOYMENT):
                await made.send("DELETE", path_of(kind, namespace))


@pytest.fixture
async def kubelet(client: RestClient) -> AsyncIterator[FakeKubelet]:
    async with FakeKubelet(client, Random()) as made:
        yield made


@contextmanager
def running(folder: Path, kubeconfig: Path, *, control_port: int | None = None) -> Iterator[OperatorProcess]:
    folder.mkdir(exist_ok=True)
    operator = OperatorProcess(folder, kubeconfig, control_port=control_port)
    operator.start()
    try:
        operator.wait_ready()
        yield operator
    finally:
        operator.stop()


async def eventually_nothing(look: Any) -> None:
    """Until it finds nothing wrong."""
    found: Any = None
    try:
        async with asyncio.timeout(DEADLINE_S):
            while found := await look():  # noqa: ASYNC110
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise AssertionError(f"after {DEADLINE_S:g} s: {found}") from None


def deployment(**spec: Any) -> dict[str, Any]:
    base = {"model": {"source": {"path": "/models/m"}}, "resources": {"gpuResourceName": "none"}}
    return {"apiVersion": DEPLOYMENT.api_version, "kind": DEPLOYMENT.kind, "metadata": {"name": "d"}, "spec": base | spec}


def adapter(name: str = "a") -> dict[str, Any]:
    spec = {"deploymentRef": {"name": "d"}, "source": {"path": "/loras/a"}}
    return {"apiVersion": ADAPTER.api_version, "kind": ADAPTER.kind, "metadata": {"name": name}, "spec": spec}


async def test_rf5_random_sequences_come_to_what_was_asked_for_however_often_the_operator_dies(kubeconfig: Path, tmp_path: Path) -> None:
    outcome = await run_sequences(tmp_path, kubeconfig, seed=5, sequences=12, limit_s=60, at_once=12)
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
        writes = _status_writes(one) + _status_writes(other)
        assert writes < 150
        await asyncio.sleep(6)
        assert _status_writes(one) + _status_writes(other) - writes <= 4, "neither takes back what the other wrote"
    assert [worker.loads for worker in workers] == [["a"], ["a"]]
    assert [[call.split()[0] for call in worker.calls if call.startswith(("sleep", "wake"))] for worker in workers] == [
        ["sleep", "wake"]
    ] * 2
    pods = await client.list(POD, "two-operators")
    assert sorted(pod["metadata"]["name"] for pod in pods) == ["d-0-1", "d-1-1"], "each was replaced once"
    assert kubelet.wrong == []
    assert one.complaints() + other.complaints() == []


def _status_writes(operator: OperatorProcess) -> int:
    return int(sum(value for name, value in operator.metrics().items() if "under_test_actions" in name and "apply_status" in name))


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
        before = _status_writes(operator)
        for number in range(EDITS):
            edit = {"replicas": number % 4, "sleep": {"idleSeconds": 10 + number}, "coldRequests": {"maxHeld": number}}
            status, found = await client.patch(DEPLOYMENT, "storm", "d", {"spec": edit})
            assert status == 200, found
        await client.patch(DEPLOYMENT, "storm", "d", {"spec": {"replicas": 2}})
        await eventually_nothing(lambda: untrue(client, kubelet, "storm"))
        (found,) = await client.list(DEPLOYMENT, "storm")
        assert found["status"]["observedGeneration"] == found["metadata"]["generation"] >= EDITS
        desired = (await client.send("GET", "/api/v1/namespaces/storm/configmaps/d-desired"))[1]
        assert json.loads(desired["data"]["desired.json"])["coldRequests"]["maxHeld"] == EDITS - 1
        assert _status_writes(operator) - before <= EDITS + 20, "an edit is worth one write at most"
        assert operator.complaints() == []
    assert kubelet.wrong == []
