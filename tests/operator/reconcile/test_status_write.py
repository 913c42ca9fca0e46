# SPDX-License-Identifier: Apache-2.0
"""Changes of a deployment's status: some are written at once, others only count."""

from datetime import timedelta

import pytest

from diffusion_operator.api.deployment_status import AdaptersStatus, DeploymentStatus, LoadStatus, ReplicaState, ReplicaStatus
from diffusion_operator.api.meta import Condition, ConditionStatus
from diffusion_operator.reconcile.status_write import worth_writing
from support.operator.fake_cluster import EPOCH


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
