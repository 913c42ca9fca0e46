# SPDX-License-Identifier: Apache-2.0
"""More adapters of one deployment than its ConfigMap can hold, on a real API server, whose objects have room for 1 MiB.

An operator and a fake kubelet work. Sources have long addresses, so that few adapters take as much room as thousands of others.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import pytest_asyncio

from diffusion_operator.api.names import ADAPTER, CONFIG_MAP, DEPLOYMENT
from diffusion_operator.plan.adapters.mounted_file import FILE_BYTES
from support.apiserver.rest_client import RestClient, path_of
from support.operator.fake_kubelet import FakeKubelet
from support.operator.mounted import mounted_desired, mounted_files
from support.operator.rig import adapter
from support.operator.sole_operator import deployment, running

pytestmark = [pytest.mark.apiserver, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
MANY = 1_000
AT_ONCE = 32
WITHIN_S = 120.0


def source(number: int) -> dict[str, str]:
    """Return an adapter's source with a long address that compression hardly shortens."""
    parts = [hashlib.sha256(f"{number} {part}".encode()).hexdigest() for part in range(30)]
    return {"url": f"https://styles/{''.join(parts)}", "sha256": parts[0]}


class Many:
    """A namespace with a deployment and many adapters."""

    def __init__(self, client: RestClient, kubelet: FakeKubelet) -> None:
        self.client = client
        self.kubelet = kubelet
        self.namespace = "many"

    async def make(self, kind: Any, name: str, document: dict[str, Any]) -> None:
        status, found = await self.client.create(kind, self.namespace, {**document, "metadata": {"name": name}})
        assert status == 201, found

    async def make_adapters(self, first: int, last: int) -> None:
        gate = asyncio.Semaphore(AT_ONCE)

        async def make(number: int) -> None:
            async with gate:
                await self.make(ADAPTER, f"x-{number}", adapter(f"x-{number}", residency="OnDemand", source={"http": source(number)}))

        await asyncio.gather(*(make(number) for number in range(first, last)))

    async def conditions(self, kind: Any = DEPLOYMENT, name: str = "d") -> dict[str, tuple[str, str]]:
        _, found = await self.client.send("GET", f"{path_of(kind, self.namespace)}/{name}")
        return {one["type"]: (one["status"], one["reason"]) for one in found.get("status", {}).get("conditions", ())}

    async def until(self, look: Any) -> None:
        ends = time.monotonic() + WITHIN_S
        while not await look():
            assert time.monotonic() < ends, json.dumps(await self.conditions(), indent=1)
            await asyncio.sleep(0.5)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def many(kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Many]:
    folder = tmp_path_factory.mktemp("many")
    async with RestClient(kubeconfig) as client, FakeKubelet(client, Random()) as kubelet:
        made = Many(client, kubelet)
        await client.make_namespace(made.namespace)
        await made.make_adapters(0, MANY)
        await made.make(DEPLOYMENT, "d", deployment())
        with running(folder / "operator", kubeconfig, control_port=kubelet.port):
            yield made
        for kind in (DEPLOYMENT, ADAPTER):
            await client.send("DELETE", path_of(kind, made.namespace))


async def test_a_full_list_of_adapters_is_written_the_pod_serves_and_the_newest_adapters_are_refused(many: Many) -> None:
    async def serves() -> bool:
        conditions = await many.conditions()
        return conditions.get("Ready") == ("True", "Serving") and conditions.get("AdaptersReady") == ("False", "CapacityExceeded")

    await many.until(serves)
    maps = {one["metadata"]["name"]: one for one in await many.client.list(CONFIG_MAP, many.namespace)}
    content = mounted_files(maps.get, "d")["adapters.json.gz"]
    found = mounted_desired(maps.get, "d")["adapters"]
    # One more takes about 1,000 bytes.
    assert FILE_BYTES - 4000 < len(content) <= FILE_BYTES
    assert 0 < len(found) < MANY
    assert (await many.conditions())["ChildrenReady"] == ("True", "AllApplied")
    refused = min({f"x-{number}" for number in range(MANY)} - {one["name"] for one in found})

    async def is_refused() -> bool:
        return (await many.conditions(ADAPTER, refused)).get("Accepted") == ("False", "CapacityExceeded")

    await many.until(is_refused)
