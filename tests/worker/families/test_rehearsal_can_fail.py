# SPDX-License-Identifier: Apache-2.0
"""Faults of each kind, planted in a model's forward, and the check of the rehearsal that finds each.

Nothing here is found by the tests on a CPU: there, every one of these models works.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.families.rig.all import FAMILIES
from support.rehearsal.fake_cuda import rehearse
from support.rehearsal.family_trial import COMPANY, try_family
from support.rehearsal.records import Records

pytestmark = pytest.mark.slow
Fault = Callable[[torch.Tensor], torch.Tensor]
(FAMILY,) = (family for family in FAMILIES if family.name == "StableDiffusion3Pipeline")
HERE = "test_rehearsal_can_fail.py"


def _branch(x: torch.Tensor) -> torch.Tensor:
    return -x if x.isnan().any() else x


def _synchronise(x: torch.Tensor) -> torch.Tensor:
    if x.is_cuda:
        torch.cuda.synchronize()
    return x


def _compute_aside(x: torch.Tensor) -> torch.Tensor:
    """Plant a race: compute on another CUDA stream, and use the result without waiting for that; on the CPU return a copy."""
    if not x.is_cuda:
        return x * 1
    aside = torch.cuda.Stream(x.device)
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        made = x * 1
    return made * 1


# Other operations are in `rehearsal/test_operations.py`, other errors and races beside it.
WAITS: dict[str, Fault] = {
    "a branch by a value": _branch,
    "a blocking copy to the device": lambda x: x * torch.ones(1).to(x.device),
    "the device is synchronised": _synchronise,
}


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fault], None]:
    """Provide a function that plants a fault: from then to the test's end the denoiser's input goes through it."""
    kind: Any = type(FAMILY.build().transformer)
    forward = kind.forward

    def plant(fault: Fault) -> None:
        def faulty(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return forward(self, fault(hidden_states), *args, **kwargs)

        faulty.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
        monkeypatch.setattr(kind, "forward", faulty)

    return plant


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_in_a_steady_step_is_found_with_its_line(name: str, planted: Callable[[Fault], None]) -> None:
    planted(WAITS[name])
    trial = try_family(FAMILY)
    assert trial.is_equal and not trial.races
    found = {cause: count for cause, count in trial.waits.items() if HERE in cause.line}
    assert len(found) == 1 and set(found.values()) == {trial.ticks}, trial.causes()


def test_an_operation_that_cuda_refuses_fails_the_request(planted: Callable[[Fault], None]) -> None:
    planted(lambda x: x + torch.zeros(x.shape[-1]))
    with pytest.raises(AssertionError, match="same device"):
        try_family(FAMILY)


def test_a_result_of_another_stream_that_is_used_early_is_found(planted: Callable[[Fault], None]) -> None:
    planted(_compute_aside)
    trial = try_family(FAMILY)
    assert trial.races and all("stream 0 reads" in race and HERE in race for race in trial.races), trial.races


def test_a_result_that_differs_on_the_device_alone_is_found(planted: Callable[[Fault], None]) -> None:
    planted(lambda x: x * 1.001 if x.is_cuda else x)
    assert not try_family(FAMILY).is_equal


def test_without_a_fault_nothing_is_found(planted: Callable[[Fault], None]) -> None:
    planted(lambda x: x * 1)
    trial = try_family(FAMILY)
    assert trial.is_equal and trial.ticks == 3 and not trial.races and len(COMPANY) == 2
    assert not [cause for cause in (*trial.waits, *trial.copies) if HERE in cause.line]


def test_records_name_the_function_and_the_line_that_ask() -> None:
    records = Records()
    records.wait("aten::item")
    (cause,) = records.waits
    assert cause.function == "test_records_name_the_function_and_the_line_that_ask" and HERE in cause.line
    records.clear()
    _ = [records.wait("aten::item") for _ in range(2)]
    assert [cause.function for cause in records.waits] == [cause.function], "a comprehension is its function, in each version of Python"
    with rehearse() as rehearsal:
        rehearsal.wait("another")
        assert [cause.operation for cause in rehearsal.records.waits] == ["another"]
