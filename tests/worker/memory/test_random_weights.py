# SPDX-License-Identifier: Apache-2.0
"""Random weights that are made in place: the same whatever the pieces, cut like files' tensors, and made again by a wake.

Tests marked `gpu` run on the CPU here, and `make gpu` runs them on its device.
"""

from pathlib import Path

import pytest
import torch

from diffusion_worker.memory import random_weights
from diffusion_worker.memory.placeholders import Placeholders
from diffusion_worker.memory.random_weights import random_tensor
from diffusion_worker.memory.weights import ModelWeights
from diffusion_worker.messages import SleepLevel
from support.gpu.device import DEVICE

HOST = torch.device("cpu")


def made(like: torch.Tensor, device: torch.device = HOST, *, name: str = "block.weight", spread: float = 0.5) -> torch.Tensor:
    view = torch.empty_like(like, device=device)
    random_tensor(name, like, mean=1.0, spread=spread).fill(view)
    return view


def test_the_numbers_fill_their_range_evenly_and_neighbours_have_nothing_in_common() -> None:
    numbers = (made(torch.empty(300, 1000)).flatten() - 1.0) / 0.5
    counts = torch.histc(numbers, bins=20, min=-1.0, max=1.0)
    assert counts.sum() == numbers.numel()
    assert counts.min() > 0.97 * numbers.numel() / 20
    for step in (1, 2, 1000):
        pairs = torch.stack([numbers[:-step], numbers[step:]])
        assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.01


def test_another_name_makes_other_numbers_and_the_same_name_the_same() -> None:
    like = torch.empty(64, 3)
    assert torch.equal(made(like), made(like))
    assert not torch.equal(made(like), made(like, name="block.bias"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_numbers_are_the_same_on_every_device_and_whatever_the_pieces(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    like = torch.empty(70, 130, dtype=dtype)
    whole = made(like)
    monkeypatch.setattr(random_weights, "CHUNK_NUMBERS", 999)
    assert torch.equal(made(like, DEVICE).cpu(), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("level", SleepLevel)
def test_a_part_of_random_weights_is_placed_and_comes_back_after_a_sleep(level: SleepLevel, tmp_path: Path) -> None:
    unread = Placeholders()
    module = torch.nn.Linear(8, 6, bias=False).requires_grad_(False)
    contents = random_tensor("weight", module.weight, mean=0.0, spread=1.0)
    module.weight = torch.nn.Parameter(unread.make(contents, torch.float32), requires_grad=False)
    weights = ModelWeights(DEVICE)
    weights.place(module, tmp_path, cut=lambda name, whole: whole[2:5], unread=unread)
    expected = made(torch.empty(6, 8), name="weight", spread=1.0)[2:5] - 1.0
    assert torch.allclose(module.weight.cpu(), expected, atol=1e-6)
    before = module.weight.cpu().clone()
    weights.release(level)
    weights.restore()
    assert torch.equal(module.weight.cpu(), before)


@pytest.mark.gpu
def test_a_model_that_starts_asleep_wakes_with_the_weights_of_one_that_started_awake(tmp_path: Path) -> None:
    found = []
    for asleep in (False, True):
        unread = Placeholders(wanted_soon=not asleep)
        module = torch.nn.Linear(8, 6, bias=False).requires_grad_(False)
        contents = random_tensor("weight", module.weight, mean=0.0, spread=1.0)
        module.weight = torch.nn.Parameter(unread.make(contents, torch.float32), requires_grad=False)
        weights = ModelWeights(DEVICE, asleep=asleep)
        weights.place(module, tmp_path, unread=unread)
        weights.restore()
        found.append(module.weight.cpu().clone())
    assert torch.equal(*found)
