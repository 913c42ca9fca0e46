# SPDX-License-Identifier: Apache-2.0
"""An action that failed waits, however often its object is woken, until it succeeds or the spec is edited."""

from datetime import datetime

import pytest

from diffusion_operator.api.names import ADAPTER, CONFIG_MAP, DEPLOYMENT, POD, SERVICE
from diffusion_operator.errors import ClusterError, ClusterRefused, ClusterUnavailable
from support.operator.fake_cluster import Manifest
from support.operator.rig import Rig, deployment, serving, with_adapter

BUSY = ClusterUnavailable("the server has too many requests", status=429, reason="TooManyRequests")
PATIENT = ClusterUnavailable("the server has too many requests", status=429, reason="TooManyRequests", retry_after_s=120)
QUOTA = ClusterRefused("exceeded quota: pods", status=403, reason="Forbidden")


class Tries:
    """A refusal of one kind of action that keeps the times of the tries."""

    def __init__(self, rig: Rig, verb: str, kind: str, error: ClusterError) -> None:
        self.times: list[datetime] = []
        self._rig, self._what, self._error = rig, (verb, kind), error
        rig.cluster.refuse = self._refuse

    def _refuse(self, verb: str, manifest: Manifest) -> ClusterError | None:
        if (verb, manifest["kind"]) != self._what:
            return None
        self.times.append(self._rig.clock())
        return self._error

    @property
    def pauses(self) -> list[float]:
        """Return the seconds from each attempt to the next; empty before the second."""
        return [(later - earlier).total_seconds() for earlier, later in zip(self.times, self.times[1:], strict=False)]


async def woken_each_second(rig: Rig, seconds: int) -> None:
    for _ in range(seconds):
        rig.runtime.child_changed("default", "d", CONFIG_MAP.kind, "d-desired")
        await rig.run(1)


async def test_a_status_write_that_is_refused_is_tried_after_longer_and_longer_pauses() -> None:
    rig = await serving(1)
    tries = Tries(rig, "apply_status", DEPLOYMENT.kind, BUSY)
    rig.cluster.change(DEPLOYMENT, "d", lambda now: now.update(replicas=2))
    await woken_each_second(rig, 120)
    for pause, least in zip(tries.pauses, (1, 2, 4, 8, 16, 32), strict=False):
        assert pause >= least
    assert 5 <= len(tries.times) <= 8
    rig.cluster.refuse = lambda verb, manifest: None
    await rig.run(120)
    assert rig.status()["observedGeneration"] == 2


async def test_the_api_servers_retry_after_is_obeyed() -> None:
    rig = await serving(1)
    tries = Tries(rig, "apply_status", DEPLOYMENT.kind, PATIENT)
    rig.cluster.change(DEPLOYMENT, "d", lambda now: now.update(replicas=2))
    await woken_each_second(rig, 250)
    assert len(tries.times) == 3
    assert min(tries.pauses) >= 120


async def test_the_retry_after_of_a_child_is_obeyed() -> None:
    rig = Rig()
    rig.survives = ClusterUnavailable
    tries = Tries(rig, "create", SERVICE.kind, PATIENT)
    rig.cluster.put(deployment())
    await woken_each_second(rig, 250)
    assert len(tries.times) == 3
    assert min(tries.pauses) >= 120


async def test_a_pod_that_a_quota_refuses_is_tried_each_minute_at_last_and_the_status_says_so_all_the_time() -> None:
    rig = Rig()
    tries = Tries(rig, "create", POD.kind, QUOTA)
    rig.cluster.put(deployment())
    for _ in range(30):
        await woken_each_second(rig, 20)
        assert rig.condition("Ready") == ("False", "PodsRefused")
        assert "exceeded quota: pods" in rig.message("Ready")
    assert 60 <= max(tries.pauses) <= 80
    assert len(tries.times) <= 6 + 10
    rig.cluster.refuse = lambda verb, manifest: None
    await rig.run(70)
    assert rig.cluster.names(POD) == ["d-0-0"]


async def test_a_child_that_cannot_be_written_delays_nothing_that_is_due_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that replicas fall asleep in time while a Service is refused, and failed passes are repeated only after minutes."""
    monkeypatch.setattr("support.operator.rig.RETRY_S", 300.0)
    rig = await serving(1, sleep={"policy": "OnIdle", "idleSeconds": 60, "minAwakeSeconds": 20})
    away = ClusterUnavailable("failed calling webhook", status=500, reason="InternalError")
    rig.cluster.refuse = lambda verb, manifest: away if manifest["kind"] == SERVICE.kind else None
    rig.cluster.remove(SERVICE, "d")
    await rig.run(80)
    assert rig.errors, "the Service fails all the time"
    assert rig.states() == ["Asleep"]
    assert rig.condition("ChildrenReady") == ("False", "InternalError")


async def test_an_edit_of_the_spec_ends_the_pause() -> None:
    rig = Rig()
    tries = Tries(rig, "create", POD.kind, QUOTA)
    rig.cluster.put(deployment())
    await woken_each_second(rig, 130)
    before = len(tries.times)
    rig.cluster.change(DEPLOYMENT, "d", lambda now: now.update(engine={"env": [{"name": "A", "value": "1"}]}))
    await rig.run(1)
    assert len(tries.times) == before + 1


async def test_an_adapters_status_waits_too() -> None:
    rig = await with_adapter()
    tries = Tries(rig, "apply_status", ADAPTER.kind, BUSY)
    rig.cluster.change(ADAPTER, "x", lambda now: now.update(source={"path": "/loras/y"}))
    await woken_each_second(rig, 100)
    assert 3 <= len(tries.times) <= 8
    for pause, least in zip(tries.pauses, (1, 2, 4, 8, 16, 32), strict=False):
        assert pause >= least


async def test_a_look_that_fails_is_not_repeated_by_each_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = await serving(1)
    looks: list[datetime] = []

    async def observe(*arguments: object) -> None:
        looks.append(rig.clock())
        raise BUSY

    monkeypatch.setattr("diffusion_operator.reconcile.deployment.observe", observe)
    await woken_each_second(rig, 100)
    assert 4 <= len(looks) <= 8
    assert rig.condition("Ready") == ("Unknown", "PassFailed")
