# SPDX-License-Identifier: Apache-2.0
"""RF6 with real processes: an operator and its successor, with another default image, at once, over objects that people change."""

import asyncio
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from diffusion_operator.api.names import DEPLOYMENT
from support.operator.fake_kubelet import FakeKubelet
from support.operator.rest_client import RestClient
from support.operator.sole_operator import Namespaces, complaints, deployment, running, status_writes
from support.soak.operator_sequences import Sequence

pytestmark = [pytest.mark.apiserver, pytest.mark.slow]
SEQUENCES = 6
QUIET_S = 6.0


async def test_rf6_an_operator_and_its_successor_agree_on_what_people_change_meanwhile(
    kubeconfig: Path, tmp_path: Path, client: RestClient, kubelet: FakeKubelet
) -> None:
    names = [f"overlap-{number}" for number in range(SEQUENCES)]
    calm = Namespaces(client, kubelet, "overlap-calm")
    await calm.make()
    with running(tmp_path / "old", kubeconfig, control_port=kubelet.port) as old:
        await client.create(DEPLOYMENT, "overlap-calm", deployment(replicas=2))
        await calm.settle()
        with running(tmp_path / "new", kubeconfig, control_port=kubelet.port, image="worker:2") as new:
            sequences = [Sequence(client, kubelet, name, Random(name), Counter()) for name in names]
            await asyncio.gather(*(one.play() for one in sequences))
            assert [wrong for found in await asyncio.gather(*(one.settle() for one in sequences)) for wrong in found] == []
            await asyncio.sleep(QUIET_S)  # for what is still on its way
            writes = status_writes(old) + status_writes(new)
            await asyncio.sleep(QUIET_S)
            assert status_writes(old) + status_writes(new) - writes <= 2, "neither takes back what the other wrote"
            assert await calm.pods() == ["overlap-calm/d-0-0", "overlap-calm/d-1-0"], "what nobody changed is left alone"
            await asyncio.to_thread(old.kill)
            assert [wrong for found in await asyncio.gather(*(one.settle() for one in sequences)) for wrong in found] == []
            await asyncio.gather(*(one.end() for one in sequences))
            assert complaints(old) + complaints(new) == []
    assert kubelet.wrong == []
