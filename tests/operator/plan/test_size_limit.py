# SPDX-License-Identifier: Apache-2.0
"""A status is never too large for etcd, and says so if it leaves details out."""

import msgspec
import pytest

from diffusion_operator.api.deployment_status import FailureStatus, OperationStatus, ReplicaState, ReplicaStatus
from diffusion_operator.api.worker_state import LossReport, WireError, WorkerPhase
from diffusion_operator.plan.observed.pods import Container, Exit
from diffusion_operator.plan.status.deployment import GROUPS_BYTES, GROUPS_SHOWN, truncate_groups
from support.operator.plan_builders import planned, pod, says
from support.operator.rig import serving

SMALL_ENOUGH = 512 << 10  # a third of what etcd takes


def talkative(index: int, text: str) -> ReplicaStatus:
    return ReplicaStatus(
        index=index,
        state=ReplicaState.FAILED,
        message=text,
        last_rank_loss=text,
        last_failure=FailureStatus(code="RankFailed", message=text),
        last_operation=OperationStatus(id="x" * 128, message=text),
        leader_pod="p" * 253,
        node="n" * 253,
    )


@pytest.mark.parametrize("letter", ["a", "ü", "字", "🐈"])
@pytest.mark.parametrize("length", [0, 100, 1024])
def test_records_fit_whatever_they_say(letter: str, length: int) -> None:
    groups = [talkative(index, letter * length) for index in range(256)]
    shown, truncated = truncate_groups(groups)
    assert len(msgspec.json.encode(shown)) <= GROUPS_BYTES
    assert (len(shown), truncated) == (GROUPS_SHOWN, True)


def test_what_fits_is_left_as_it_is() -> None:
    groups = [talkative(index, "text" * 100) for index in range(GROUPS_SHOWN)]
    assert truncate_groups(groups) == (tuple(groups), False)


def test_of_too_many_those_are_shown_that_have_something_to_tell() -> None:
    groups = [ReplicaStatus(index=index, state=ReplicaState.AWAKE) for index in range(200)]
    groups[150] = ReplicaStatus(index=150, state=ReplicaState.FAILED, message="no memory")
    groups[199] = ReplicaStatus(index=199, state=ReplicaState.PENDING, failures=2)
    shown, truncated = truncate_groups(groups)
    assert truncated
    assert [group.index for group in shown] == [*range(GROUPS_SHOWN - 2), 150, 199]


@pytest.mark.parametrize("letter", ["x", "🐈"])
def test_a_deployment_of_256_replicas_that_all_complain_has_a_small_status_with_true_counters(letter: str) -> None:
    text = letter * 5000
    failing = {"ready": False, "container": Container(running=True, restarts=9, last_exit=Exit(70, message=text))}
    report = says(
        WorkerPhase.FAILED, failure=WireError(code="EngineFailed", message=text), last_loss=LossReport(fault="Died", message=text)
    )
    pods = [pod(index, **failing) for index in range(256)]
    status = planned(*pods, states=dict.fromkeys(range(256), report), replicas=256).status
    assert (status.replicas, status.failed_replicas, status.replica_states_truncated, len(status.replica_states)) == (256, 256, True, 64)
    assert len(msgspec.json.encode(status)) < SMALL_ENOUGH


def test_a_deployment_of_64_says_nothing_of_it() -> None:
    status = planned(*(pod(index) for index in range(64)), replicas=64).status
    assert (len(status.replica_states), status.replica_states_truncated) == (64, None)


async def test_an_event_tells_that_replicas_are_left_out_once() -> None:
    rig = await serving(70)
    assert rig.status()["replicaStatesTruncated"] is True
    assert (rig.status()["awakeReplicas"], len(rig.status()["replicaStates"])) == (70, 64)
    assert ["it lists 64 replicas" in note for note in rig.cluster.notes("StatusTruncated")] == [True]
    assert rig.condition("Ready") == ("True", "Serving")
