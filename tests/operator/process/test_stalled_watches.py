# SPDX-License-Identifier: Apache-2.0
"""Watches that stall, and an API server that answers nothing, with the operator's program and a proxy that stops forwarding."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffusion_operator.api.names import ADAPTER, DEPLOYMENT, SERVICE
from diffusion_operator.handlers import build_kopf_settings
from support.apiserver.rest_client import RestClient
from support.apiserver.stalling_proxy import StallingProxy
from support.operator.fake_kubelet import FakeKubelet
from support.operator.sole_operator import Namespaces, adapter, complaints, deployment, eventually_nothing, running
from support.soak.operator_process import OperatorProcess

pytestmark = [pytest.mark.apiserver, pytest.mark.slow]
MIB = 2**20
REOPENS_AFTER_S = float(build_kopf_settings().watching.inactivity_timeout or 0)
SOONER_S = 20.0
RESYNC_S = 2.0
DEAD_S = 4.0
SILENT_S = 25.0
KEPT = 20
"""Connections that may be open afterwards: each concurrent pass keeps one for its next call. A leak would add one for each call."""
KINDS = ("DiffusionDeployment", "LoRAAdapter", "Pod", "Service")


@pytest.fixture
def proxy(kubeconfig: Path) -> Iterator[StallingProxy]:
    with StallingProxy(kubeconfig) as made:
        yield made


async def stalled_s(operator: OperatorProcess) -> dict[str, float]:
    """Return the seconds of stalled watches by kind; a kind whose watch is well is left out. Each kind must have the metric."""
    found = await asyncio.to_thread(operator.metrics)
    name = 'diffusion_operator_watch_stalled_seconds{kind="'
    counted = {key.removeprefix(name).removesuffix('"}'): value for key, value in found.items() if key.startswith(name)}
    assert set(KINDS) <= set(counted)
    return {kind: seconds for kind, seconds in counted.items() if seconds}


async def health(operator: OperatorProcess) -> int:
    return await asyncio.to_thread(operator.health)


async def until_health(operator: OperatorProcess, expected: int) -> None:
    """Poll the liveness probe until its status is `expected`, for 15 s at most: kopf caches each result for ten."""

    async def other() -> int:
        found = await health(operator)
        return 0 if found == expected else found

    await eventually_nothing(other, within_s=15)


async def test_watches_that_stall_are_opened_anew_and_tell_what_changed_came_and_went_meanwhile(
    tmp_path: Path, proxy: StallingProxy, client: RestClient, kubelet: FakeKubelet
) -> None:
    """Stall all watches, and check that the operator learns of all changes without a listing.

    A watch is opened again when it brought nothing, not even a bookmark, for its time limit, which is shorter here.
    """
    names = ("edited", "deleted", "made", "bereft")
    there = Namespaces(client, kubelet, *names)
    await there.make()
    with running(tmp_path, proxy.kubeconfig(tmp_path), control_port=kubelet.port, reopens_after_s=SOONER_S) as operator:
        for name in set(names) - {"made"}:
            await client.create(DEPLOYMENT, name, deployment())
        await client.create(ADAPTER, "deleted", adapter())
        await there.settle()
        before = (operator.descriptors(), operator.resident_bytes(), operator.passes())

        proxy.stall()
        begun = time.monotonic()
        await client.patch(DEPLOYMENT, "edited", "d", {"spec": {"replicas": 2}})
        await client.delete(ADAPTER, "deleted", "a")
        await client.create(DEPLOYMENT, "made", deployment())
        await client.delete(SERVICE, "bereft", "d")
        await asyncio.sleep(5)
        assert (await there.untrue()).keys() == set(names), "nobody has heard"
        while time.monotonic() - begun < SOONER_S - 10:
            assert await health(operator) == 200
            await asyncio.sleep(5)
        await there.settle(within_s=25)

        assert await stalled_s(operator) == {}, "no listing was needed"
        assert await there.pods() == ["bereft/d-0-0", "deleted/d-0-0", "edited/d-0-0", "edited/d-1-0", "made/d-0-0"]
        descriptors, resident, passes = operator.descriptors(), operator.resident_bytes(), operator.passes()
        assert descriptors <= before[0] + KEPT
        assert resident - before[1] < 10 * MIB
        assert passes - before[2] < 100
        assert complaints(operator) == []
    assert kubelet.wrong == []
    assert set(kubelet.pods_made.values()) == {1}


async def test_what_listings_alone_find_is_acted_on_and_a_watch_that_stays_stalled_fails_the_probe_until_it_tells_again(
    tmp_path: Path, proxy: StallingProxy, client: RestClient, kubelet: FakeKubelet
) -> None:
    """Stall all watches while listings come every two seconds, before a watch is opened again. The probe fails until they work."""
    there = Namespaces(client, kubelet, "listed")
    await there.make()
    with running(tmp_path, proxy.kubeconfig(tmp_path), control_port=kubelet.port, resync_s=RESYNC_S, watch_dead_s=DEAD_S) as operator:
        await client.create(DEPLOYMENT, "listed", deployment())
        await there.settle()
        await asyncio.sleep(2 * RESYNC_S)
        assert (await stalled_s(operator), await health(operator)) == ({}, 200), "watches that are well tell before listings find"

        proxy.stall()
        await client.patch(DEPLOYMENT, "listed", "d", {"spec": {"replicas": 2}})
        begun = time.monotonic()
        await there.settle()
        assert time.monotonic() - begun < REOPENS_AFTER_S / 2
        stalled = await stalled_s(operator)
        assert {"DiffusionDeployment", "Pod"} <= stalled.keys(), "a kubelet's word on pods went unheard, too"
        assert "LoRAAdapter" not in stalled, "of them nothing has changed"
        await asyncio.sleep(DEAD_S)
        longer = await stalled_s(operator)
        assert longer["Pod"] >= stalled["Pod"] + DEAD_S
        await until_health(operator, 500)

        proxy.resume()
        await until_health(operator, 200)
        assert await stalled_s(operator) == {}
        assert await there.untrue() == {}
        assert await there.pods() == ["listed/d-0-0", "listed/d-1-0"]
    assert kubelet.wrong == []


async def test_an_api_server_that_does_what_it_is_asked_for_and_stays_silent_brings_nothing_about_twice(
    tmp_path: Path, proxy: StallingProxy, client: RestClient, kubelet: FakeKubelet
) -> None:
    """Silence the API server for longer than a leader's Lease while the operator writes. The same process must catch up afterwards, and
    make no pod of a living deployment twice."""
    names = [f"silent-{number}" for number in range(6)]
    there = Namespaces(client, kubelet, *names)
    await there.make()
    with running(tmp_path, proxy.kubeconfig(tmp_path), control_port=kubelet.port) as operator:
        await client.create(DEPLOYMENT, names[0], deployment())
        await client.create(ADAPTER, names[0], adapter())
        await there.settle()
        pid, before, passes = operator.pid, operator.descriptors(), operator.passes()

        await asyncio.gather(*(client.create(DEPLOYMENT, name, deployment(replicas=2)) for name in names[1:]))

        async def without_pods() -> bool:
            return len(await there.pods()) == 1

        await eventually_nothing(without_pods, every_s=0.02)
        proxy.silence()  # while it writes
        ends = time.monotonic() + SILENT_S
        await client.patch(DEPLOYMENT, names[0], "d", {"spec": {"replicas": 2}})
        await client.delete(ADAPTER, names[0], "a")
        deleted = (await client.list(DEPLOYMENT, names[1]))[0]["metadata"]["uid"]
        await client.delete(DEPLOYMENT, names[1], "d")
        while time.monotonic() < ends:
            assert await health(operator) == 200, "a restart would help nobody"
            await asyncio.sleep(3)
        assert names[0] in await there.untrue()

        proxy.resume()
        await there.settle(within_s=60)
        assert await there.pods() == [f"{name}/d-{index}-0" for name in names if name != names[1] for index in (0, 1)]
        assert (operator.pid, operator.is_alive(), await health(operator)) == (pid, True, 200)
        assert await stalled_s(operator) == {}
        assert operator.descriptors() <= before + KEPT
        assert operator.passes() - passes < 300
        assert complaints(operator) == []
    assert kubelet.wrong == []
    # An operator that has not heard of its deployment's end may make pods again that were collected.
    assert {pod: count for pod, count in kubelet.pods_made.items() if count > 1 and not pod.startswith(deleted)} == {}
