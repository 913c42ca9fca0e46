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
from support.sample import sample

pytestmark = pytest.mark.slow
Fault = Callable[[torch.Tensor], torch.Tensor]
(FAMILY,) = (family for family in FAMILIES if family.name == "StableDiffusion3Pipeline")
HERE = "test_rehearsal_can_fail.py"


def _after(x: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return x unchanged; the other arguments are there only so that the caller computes them before."""
    return x


def _index_by_list(x: torch.Tensor) -> torch.Tensor:
    return x[list(range(len(x)))]


def _put_by_indices(x: torch.Tensor) -> torch.Tensor:
    changed = x.clone()
    changed[torch.zeros(1, dtype=torch.long, device=x.device)] = 1.0
    return x


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


def _reuse_pinned(x: torch.Tensor) -> torch.Tensor:
    """Plant a race: write to pinned memory whose copy to the device may still be under way; on the CPU return x."""
    if not x.is_cuda:
        return x
    here = torch.ones(1, pin_memory=True)
    there = here.to(x.device, non_blocking=True)
    here.zero_()
    return x * there


def _read_early(x: torch.Tensor) -> torch.Tensor:
    """Plant a race: read pinned memory before the copy from the device into it is done; return x unchanged."""
    if not x.is_cuda:
        return x
    here = torch.zeros(1, pin_memory=True)
    here.copy_(x.flatten()[:1], non_blocking=True)
    return _after(x, here.sum())


WAITS: dict[str, Fault] = {
    "a number is asked for": lambda x: _after(x, x.sum().item()),
    "a branch by a value": _branch,
    "a mask is an index": lambda x: _after(x, x[x > 0]),
    "places are counted": lambda x: _after(x, x.nonzero()),
    "a list is an index": _index_by_list,
    "a number goes to indexed places": _put_by_indices,
    "a tensor is made of a list": lambda x: x * torch.tensor([1.0], device=x.device),
    "a blocking copy to the device": lambda x: x * torch.ones(1).to(x.device),
    "a copy to the host": lambda x: _after(x, x.cpu()),
    "the device is synchronised": _synchronise,
}
ERRORS: dict[str, tuple[Fault, str]] = {
    "a tensor of the host meets one of the device": (lambda x: x + torch.zeros(x.shape[-1]), "same device"),
    "noise by a generator of the host": (
        lambda x: x + 0 * torch.randn(1, generator=torch.Generator(), device=x.device),
        "Expected a 'cuda' device type for generator",
    ),
    "an array is made of it": (lambda x: _after(x, x.detach().numpy()), "can't convert cuda:0"),
}
RACES: dict[str, tuple[Fault, str]] = {
    "a result of another stream is used early": (_compute_aside, "stream 0 reads"),
    "pinned memory is written again early": (_reuse_pinned, "the host writes to"),
    "pinned memory is read early": (_read_early, "the host reads"),
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


@pytest.mark.parametrize("name", sample(list(WAITS), 3))
def test_a_wait_in_a_steady_step_is_found_with_its_line(name: str, planted: Callable[[Fault], None]) -> None:
    planted(WAITS[name])
    trial = try_family(FAMILY)
    assert trial.is_equal and not trial.races
    found = {cause: count for cause, count in trial.waits.items() if HERE in cause.line}
    assert len(found) == 1 and set(found.values()) == {trial.ticks}, trial.causes()


@pytest.mark.parametrize("name", sample(list(ERRORS), 1))
def test_an_operation_that_cuda_refuses_fails_the_request(name: str, planted: Callable[[Fault], None]) -> None:
    fault, message = ERRORS[name]
    planted(fault)
    with pytest.raises(AssertionError, match=message):
        try_family(FAMILY)


@pytest.mark.parametrize("name", sample(list(RACES), 2))
def test_a_use_of_a_value_that_may_not_be_there_is_found(name: str, planted: Callable[[Fault], None]) -> None:
    fault, message = RACES[name]
    planted(fault)
    trial = try_family(FAMILY)
    assert trial.races and all(message in race and HERE in race for race in trial.races), trial.races


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
