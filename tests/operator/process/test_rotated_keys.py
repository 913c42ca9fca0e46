# SPDX-License-Identifier: Apache-2.0
"""The operator's key is rotated again and again and its program restarted, with real processes.

Meanwhile replicas sleep and wake and adapters come and go. A worker asks for the token that its kubelet brought, which is older than the
Secret's for a time.
"""

import asyncio
import base64
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from diffusion_operator.api.names import ADAPTER, DEPLOYMENT, SECRET
from support.apiserver.rest_client import RestClient, path_of
from support.operator.fake_kubelet import FakeKubelet
from support.operator.sole_operator import Namespaces, adapter, complaints, deployment, eventually_nothing, running

pytestmark = [pytest.mark.apiserver, pytest.mark.slow]
ROUNDS = 4
BROUGHT_WITHIN_S = 3.0
LOOKS_EVERY_S = 0.1


class Tokens:
    """A kubelet's part for tokens: a new container gets the Secret's token at once, a running one some time after a change."""

    def __init__(self, client: RestClient, kubelet: FakeKubelet, namespace: str) -> None:
        self._client = client
        self._kubelet = kubelet
        self._path = f"{path_of(SECRET, namespace)}/d-control"
        self._token = ""

    @asynccontextmanager
    async def brought(self) -> AsyncIterator[None]:
        """Bring tokens to the containers until the end of the block."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def late(self) -> list[str]:
        """Return the addresses of containers whose token is not the Secret's."""
        return [one.ip for one in self._kubelet.containers.values() if one.token != self._token]

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            status, found = await self._client.send("GET", self._path)
            token = base64.b64decode(found["data"]["token"]).decode() if status == 200 else ""
            if token != self._token:
                self._token = token
                loop.call_later(random.uniform(0, BROUGHT_WITHIN_S), self._bring)
            for container in self._kubelet.containers.values():
                container.token = container.token or token
            await asyncio.sleep(LOOKS_EVERY_S)

    def _bring(self) -> None:
        for container in self._kubelet.containers.values():
            container.token = self._token


async def test_keys_rotated_in_a_loop_by_restarts_fail_no_call_and_bring_nothing_about_twice(
    kubeconfig: Path, tmp_path: Path, client: RestClient, kubelet: FakeKubelet
) -> None:
    there, tokens = Namespaces(client, kubelet, "rotated"), Tokens(client, kubelet, "rotated")
    await there.make()

    async def late() -> list[str]:
        return tokens.late()

    async with tokens.brought():
        with running(tmp_path, kubeconfig, control_port=kubelet.port) as operator:
            await client.create(DEPLOYMENT, "rotated", deployment(replicas=2))
            await client.create(ADAPTER, "rotated", adapter())
            await there.settle()
            for number in range(ROUNDS):
                policy = "AlwaysAwake" if number % 2 else "Asleep"
                await client.patch(DEPLOYMENT, "rotated", "d", {"spec": {"sleep": {"policy": policy}}})
                await client.patch(ADAPTER, "rotated", "a", {"spec": {"defaultScale": f"0.{number + 1}"}})
                await asyncio.to_thread(operator.rotate, f"{number:032}")
                await there.settle()
                await eventually_nothing(late)
            assert complaints(operator) == []
            assert [line for line in operator.log.read_text().splitlines() if "call failed" in line] == []
    assert kubelet.refused >= ROUNDS, "each operator met a worker that had the old token"
    for container in kubelet.containers.values():
        calls = [call.split()[0] for call in container.worker.calls if call.startswith(("sleep", "wake"))]
        assert calls == ["sleep", "wake"] * (ROUNDS // 2)
        assert container.worker.loads == ["a"]
        assert str(container.worker.adapters["a"].scale) == f"0.{ROUNDS}"
    assert kubelet.wrong == []
