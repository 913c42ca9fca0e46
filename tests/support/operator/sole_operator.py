# SPDX-License-Identifier: Apache-2.0
"""An API server without another operator, a client that acts as users, and a fake kubelet, for tests of the operator as a process.

Real: the API server and the operator's program. Not real: the kubelet, its workers and the garbage collector, which are FakeKubelet.
"""

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from diffusion_operator.api.names import ADAPTER, DEPLOYMENT, POD
from support.apiserver.real_apiserver import own_apiserver
from support.apiserver.rest_client import RestClient, path_of
from support.operator import rig
from support.operator.fake_kubelet import FakeKubelet
from support.soak.operator_process import OperatorProcess
from support.soak.operator_truth import still_found, untrue

DEADLINE_S = 120.0
deployment = rig.deployment
adapter = functools.partial(rig.adapter, "a", "/loras/a")


@pytest.fixture(scope="session")
def kubeconfig() -> Iterator[Path]:
    with own_apiserver() as made:
        yield made


@pytest.fixture
async def client(kubeconfig: Path) -> AsyncIterator[RestClient]:
    """Provide a client, and delete deployments and adapters after the test, because each operator watches all namespaces."""
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
def running(folder: Path, kubeconfig: Path, **options: Any) -> Iterator[OperatorProcess]:
    """Start an operator, wait until it is ready, and end it after the block."""
    folder.mkdir(exist_ok=True)
    operator = OperatorProcess(folder, kubeconfig, **options)
    operator.start()
    try:
        operator.wait_ready()
        yield operator
    finally:
        operator.stop()


async def eventually_nothing(look: Callable[[], Awaitable[Any]], within_s: float = DEADLINE_S, *, every_s: float = 0.2) -> None:
    """Poll `look` every `every_s` seconds until its result is empty. Raise AssertionError with the last result if it is not empty after
    `within_s` seconds."""
    found = await still_found(look, within_s=within_s, every_s=every_s)
    assert not found, f"after {within_s:g} s: {found}"


class Namespaces:
    """Several namespaces in the API server, with an observer's view of the objects in them: contradictions and pods.

    `make` creates the namespaces, empty.
    """

    def __init__(self, client: RestClient, kubelet: FakeKubelet, *names: str) -> None:
        self._client = client
        self._kubelet = kubelet
        self._names = names

    async def make(self) -> None:
        """Create the namespaces, which must not exist yet."""
        for name in self._names:
            await self._client.make_namespace(name)

    async def untrue(self) -> dict[str, list[str]]:
        """Return the contradictions to specs and statuses by namespace, such as orphans; a namespace without any is left out."""
        found = {name: await untrue(self._client, self._kubelet, name) for name in self._names}
        return {name: wrong for name, wrong in found.items() if wrong}

    async def settle(self, within_s: float = DEADLINE_S) -> None:
        """Poll until nothing in any namespace contradicts the specs or statuses. Raise AssertionError if something still does after
        `within_s` seconds."""
        await eventually_nothing(self.untrue, within_s)

    async def pods(self) -> list[str]:
        """Return all pods of all the namespaces as `NAMESPACE/NAME`, sorted."""
        return sorted([f"{name}/{pod['metadata']['name']}" for name in self._names for pod in await self._client.list(POD, name)])


def status_writes(operator: OperatorProcess) -> int:
    """Return the number of status writes that the operator's present process has begun."""
    return int(sum(value for name, value in operator.metrics().items() if "under_test_actions" in name and "apply_status" in name))


def complaints(operator: OperatorProcess) -> list[str]:
    """Return lines of the log that should not appear even when the API server is silent or busy."""
    return [line for line in operator.complaints() if "ClusterUnavailable" not in line]
