# SPDX-License-Identifier: Apache-2.0
"""Two operators of a release, with real processes. The leader is killed, stopped, cut off and ended; the other one goes on."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from diffusion_operator.api.names import ADAPTER, DEPLOYMENT
from support.apiserver.real_apiserver import own_apiserver
from support.apiserver.rest_client import RestClient
from support.operator.fake_kubelet import FakeKubelet
from support.operator.sole_operator import Namespaces, adapter, complaints, deployment, eventually_nothing
from support.operator.two_operators import TwoOperators

pytestmark = [pytest.mark.apiserver, pytest.mark.slow]
TAKE_OVER_S = 20.0
HAND_OVER_S = 5.0
"""A hand-over takes two seconds; the rest is for a machine with other work."""
STOPPED_S = 5.0
"""The time for which a leader stays stopped after the other one leads, longer than a Lease is valid."""


@pytest.fixture(scope="module")
def kubeconfig() -> Iterator[Path]:
    with own_apiserver(audited=True) as made:
        yield made


@pytest.fixture
async def client(kubeconfig: Path) -> AsyncIterator[RestClient]:
    async with RestClient(kubeconfig) as made:
        yield made


class Story:
    def __init__(self, two: TwoOperators, client: RestClient, kubelet: FakeKubelet) -> None:
        self._two, self._client, self._kubelet = two, client, kubelet
        self.seconds: list[float] = []

    async def first_create(self, namespace: str) -> float:
        """Make a namespace with a deployment, and return the seconds until its first pod is made."""
        there, begun = Namespaces(self._client, self._kubelet, namespace), time.monotonic()
        await there.make()
        await self._client.create(DEPLOYMENT, namespace, deployment())

        async def without_a_pod() -> bool:
            return not await there.pods()

        await eventually_nothing(without_a_pod, every_s=0.05)
        return time.monotonic() - begun

    async def over(self, namespace: str, *, within_s: float) -> None:
        """Make a deployment in a new namespace, and check that its pod is made within `within_s` and that the other operator leads. Add
        the seconds to `seconds`."""
        self.seconds.append(await self.first_create(namespace))
        assert self.seconds[-1] < within_s
        await self._two.changed(within_s=1)


async def test_whatever_becomes_of_the_leader_the_other_one_goes_on_and_never_do_both_write(
    kubeconfig: Path, tmp_path: Path, client: RestClient, kubelet: FakeKubelet
) -> None:
    calm = Namespaces(client, kubelet, "calm")
    await calm.make()
    with TwoOperators(tmp_path, kubeconfig, control_port=kubelet.port) as two:
        story = Story(two, client, kubelet)
        await client.create(DEPLOYMENT, "calm", deployment(replicas=2))
        await client.create(ADAPTER, "calm", adapter())
        await calm.settle()
        assert two.follower.process.passes() == 0, "a follower runs no queue"

        await asyncio.to_thread(two.leader.process.kill)
        await story.over("killed", within_s=TAKE_OVER_S)
        two.follower.process.start()
        await asyncio.to_thread(two.follower.process.wait_ready)

        two.leader.stop()
        await client.patch(DEPLOYMENT, "calm", "d", {"spec": {"replicas": 3}})
        await story.over("stopped", within_s=TAKE_OVER_S)
        await asyncio.sleep(STOPPED_S)
        two.follower.go_on()
        await asyncio.to_thread(two.follower.process.eventually, lambda: not two.follower.leads)

        two.leader.proxy.cut()
        await story.over("cut", within_s=TAKE_OVER_S)
        two.follower.proxy.resume()
        await asyncio.to_thread(two.follower.process.eventually, lambda: not two.follower.leads)

        two.leader.process._process.terminate()
        await story.over("ended", within_s=HAND_OVER_S)
        assert two.follower.process._process.wait(10) == 0

        await Namespaces(client, kubelet, "calm", "killed", "stopped", "cut", "ended").settle()
        print("take-over and hand-over", [round(one, 1) for one in story.seconds])
        assert two.writers() == ["one", "two", "one", "two", "one"]
        assert two.leader.process.metrics()["diffusion_operator_leader_epoch"] == 5
        wrong = [complaints(one.process) for one in (two.leader, two.follower)]
        assert wrong == [[], []]
    assert (kubelet.wrong, kubelet.stale) == ([], [])
    assert set(kubelet.pods_made.values()) == {1}
