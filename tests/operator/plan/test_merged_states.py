# SPDX-License-Identifier: Apache-2.0
"""A worker's state from one answer to the next: records that did not change are the same objects."""

from diffusion_operator.api.merged_state import merged
from diffusion_operator.api.worker_state import AdapterRecord, HeldReport, ModelReport, RecordState, WorkerPhase, WorkerState
from diffusion_operator.plan.results.worker_changes import happened


def record(name: str, state: RecordState = RecordState.LOADED, **fields: object) -> AdapterRecord:
    return AdapterRecord(name=name, state=state, **fields)  # type: ignore[arg-type]


def state(*adapters: AdapterRecord, number: int = 1, boot: str = "b", **fields: object) -> WorkerState:
    return WorkerState(boot_id=boot, state=WorkerPhase.READY, revision=f"{boot}.{number}", adapters=adapters, **fields)  # type: ignore[arg-type]


def test_an_answer_without_a_change_of_adapters_takes_them_over_as_a_whole() -> None:
    before = state(record("a"), record("b"))
    after = merged(before, state(record("a"), record("b"), number=2, in_flight=3))
    assert after.adapters is before.adapters
    assert after.named is before.named
    assert after.in_flight == 3


def test_parts_that_are_equal_are_the_same_objects() -> None:
    before = state(model=ModelReport(pipeline="p"), held=HeldReport(current=1), pod_uid="".join(("uid", "-1")))
    after = merged(before, state(number=2, model=ModelReport(pipeline="p"), held=HeldReport(current=2), pod_uid="".join(("uid", "-1"))))
    assert after.model is before.model
    assert after.pod_uid is before.pod_uid
    assert after.held == HeldReport(current=2)
    assert after.revision == "b.2"


def test_a_name_that_changed_has_the_records_of_the_answer_and_no_others() -> None:
    before = state(record("a", digest="sha256:1"), record("a", RecordState.FETCHING))
    after = merged(before, state(record("a", digest="sha256:2"), number=2))
    assert [one.digest for one in after.adapters] == ["sha256:2"]


def test_a_whole_document_keeps_the_objects_of_what_is_equal() -> None:
    before = state(record("a"), record("b"), record("gone"))
    after = merged(before, state(record("a"), record("b", RecordState.FAILED), number=2))
    assert [one.name for one in after.adapters] == ["a", "b"]
    assert after.adapters[0] is before.adapters[0]
    assert after.adapters[1].state is RecordState.FAILED


def test_nothing_is_taken_over_from_another_life_of_the_server() -> None:
    before = state(record("a"))
    after = merged(before, state(record("x"), boot="c"))
    assert [one.name for one in after.adapters] == ["x"]
    assert merged(None, before) is before


def test_what_happened_is_seen_in_the_records_that_changed() -> None:
    before = state(record("a", digest="sha256:1", load_seconds=1.0), record("b", digest="sha256:2", load_seconds=2.0))
    evicted = record("a", RecordState.CACHED, digest="sha256:1", load_seconds=1.0)
    loaded = record("c", digest="sha256:3", load_seconds=3.0, size_bytes=7)
    seen = happened(before, merged(before, state(evicted, before.adapters[1], loaded, number=2)))
    assert (seen.evictions, [one.seconds for one in seen.loads]) == (1, [3.0])
