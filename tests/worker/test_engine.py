# SPDX-License-Identifier: Apache-2.0
"""The engine's pure parts: who runs next, what is refused before it runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusion_worker.config import RequestLimits
from diffusion_worker.engine.admission import GenerationParams, check
from diffusion_worker.engine.scheduler import StepScheduler
from diffusion_worker.errors import RETRYABLE, STATUS, ErrorCode, RequestError
from diffusion_worker.messages import ModelInfo, RequestSpec

MODEL = ModelInfo(pipeline="P", dtype="float32", size_multiple=8, weights_bytes=1)


def spec(name: str) -> RequestSpec:
    return RequestSpec(request_id=name, prompt="a", seed=1)


def names(specs: list[RequestSpec]) -> list[str]:
    return [item.request_id for item in specs]


def test_requests_join_in_the_order_they_came_as_far_as_the_batch_has_room() -> None:
    scheduler = StepScheduler(2)
    for name in "abc":
        scheduler.add(spec(name))
    assert names(scheduler.next_tick().join) == ["a", "b"]
    assert names(scheduler.next_tick().join) == []
    scheduler.finished("a")
    assert names(scheduler.next_tick().join) == ["c"]
    assert (scheduler.running, scheduler.waiting) == (2, 0)


def test_a_running_request_that_is_removed_leaves_with_the_next_tick_and_makes_room() -> None:
    scheduler = StepScheduler(1)
    scheduler.add(spec("a"))
    scheduler.add(spec("b"))
    scheduler.next_tick()
    scheduler.remove("a")
    tick = scheduler.next_tick()
    assert (tick.leave, names(tick.join)) == (["a"], ["b"])


def test_a_waiting_request_that_is_removed_never_joins() -> None:
    scheduler = StepScheduler(1)
    scheduler.add(spec("a"))
    scheduler.remove("a")
    assert not scheduler.has_work
    assert names(scheduler.next_tick().join) == []


@given(st.lists(st.sampled_from(["add", "tick", "finish", "remove"]), max_size=60), st.integers(1, 4))
def test_the_batch_is_never_over_its_size_and_nobody_is_lost(actions: list[str], size: int) -> None:
    scheduler = StepScheduler(size)
    waiting: list[str] = []
    running: list[str] = []
    for number, action in enumerate(actions):
        if action == "add":
            scheduler.add(spec(str(number)))
            waiting.append(str(number))
        elif action == "tick":
            joined = names(scheduler.next_tick().join)
            assert joined == waiting[: len(joined)]
            waiting, running = waiting[len(joined) :], running + joined
        elif running and action == "finish":
            scheduler.finished(running.pop(0))
        elif running and action == "remove":
            scheduler.remove(running.pop())
        assert len(running) <= size
        assert (scheduler.waiting, scheduler.running) == (len(waiting), len(running))
        if running or waiting:
            assert scheduler.has_work


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt": "  "}, "prompt: expected a text"),
        ({"prompt": "x" * 9000}, "prompt: expected at most 8192 characters, found 9000"),
        ({"n": 0}, "n: expected 1 to 8, found 0"),
        ({"n": 9}, "n: expected 1 to 8, found 9"),
        ({"seed": -1}, "seed: expected 0 to"),
        ({"seed": 2**63}, "seed: expected 0 to"),
        ({"steps": 0}, "num_inference_steps: expected 1 to 200, found 0"),
        ({"steps": 201}, "num_inference_steps"),
        ({"guidance_scale": -0.1}, "guidance_scale"),
        ({"width": 60, "height": 64}, "multiples of 8, found 60x64"),
        ({"width": 0, "height": 64}, "at least 8x8"),
        ({"width": 4096, "height": 4096}, "at most 4194304 pixels"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_by_field_expected_and_found(change: dict[str, object], says: str) -> None:
    with pytest.raises(RequestError, match=says) as refused:
        check(GenerationParams(**{"prompt": "a red digit seven"} | change), RequestLimits(), MODEL)  # type: ignore[arg-type]
    assert refused.value.code is ErrorCode.INVALID_REQUEST


def test_a_prompt_is_never_repeated_in_an_error() -> None:
    with pytest.raises(RequestError) as refused:
        check(GenerationParams(prompt="secret " * 2000), RequestLimits(), MODEL)
    assert "secret" not in str(refused.value)


def test_every_code_has_a_status_and_retryable_ones_are_no_fault_of_the_caller() -> None:
    assert set(STATUS) == set(ErrorCode)
    assert all(STATUS[code] >= 500 for code in RETRYABLE)
