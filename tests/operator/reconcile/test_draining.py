# SPDX-License-Identifier: Apache-2.0
"""Replicas that are removed while they are busy, through real reconciles: they answer the requests that they accepted, then their pod is
deleted.
"""

from typing import Any

from diffusion_operator.api.names import DEPLOYMENT, POD
from diffusion_operator.api.worker_state import WireError
from diffusion_operator.errors import ControlRefused
from support.operator.rig import Rig, serving
from support.operator.scripted_workers import ScriptedWorker


async def busy(replicas: int = 2, **spec: Any) -> tuple[Rig, ScriptedWorker]:
    """Start replicas, the last of which has a long request; return the rig and that worker."""
    rig = await serving(replicas, **spec)
    worker = list(rig.workers)[-1]
    worker.in_flight = 1
    await rig.run(15)
    return rig, worker


async def scale(rig: Rig, replicas: int, seconds: float = 10) -> None:
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(replicas=replicas))
    await rig.run(seconds)


async def test_a_replica_that_was_idle_is_drained_too_and_its_pod_deleted_at_once() -> None:
    rig, worker = await busy(1)
    worker.in_flight = 0
    await rig.run(15)
    await scale(rig, 0)
    assert (worker.calls, rig.cluster.names(POD)) == (["drain 300"], [])


async def test_a_worker_that_cannot_be_drained_by_a_call_is_deleted_and_drains_by_sigterm() -> None:
    rig, worker = await busy(1)
    worker.drain = _refuse  # type: ignore[method-assign]
    await scale(rig, 0)
    assert rig.cluster.names(POD) == []


async def test_a_pod_that_never_ends_its_drain_is_deleted_after_its_time() -> None:
    rig, _ = await busy(1, drain={"timeoutSeconds": 60})
    await scale(rig, 0, seconds=60)
    assert rig.cluster.names(POD) == ["d-0-0"]
    await rig.run(30)
    assert rig.cluster.names(POD) == []


async def test_an_operator_that_is_restarted_meanwhile_deletes_the_pod_once_it_has_drained() -> None:
    rig, worker = await busy(1)
    await scale(rig, 0)
    rig.restart_operator()
    await rig.run(20)
    assert (worker.calls, rig.cluster.names(POD)) == (["drain 300"], ["d-0-0"])
    worker.in_flight = 0
    await rig.run(15)
    assert rig.cluster.names(POD) == []


async def test_a_replica_that_is_wanted_again_while_it_drains_gets_a_new_pod() -> None:
    rig, worker = await busy(1)
    await scale(rig, 0)
    await scale(rig, 1)
    assert rig.cluster.names(POD) == ["d-0-0", "d-0-1"]
    rig.start("d-0-1")
    await rig.run(5)
    assert rig.routable() == ["d-0-1"]
    worker.in_flight = 0
    await rig.run(15)
    assert rig.cluster.names(POD) == ["d-0-1"]
    assert rig.condition("Ready") == ("True", "Serving")


async def test_a_rollout_answers_what_its_old_replicas_accepted_and_its_deadline_waits_for_them() -> None:
    rig, _ = await busy(2, rollout={"progressDeadlineSeconds": 60}, drain={"timeoutSeconds": 3600})
    next(iter(rig.workers)).in_flight = 1
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(engine={"maxBatchSize": 2}))
    await rig.run(200)
    assert rig.condition("Progressing") == ("True", "RolloutProgressing")
    old = {name for name in rig.cluster.names(POD) if name.endswith("-0")}
    assert old == {"d-0-0", "d-1-0"}, "one drains, the other serves"
    for _ in range(4):
        for one in rig.workers:
            one.in_flight = 0
        rig.start_all()
        await rig.run(20)
    assert rig.cluster.names(POD) == ["d-0-1", "d-1-1"]
    assert rig.condition("Progressing") == ("True", "RolloutComplete")


async def test_held_requests_are_refused_at_once_and_hold_nothing_up() -> None:
    rig, worker = await busy(1, sleep={"policy": "OnIdle", "idleSeconds": 5})
    worker.in_flight = 0
    await rig.run(60)
    assert rig.states() == ["Asleep"]
    worker.slow = True
    worker.request()
    await scale(rig, 0)
    assert worker.held_requests == 0
    assert rig.cluster.names(POD) == []


def _refuse(_: object) -> None:
    raise ControlRefused(WireError(code="NotFound", message="there is no such call"), status=404)
