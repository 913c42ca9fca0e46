# SPDX-License-Identifier: Apache-2.0
"""Merged calls that fail are made apart, by all ranks alike, and those that can never be merged are tried twice."""

from typing import Any

import pytest
import torch

from diffusion_worker.runner.parallel.rows import CallFailed
from diffusion_worker.runner.stepping.request_state import mark_step
from diffusion_worker.runner.stepping.stepper import Stepper
from diffusion_worker.runner.stepping.suspending_module import SuspendingModule
from support.families.rig.all import FAMILIES
from support.families.rig.family_rig import Asked, FamilyRig
from support.runner import rank_processes
from support.runner.merged_calls import STEPS, Toy, body, counted, failing_over, serve
from support.runner.rig import OneRank

APART = [1] * 4
TRIED_TWICE = [4, *APART, 4, *APART, *APART]


def test_a_call_that_cannot_be_merged_is_tried_twice() -> None:
    rank = OneRank()
    made = counted(rank)  # type: ignore[arg-type]
    output = serve(rank, dict.fromkeys("abcd", body(Toy(failing_over(1, RuntimeError("one row only"))))))
    assert sorted(output.images) == list("abcd")
    assert made == TRIED_TWICE


def test_a_failure_of_the_moment_does_not_keep_calls_apart() -> None:
    tried: list[int] = []

    def fail_at_times(states: torch.Tensor) -> None:
        tried.append(len(states))
        if len(states) > 1 and tried.count(2) % 2:
            raise RuntimeError("at times")

    rank, model = OneRank(), Toy(fail_at_times)
    stepper, made = Stepper({}, rank, None), counted(rank)  # type: ignore[arg-type]
    for _ in range(2):
        serve(rank, dict.fromkeys("ab", body(model)), stepper=stepper)
    assert made == [2, 1, 1, 2] * STEPS


@pytest.mark.parametrize("words", ["two rows only", "its words, and not its class, are DrawsNumbers and RowsNotSeparable"])
def test_a_failed_call_of_one_size_says_nothing_about_another_size(words: str) -> None:
    rank, model = OneRank(), Toy(failing_over(2, RuntimeError(words)))
    stepper, made = Stepper({}, rank, None), counted(rank)  # type: ignore[arg-type]
    serve(rank, dict.fromkeys("abc", body(model)), stepper=stepper)
    assert made == [3, 1, 1, 1, 3, *[1] * 6]
    made.clear()
    serve(rank, dict.fromkeys("ab", body(model, width=3)), stepper=stepper)
    assert made == [2] * STEPS


def test_a_request_that_fails_alone_too_does_not_keep_the_others_apart() -> None:
    def refuse(states: torch.Tensor) -> None:
        if (states == 13).any():
            raise IndexError("13 is out of range")

    stand_in: Any = SuspendingModule("transformer", model := Toy(refuse))

    def keeps_asking() -> None:
        for _ in range(STEPS):
            with pytest.raises(CallFailed, match="13 is out of range"):
                stand_in(torch.full((1, 2), 13.0))
            mark_step(STEPS)

    rank = OneRank()
    made = counted(rank)  # type: ignore[arg-type]
    output = serve(rank, {"a": body(model), "b": body(model), "bad": keeps_asking})
    assert sorted(output.images) == ["a", "b", "bad"]
    assert made == [3, 1, 1, 1] * STEPS


def test_a_lack_of_memory_does_not_keep_calls_apart() -> None:
    rank = OneRank()
    made = counted(rank)  # type: ignore[arg-type]
    output = serve(rank, dict.fromkeys("ab", body(Toy(failing_over(1, torch.OutOfMemoryError("out of memory"))))))
    assert sorted(output.images) == ["a", "b"]
    assert made == [2, 1, 1] * STEPS


def test_arguments_that_cannot_be_compared_keep_a_call_alone() -> None:
    class WithTable(Toy):
        def forward(self, hidden_states: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states)

    rank, table = OneRank(), torch.eye(3).to_sparse()
    made = counted(rank)  # type: ignore[arg-type]
    output = serve(rank, dict.fromkeys("ab", body(WithTable(), table=table)))
    assert sorted(output.images) == ["a", "b"]
    assert made == [1, 1] * STEPS


@pytest.mark.parametrize("name", ["AmusedPipeline", "HunyuanVideo15ImageToVideoPipeline"])
def test_a_vae_that_takes_one_image_at_a_time_is_tried_twice_with_two(name: str) -> None:
    rig = FamilyRig(next(family for family in FAMILIES if family.name == name))
    failures = []
    for _ in range(3):
        rig.outcome(Asked(1, 1), Asked(2, 1))
        failures.append(len(rig.rank.failures))
    assert failures == [1, 1, 0]


@pytest.mark.slow
def test_all_ranks_make_calls_apart_where_a_merged_one_fails_on_one_of_them() -> None:
    first, second = rank_processes.run("support.runner.merged_calls:merged_calls_fail")
    assert first == second
    done: dict[str, Any] = {"images": list("abcd"), "errors": [], "calls": TRIED_TWICE}
    memory = first.pop("memory on rank 1")
    assert memory == done | {"calls": [4, 1, 1, 1, 1] * STEPS}
    assert all(found == done for found in first.values()), first
