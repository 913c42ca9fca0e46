# SPDX-License-Identifier: Apache-2.0
"""Changes of a deployment's status: some are written at once, others only count; none over a version that was not seen."""

from datetime import timedelta
from typing import Any

import pytest

from diffusion_operator.api.deployment_status import AdaptersStatus, DeploymentStatus, LoadStatus, ReplicaState, ReplicaStatus
from diffusion_operator.api.meta import Condition, ConditionStatus
from diffusion_operator.api.names import DEPLOYMENT, Kind
from diffusion_operator.reconcile.status_write import worth_writing
from support.operator.fake_cluster import EPOCH, FakeCluster
from support.operator.rig import serving


def adapters_ready(reason: str, message: str) -> tuple[Condition, ...]:
    return (Condition(type="AdaptersReady", status=ConditionStatus.FALSE, last_transition_time=EPOCH, reason=reason, message=message),)


def loading(stage: str, done: int) -> tuple[ReplicaStatus, ...]:
    return (ReplicaStatus(index=0, state=ReplicaState.STARTING, load=LoadStatus(stage=stage, bytes_done=done)),)


CHANGES = [
    ("bytes", DeploymentStatus(replica_states=loading("Fetching", 1)), DeploymentStatus(replica_states=loading("Fetching", 2)), False),
    (
        "a stage",
        DeploymentStatus(replica_states=loading("Fetching", 1)),
        DeploymentStatus(replica_states=loading("LoadingWeights", 1)),
        True,
    ),
    ("a count", DeploymentStatus(adapters=AdaptersStatus(ready=1)), DeploymentStatus(adapters=AdaptersStatus(ready=2)), False),
    (
        "who is behind",
        DeploymentStatus(conditions=adapters_ready("Loading", "a, b")),
        DeploymentStatus(conditions=adapters_ready("Loading", "b")),
        False,
    ),
    (
        "who failed",
        DeploymentStatus(conditions=adapters_ready("SomeFailed", "a")),
        DeploymentStatus(conditions=adapters_ready("SomeFailed", "a, b")),
        True,
    ),
]


@pytest.mark.parametrize(("old", "new", "at_once"), [row[1:] for row in CHANGES], ids=[row[0] for row in CHANGES])
def test_written_at_once_is(old: DeploymentStatus, new: DeploymentStatus, at_once: bool) -> None:
    assert worth_writing(old, new, last=EPOCH, now=EPOCH + timedelta(seconds=4)) is at_once
    assert worth_writing(old, new, last=EPOCH, now=EPOCH + timedelta(seconds=5))
    assert not worth_writing(old, old, last=EPOCH, now=EPOCH + timedelta(hours=1))


async def test_a_status_is_not_written_over_a_version_that_the_pass_has_not_seen_and_the_next_pass_writes_it() -> None:
    rig = await serving()
    write = FakeCluster.apply_status
    raced: list[str] = []

    async def after_an_edit(kind: Kind, namespace: str, name: str, *, status: dict[str, Any], version: str) -> None:
        if not raced:
            raced.append(name)
            rig.cluster._changed(rig.cluster.find(kind, name) or {})
        await write(rig.cluster, kind, namespace, name, status=status, version=version)

    rig.cluster.apply_status = after_an_edit  # type: ignore[method-assign]
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(replicas=2))
    await rig.run(10)
    assert raced == ["d"]
    assert (rig.status()["observedGeneration"], len(rig.states()), rig.errors) == (2, 2, [])
