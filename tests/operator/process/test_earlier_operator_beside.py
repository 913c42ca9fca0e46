# SPDX-License-Identifier: Apache-2.0
"""An operator from before the election runs beside a new one, for longer than it ever should (fault 81).

Real: the API server, the program of commit 3e8db6b and today's. Not real: the kubelet and its workers, which are FakeKubelet.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from diffusion_operator.api.names import ADAPTER, DEPLOYMENT
from support.apiserver.real_apiserver import kubectl, own_apiserver
from support.apiserver.rest_client import RestClient
from support.operator.fake_kubelet import FakeKubelet
from support.operator.sole_operator import Namespaces, adapter, complaints, deployment, running, status_writes
from support.operator.two_operators import LEASE, arguments
from support.release.earlier import EarlierVersion
from tools.release.upgrades import UPGRADES_FROM

pytestmark = [pytest.mark.apiserver, pytest.mark.slow]
NAMES = ("first", "second", "third")
BESIDE_S = 35.0
"""Time for two claims of each object that the earlier operator overwrites."""
MOST_WRITES = 60
"""The limit for six objects: each claim, and the writes by which the earlier operator answers it."""


@pytest.fixture(scope="module")
def kubeconfig() -> Iterator[Path]:
    with own_apiserver() as made:
        kubectl(made, "create", "namespace", LEASE[0])
        yield made


@pytest.mark.parametrize("version", UPGRADES_FROM)
async def test_beside_an_operator_from_before_the_election_a_new_one_writes_against_nobody_and_goes_on_alone(
    kubeconfig: Path, tmp_path: Path, version: str
) -> None:
    earlier = EarlierVersion(tmp_path / "earlier", version)
    sources = (earlier.operator_sources, earlier.support)
    async with RestClient(kubeconfig) as client, FakeKubelet(client, Random()) as kubelet:
        there = Namespaces(client, kubelet, *NAMES)
        await there.make()
        options = {"control_port": kubelet.port}
        with running(tmp_path / "old", kubeconfig, program=earlier.operator_program, sources=sources, **options) as old:
            for name in NAMES:
                await client.create(DEPLOYMENT, name, deployment(replicas=2))
                await client.create(ADAPTER, name, adapter())
            await asyncio.to_thread(old.eventually, lambda: len(kubelet.pods_made) == 2 * len(NAMES))
            before = await there.pods()
            with running(tmp_path / "new", kubeconfig, arguments=arguments("new"), **options) as new:
                assert new.passes() == 0, "it waits for as long as a Lease lasts; an upgrade has ended the earlier one by then"
                await asyncio.to_thread(new.eventually, lambda: new.metrics()["diffusion_operator_leader"])
                begun = status_writes(old) + status_writes(new)
                await asyncio.sleep(BESIDE_S)
                written = status_writes(old) + status_writes(new) - begun
                assert written < MOST_WRITES, "they took turns at 40 versions a second"
                print(f"{written} statuses written in {BESIDE_S:g} s")
                await asyncio.to_thread(old.stop)
                await there.settle()
                assert await there.pods() == before
                assert complaints(new) == []
    assert kubelet.wrong == []
    assert set(kubelet.pods_made.values()) == {1}
