# SPDX-License-Identifier: Apache-2.0
"""A word that only a newer worker knows is kept as text; the worker is not called unreachable for it."""

import msgspec
import pytest
from msgspec.structs import replace

from diffusion_operator.api.worker_state import RecordState, WorkerPhase, WorkerState
from support.operator.rig import serving, with_adapter


def read(**members: object) -> WorkerState:
    return msgspec.json.decode(msgspec.json.encode({"bootId": "b", "state": "ready", **members}), type=WorkerState)


def test_a_word_of_a_newer_worker_is_kept_as_text_and_equals_none_of_ours() -> None:
    state = read(state="resharding", adapters=[{"name": "x", "state": "Paging"}])
    (record,) = state.adapters
    assert (state.state.value, record.state.value) == ("resharding", "Paging")
    assert not state.state.known
    assert not record.state.known
    assert state.state not in tuple(WorkerPhase)
    assert msgspec.json.decode(msgspec.json.encode(state), type=WorkerState) == state
    assert WorkerPhase.READY.known


@pytest.mark.parametrize(("word", "kept"), [("x" * 99, "x" * 31 + "…"), ("a\x1b[31m", "a\\x1b[31m")])
def test_such_a_word_is_cut_and_escaped(word: str, kept: str) -> None:
    assert read(state=word).state.value == kept


def test_what_is_no_word_is_still_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="Expected `str`, got `int`"):
        read(state=5)


async def test_a_ready_replica_in_a_state_of_a_newer_worker_serves_on_and_says_so() -> None:
    rig = await serving(1)
    (worker,) = rig.workers
    worker.phase = WorkerPhase("resharding")
    await rig.run(30)
    assert rig.condition("Ready") == ("True", "Serving")
    assert rig.routable() == ["d-0-0"]
    (replica,) = rig.status()["replicaStates"]
    assert "the worker reports the state 'resharding', which this operator does not know" in replica["message"]


async def test_a_replica_with_a_policy_a_level_and_a_residency_of_a_newer_worker_serves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = await with_adapter()
    (worker,) = rig.workers
    known, ended = worker.state, {"operationId": "o", "kind": "sleep", "level": "Disk"}
    ranks = [{"rank": 0, "state": "ready", "memory": {"level": "Disk"}}]
    newer = read(policy="Nightly", ranks=ranks, lastOperation=ended, adapters=[{"name": "x", "state": "Loaded", "residency": "Pinned"}])
    residency = newer.adapters[0].residency

    def more() -> WorkerState:
        state = known()
        adapters = tuple(replace(one, residency=residency) for one in state.adapters)
        return replace(state, policy=newer.policy, ranks=newer.ranks, last_operation=newer.last_operation, adapters=adapters)

    monkeypatch.setattr(worker, "state", more)
    await rig.run(60)
    assert rig.condition("Ready") == ("True", "Serving")
    assert rig.condition("Degraded") == ("False", "AsExpected")
    (replica,) = rig.status()["replicaStates"]
    assert "level" not in replica["lastOperation"], "the schema of a status knows no such word"


async def test_an_adapter_in_a_state_of_a_newer_worker_is_loading_and_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = await with_adapter()
    (worker,) = rig.workers
    known = worker.state

    def paging() -> WorkerState:
        state = known()
        return replace(state, adapters=tuple(replace(one, state=RecordState("Paging")) for one in state.adapters))

    monkeypatch.setattr(worker, "state", paging)
    await rig.run(60)
    assert rig.instance()["state"] == "Loading"
    assert rig.condition("Ready") == ("True", "Serving")
