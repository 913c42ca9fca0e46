# SPDX-License-Identifier: Apache-2.0
"""The table of operations on the rehearsal's device, with and without inference mode: those that wait, copy, or do neither."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from support.rehearsal.fake_cuda import rehearse
from support.rehearsal.fake_tensor import CUDA
from support.rehearsal.mode import Rehearsal

Case = Callable[[torch.Tensor], Any]
# Each returns a value that has to be the CPU's. x is [1, -1, 2].
WAITING: dict[str, Case] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x[2]),
    "bool": lambda x: bool((x > 0).any()),
    "if": lambda x: 1 if x[0] > 0 else 2,
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu"),
    "to cpu, not pinned, not blocking": lambda x: x.to("cpu", non_blocking=True),
    "tolist": lambda x: x.tolist(),
    "text": lambda x: f"{x[0]:.1f}",
    "range": lambda x: list(range(x[2].long())),
    "a tensor of numbers there": lambda x: torch.tensor([x[0], x[1]]),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0)[0],
    "argwhere": lambda x: torch.argwhere(x > 0),
    "get by mask": lambda x: x[x > 0],
    "get by a list of bools": lambda x: x[[True, False, True]],
    "put by mask": lambda x: _put(x, x > 0, x[0]),
    "select by mask": lambda x: x.masked_select(x > 0),
    "repeat by counts": lambda x: x.repeat_interleave((x > 0).long()),
    "unique": lambda x: x.unique(),
    "unique consecutive": lambda x: x.unique_consecutive(),
    "equal": lambda x: torch.equal(x, x + 1),
    "one_hot without classes": lambda x: torch.nn.functional.one_hot((x > 0).long()),
    "solve": lambda x: torch.linalg.solve(torch.diag(x), x),
    "inverse": lambda x: torch.linalg.inv(torch.diag(x)),
    "bincount": lambda x: (x > 0).long().bincount(),
    "get by a number there": lambda x: x[(x[0] * 2).long()],
}
# Copies to the device wait too, where their memory is not pinned or they do not ask to go on.
SENDING: dict[str, Case] = {
    "to the device": lambda x: torch.ones(3).to(x.device) + x,
    "to a device without a number": lambda x: torch.ones(3).to(x.device.type) + x,
    "cuda": lambda x: torch.ones(3).cuda() + x,
    "a tensor of a list": lambda x: torch.tensor([1.0, 2.0, 3.0], device=x.device) + x,
    "a tensor of a number": lambda x: torch.tensor(2.0, device=x.device) + x,
    "as_tensor of an array": lambda x: torch.as_tensor(np.ones(3, np.float32), device=x.device) + x,
    "new_tensor": lambda x: x.new_tensor([1.0, 2.0, 3.0]) + x,
    "copy_": lambda x: x.clone().copy_(torch.ones(3)),
    "copy_ of a number": lambda x: x.clone().copy_(torch.tensor(2.0)),
    "get by indices of the host": lambda x: x[torch.tensor([0, 2])],
    "get by a list": lambda x: x[[0, 2]],
    "get by an array": lambda x: x[np.array([0, 2])],
    "put by indices of the host": lambda x: _put(x, torch.tensor([0, 2]), x[0]),
    "put a number by indices": lambda x: _put(x, (x > 0).long(), 5.0),
    "put a number to one place": lambda x: _put(x, 0, 5.0),
    "put values of the host": lambda x: _put(x, slice(0, 2), torch.ones(2)),
}
# These copy without a wait.
ASYNCHRONOUS: dict[str, Case] = {
    "to the device from pinned memory": lambda x: torch.ones(3).pin_memory().to(x.device, non_blocking=True) + x,
    "a part of pinned memory": lambda x: torch.ones(6).pin_memory()[3:].to(x.device, non_blocking=True) + x,
    "made pinned": lambda x: torch.zeros(3, pin_memory=True).to(x.device, non_blocking=True) + x,
    "a pinned tensor of a list": lambda x: torch.tensor([1.0, 2.0, 3.0], pin_memory=True).to(x.device, non_blocking=True) + x,
    "staged": lambda x: torch.ones(3).to(x.device, non_blocking=True) + x,
    "copy_ from pinned memory": lambda x: x.clone().copy_(torch.ones(3).pin_memory(), non_blocking=True),
    "get by a mask of the host": lambda x: x[torch.tensor([True, False, True])],
}
QUIET: dict[str, Case] = {
    "add": lambda x: x + 1,
    "linear": lambda x: torch.nn.functional.linear(x.reshape(1, -1), torch.ones(2, 3, device=x.device)),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(*[x.reshape(1, 1, 1, 3)] * 3),
    "softmax, cat, view": lambda x: torch.cat([x.softmax(0), x]).view(2, -1),
    "put a number to several places": lambda x: _put(x, slice(0, 2), 5.0),
    "put a number by mask": lambda x: _put(x, x > 0, 5.0),
    "put by indices there": lambda x: _put(x, (x > 0).long(), x[0]),
    "get by indices there": lambda x: x[(x > 0).long()],
    "times a number of the host": lambda x: x * torch.tensor(2.0),
    "where with numbers": lambda x: torch.where(x > 0, 1.0, x),
    "masked_fill": lambda x: x.masked_fill(x > 0, 7.0),
    "arange there": lambda x: torch.arange(3, device=x.device) + x,
    "zeros_like, full_like": lambda x: torch.zeros_like(x) + torch.full_like(x, 2.0),
    "to its own device": lambda x: x.to(x.device) + x,
    "to another precision": lambda x: x.to(torch.float64).float(),
    "repeat a fixed count": lambda x: x.repeat_interleave(2),
    "repeat by counts of a known sum": lambda x: x.repeat_interleave((x > 0).long(), output_size=2),
    "one_hot with classes": lambda x: torch.nn.functional.one_hot((x > 0).long(), num_classes=2),
    "any": lambda x: (x > 0).any(),
    "shape": lambda x: (len(x), x.numel(), str(x.dtype), *x.stride()),
    "iterate": lambda x: sum(x),
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (3,)),
    "interpolate": lambda x: torch.nn.functional.interpolate(x.view(1, 1, 3), scale_factor=2.0),
}
IN_MODES = pytest.mark.parametrize("inference", [False, True], ids=["plain", "inference"])


def _put(x: torch.Tensor, key: Any, value: Any) -> torch.Tensor:
    changed = x.clone()
    changed[key] = value
    return changed


def _tried(case: Case, inference: bool) -> Rehearsal:
    """Run a case on the rehearsal's device and on the CPU, assert equal results and no race, and return the rehearsal.

    The records in it are those of the case alone.
    """
    numbers = torch.tensor([1.0, -1.0, 2.0])
    with torch.inference_mode(inference):
        with rehearse() as rehearsal:
            x = numbers.clone().to(CUDA)
            rehearsal.records.clear()
            made = case(x)
            # The check itself waits.
            waits, copies = rehearsal.records.waits.copy(), rehearsal.records.copies.copy()
            made = made.cpu() if isinstance(made, torch.Tensor) else made
            rehearsal.records.waits, rehearsal.records.copies = waits, copies
        expected = _on_cpu(case, numbers.clone())
    if isinstance(made, torch.Tensor):
        torch.testing.assert_close(made, expected, rtol=0, atol=1e-6)
    else:
        assert made == expected
    assert rehearsal.records.races == []
    return rehearsal


def _on_cpu(case: Case, numbers: torch.Tensor) -> Any:
    """Run a case on the CPU and return its result; calls in it that pin memory or move tensors to a GPU do nothing."""
    before = torch.Tensor.pin_memory, torch.Tensor.cuda, torch.zeros, torch.tensor
    torch.Tensor.pin_memory = torch.Tensor.cuda = lambda self: self  # type: ignore[assignment, method-assign]
    torch.zeros, torch.tensor = _unpinned(torch.zeros), _unpinned(torch.tensor)
    try:
        return case(numbers)
    finally:
        torch.Tensor.pin_memory, torch.Tensor.cuda, torch.zeros, torch.tensor = before  # type: ignore[method-assign]


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args, **kwargs: make(*args, **{name: value for name, value in kwargs.items() if name != "pin_memory"})


@IN_MODES
@pytest.mark.parametrize("name", WAITING)
def test_what_the_host_has_to_see_is_a_wait(name: str, inference: bool) -> None:
    found = _tried(WAITING[name], inference).records
    assert found.waits, found.copies
    assert all("test_operations.py" in cause.line for cause in found.waits), found.waits


@IN_MODES
@pytest.mark.parametrize("name", SENDING)
def test_a_blocking_copy_to_the_device_is_a_copy_and_a_wait(name: str, inference: bool) -> None:
    found = _tried(SENDING[name], inference).records
    assert found.copies.total() == 1 and found.waits.total() == 1, (found.copies, found.waits)


@IN_MODES
@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_a_copy_that_goes_on_beside_the_host_is_no_wait(name: str, inference: bool) -> None:
    found = _tried(ASYNCHRONOUS[name], inference).records
    assert found.copies.total() == 1 and not found.waits, (found.copies, found.waits)


@IN_MODES
@pytest.mark.parametrize("name", QUIET)
def test_other_operations_neither_wait_nor_copy(name: str, inference: bool) -> None:
    found = _tried(QUIET[name], inference).records
    assert not found.waits and not found.copies, (found.waits, found.copies)
