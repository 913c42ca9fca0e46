# SPDX-License-Identifier: Apache-2.0
"""Two releases of the operator over the same objects, as real processes, each with another image, while people edit them (fault 82)."""

import asyncio
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from diffusion_operator.api.names import DEPLOYMENT
from support.apiserver.rest_client import RestClient
from support.operator.fake_kubelet import FakeKubelet
from support.operator.sole_operator import Namespaces, complaints, deployment, running, status_writes
from support.soak.operator_sequences import Sequence

pytestmark = [pytest.mark.apiserver, pytest.mark.slow]
SEQUENCES = 6
QUIET_S = 6.0


def release(name: str) -> tuple[str, ...]:
    """Return the command-line options that make an operator part of the release `name`."""
    return ("--all-namespaces", "--lease-namespace=default", f"--lease-name={name}", f"--identity={name}-0")


async def test_a_second_release_steps_back_from_what_the_first_manages_and_takes_it_over_when_that_is_gone(
    kubeconfig: Path, tmp_path: Path, client: RestClient, kubelet: FakeKubelet
) -> None:
    names = [f"overlap-{number}" for number in range(SEQUENCES)]
    calm = Namespaces(client, kubelet, "overlap-calm")
    await calm.make()
    with running(tmp_path / "first", kubeconfig, control_port=kubelet.port, arguments=release("first")) as first:
        await client.create(DEPLOYMENT, "overlap-calm", deployment(replicas=2))
        await calm.settle()
        with running(tmp_path / "second", kubeconfig, control_port=kubelet.port, arguments=release("second"), image="worker:2") as second:
            await asyncio.to_thread(second.eventually, lambda: second.metrics()["diffusion_operator_leader"])
            sequences = [Sequence(client, kubelet, name, Random(name), Counter()) for name in names]
            await asyncio.gather(*(one.play() for one in sequences))
            assert [wrong for found in await asyncio.gather(*(one.settle() for one in sequences)) for wrong in found] == []
            await asyncio.sleep(QUIET_S)  # let pending work end
            writes = status_writes(first) + status_writes(second)
            await asyncio.sleep(QUIET_S)
            assert status_writes(first) + status_writes(second) - writes <= 2, "neither takes back what the other wrote"
            managed = {one["status"]["operator"] for one in await client.list(DEPLOYMENT, "overlap-calm")}
            assert (managed, await calm.pods()) == ({"default/first"}, ["overlap-calm/d-0-0", "overlap-calm/d-1-0"])

            await asyncio.to_thread(first.kill)
            await client.patch(DEPLOYMENT, "overlap-calm", "d", {"spec": {"replicas": 3}})
            await calm.settle(within_s=90)
            assert {one["status"]["operator"] for one in await client.list(DEPLOYMENT, "overlap-calm")} == {"default/second"}
            assert [wrong for found in await asyncio.gather(*(one.settle() for one in sequences)) for wrong in found] == []
            await asyncio.gather(*(one.end() for one in sequences))
            assert complaints(first) + complaints(second) == []
    assert kubelet.wrong == []
