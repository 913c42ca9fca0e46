# SPDX-License-Identifier: Apache-2.0
"""The operator and the worker of this version and of the version before, in all four pairings (fault 61).

Real: the API server, the operator's program, and the worker's server process with the arguments, variables and mounted files of its pod.
Not real: the ranks, which are fake, and the kubelet.
"""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from diffusion_operator.api.names import ADAPTER, DEPLOYMENT, POD, Kind
from support.apiserver.kind_api import dd, lora
from support.apiserver.real_apiserver import ROOT
from support.apiserver.rest_client import RestClient, path_of
from support.operator.process_kubelet import Image, ProcessKubelet, Server
from support.operator.sole_operator import eventually_nothing
from support.release.earlier import EarlierVersion
from support.release.operators import define, operator
from support.soak.operator_truth import condition
from support.worker.process import DIGITS, DIGITS_MODEL
from tools.devcluster.apiserver import apiserver
from tools.release.upgrades import UPGRADES_FROM

pytestmark = [pytest.mark.apiserver, pytest.mark.slow, pytest.mark.timeout(900)]

THIS, EARLIER = "this", "earlier"
STEP_S = 0.1
DEADLINE_S = 120.0


@pytest.fixture(scope="module", params=UPGRADES_FROM)
def earlier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EarlierVersion:
    return EarlierVersion(tmp_path_factory.mktemp("earlier"), request.param)


@pytest.fixture(scope="module")
def kubeconfig() -> Iterator[Path]:
    """Start an API server for this file alone, since the kinds change from test to test."""
    with apiserver() as path:
        yield path


@dataclass
class Pairing:
    """A deployment `d` of one replica, and clients of its worker."""

    namespace: str
    kubelet: ProcessKubelet

    @property
    def client(self) -> RestClient:
        return self.kubelet.client

    async def until(self, kind: Kind, name: str, ready: str, reason: str, **counts: int) -> None:
        """Wait until the status is about the present spec, and has the condition Ready with this status and reason, and these counts."""

        async def wrong() -> Any:
            found = await self.object(kind, name)
            status, told = found.get("status", {}), condition(found.get("status", {}), "Ready")
            fresh = status.get("observedGeneration") == found["metadata"]["generation"]
            right = (told["status"], told["reason"]) == (ready, reason) and counts.items() <= status.items()
            return None if fresh and right else (status, self.outputs())

        await eventually_nothing(wrong, DEADLINE_S)

    async def object(self, kind: Kind, name: str) -> Any:
        status, found = await self.client.send("GET", f"{path_of(kind, self.namespace)}/{name}")
        assert status == 200, found
        return found

    async def edit(self, **spec: Any) -> None:
        status, answer = await self.client.patch(DEPLOYMENT, self.namespace, "d", {"spec": spec})
        assert status == 200, answer

    async def server(self) -> Server:
        """Return the server process of the only pod."""
        (pod,) = await self.client.list(POD, self.namespace)
        return self.kubelet.servers[pod["metadata"]["uid"]]

    async def ask(self, server: Server, **body: Any) -> httpx2.Response:
        async with httpx2.AsyncClient(timeout=60) as http:
            given = {"prompt": "a digit seven", "model": "d", "size": "64x64", **body}
            return await http.post(f"http://{server.ip}:{self.kubelet.data_port}/v1/images/generations", json=given)

    def outputs(self) -> list[str]:
        return [one.output[-1500:] for one in self.kubelet.servers.values()]


@pytest.fixture
async def client(kubeconfig: Path) -> AsyncIterator[RestClient]:
    """Provide a client, and delete the deployments and adapters after the test, because each operator watches all namespaces."""
    async with RestClient(kubeconfig) as made:
        yield made
        for kind in (ADAPTER, DEPLOYMENT):
            for one in (await made.send("GET", path_of(kind)))[1]["items"]:
                await made.delete(kind, one["metadata"]["namespace"], one["metadata"]["name"])


@pytest.fixture
async def kubelet(client: RestClient, earlier: EarlierVersion, tmp_path: Path) -> AsyncIterator[ProcessKubelet]:
    images = {
        THIS: Image("support.worker.fake_worker", (ROOT / "worker" / "src", ROOT / "tests")),
        EARLIER: Image(earlier.worker_program, (earlier.worker_sources, earlier.support)),
    }
    async with ProcessKubelet(client, tmp_path / "pods", images) as made:
        yield made


@pytest.mark.parametrize("worker", [THIS, EARLIER])
@pytest.mark.parametrize("operator_version", [THIS, EARLIER])
async def test_a_pairing_serves_loads_sleeps_wakes_and_drains(
    kubeconfig: Path, tmp_path: Path, earlier: EarlierVersion, kubelet: ProcessKubelet, worker: str, operator_version: str
) -> None:
    old = earlier if operator_version == EARLIER else None
    define(kubeconfig, *([old.crds] if old else []))
    pair = Pairing(f"{operator_version}-over-{worker}", kubelet)
    await pair.client.make_namespace(pair.namespace)
    with operator(tmp_path / "operator", kubeconfig, control_port=kubelet.port, earlier=old, image=worker) as program:
        await pair.client.create(DEPLOYMENT, pair.namespace, deployment(worker), strict=True)
        await serves(pair)
        await loads(pair, tmp_path)
        await sleeps_and_wakes(pair)
        await drains(pair)
        assert program.complaints() == []
    assert kubelet.wrong == []


def deployment(worker: str) -> dict[str, Any]:
    behaviour = {"name": "FAKE_WORKER", "value": json.dumps({"stepSeconds": STEP_S})}
    engine = {"image": worker, "env": [behaviour]}
    return dd("d", model={"source": {"path": str(DIGITS_MODEL)}}, resources={"gpuResourceName": "none"}, engine=engine)


async def serves(pair: Pairing) -> None:
    await pair.until(DEPLOYMENT, "d", "True", "Serving")
    answer = await pair.ask(await pair.server(), num_inference_steps=2)
    assert answer.status_code == 200, answer.text


async def loads(pair: Pairing, folder: Path) -> None:
    """Copy an adapter into `folder`, create its LoRAAdapter, and check that it loads everywhere and serves a request."""
    shutil.copytree(DIGITS / "loras" / "stripes", folder / "stripes")
    await pair.client.create(ADAPTER, pair.namespace, lora("stripes", source={"path": str(folder / "stripes")}), strict=True)
    await pair.until(ADAPTER, "stripes", "True", "LoadedEverywhere")
    server = await pair.server()
    assert (await pair.ask(server, model="stripes", num_inference_steps=2)).status_code == 200


async def sleeps_and_wakes(pair: Pairing) -> None:
    """Check that the deployment sleeps and wakes by its spec, and that the adapter is still there."""
    server = await pair.server()
    await pair.edit(sleep={"policy": "Asleep"}, coldRequests={"mode": "Reject"})
    await pair.until(DEPLOYMENT, "d", "False", "SleepRequested", asleepReplicas=1)
    assert (await pair.ask(server, num_inference_steps=2)).status_code == 503
    await pair.edit(sleep={"policy": "AlwaysAwake"})
    await pair.until(DEPLOYMENT, "d", "True", "Serving")
    await pair.until(ADAPTER, "stripes", "True", "LoadedEverywhere")
    assert (await pair.ask(server, model="stripes", num_inference_steps=2)).status_code == 200


async def drains(pair: Pairing) -> None:
    """Check that a running request is answered before its replica ends."""
    server = await pair.server()
    running = asyncio.create_task(pair.ask(server, num_inference_steps=30))
    await asyncio.sleep(3 * STEP_S)
    await pair.edit(replicas=0)
    answer = await running
    assert answer.status_code == 200, answer.text

    async def pods_left() -> list[Any]:
        return await pair.client.list(POD, pair.namespace)

    await eventually_nothing(pods_left, DEADLINE_S)
    assert server.process.returncode == 0, server.output[-2000:]
