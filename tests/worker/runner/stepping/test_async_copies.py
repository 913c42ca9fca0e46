# SPDX-License-Identifier: Apache-2.0
"""Copies in the code of pipelines: on an accelerator made of the CPU they neither wait nor change a value."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from diffusion_worker.runner.stepping import async_copies as module
from diffusion_worker.runner.stepping.async_copies import async_copies
from support.rehearsal.fake_cuda import rehearse
from support.rehearsal.fake_tensor import CUDA, FakeCudaTensor
from support.rehearsal.records import Records

Case = Callable[[torch.device], torch.Tensor]
CASES: dict[str, Case] = {
    "noise of the host": lambda device: torch.randn(4, generator=torch.Generator().manual_seed(1)).to(device),
    "another precision on the way": lambda device: torch.linspace(0, 1, 4).to(device, torch.float16),
    "by keywords": lambda device: torch.linspace(0, 1, 4).to(device=device, dtype=torch.float64, copy=True),
    "a part that is not contiguous": lambda device: torch.arange(12.0).view(3, 4).t()[1].to(device),
    "a list": lambda device: torch.tensor([1, 2, 3], device=device),
    "a list of tensors": lambda device: torch.tensor([torch.tensor(0.5), torch.tensor(0.25)], device=device),
    "an array": lambda device: torch.as_tensor(np.arange(3.0, dtype=np.float32), device=device),
    "an array that is sent": lambda device: torch.from_numpy(np.arange(3.0)).to(device),
    "a small system": lambda device: torch.linalg.solve(
        torch.tensor([[2.0, 1.0], [1.0, 3.0]], device=device), torch.ones(2, device=device)
    ),
    "copy_": lambda device: torch.zeros(3, device=device).copy_(torch.arange(3.0)),
}
BOTH_MODES = pytest.mark.parametrize("inference", [False, True], ids=["plain", "inference"])


def _made(case: Case) -> tuple[torch.Tensor, Records]:
    with rehearse() as rehearsal, async_copies():
        made = case(CUDA)
        assert isinstance(made, FakeCudaTensor)
        return made.inner, rehearsal.records


@BOTH_MODES
@pytest.mark.parametrize("name", CASES)
def test_a_copy_of_a_pipeline_does_not_wait(name: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        made, records = _made(CASES[name])
        expected = CASES[name](torch.device("cpu"))
    assert not records.waits and not records.races and records.copies
    torch.testing.assert_close(made, expected, rtol=1e-6, atol=0)
    with torch.inference_mode(inference), rehearse() as rehearsal:
        CASES[name](CUDA)
        assert rehearsal.records.waits


def test_the_source_may_be_written_to_at_once() -> None:
    with rehearse() as rehearsal, async_copies():
        source = torch.ones(3)
        made = source.to(CUDA)
        source.zero_()
        assert made.sum().item() == 3 and not rehearsal.records.races


def test_pinned_memory_of_a_pipeline_is_copied_as_it_asked() -> None:
    with rehearse() as rehearsal, async_copies():
        source = torch.ones(3).pin_memory()
        source.to(CUDA)
        source.zero_()
        assert rehearsal.records.waits.total() == 1 and not rehearsal.records.races


def test_a_large_tensor_takes_no_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 8)
    with rehearse() as rehearsal, async_copies():
        torch.ones(2).to(CUDA)
        assert not rehearsal.records.waits
        torch.ones(3).to(CUDA)
        assert rehearsal.records.waits.total() == 1


def test_the_values_of_the_host_stay_there() -> None:
    with rehearse() as rehearsal, async_copies():
        here = torch.ones(3).to(torch.float64) + torch.tensor([1.0, 2.0, 3.0])
        assert type(here) is torch.Tensor and not here.is_pinned()
        assert torch.ones(2, device=CUDA).to("cpu").sum() == 2
        assert rehearsal.records.copies.total() == 1


def test_without_an_accelerator_nothing_is_intercepted() -> None:
    assert not isinstance(async_copies(), module.AsyncCopies)
    with rehearse():
        assert isinstance(async_copies(), module.AsyncCopies)
