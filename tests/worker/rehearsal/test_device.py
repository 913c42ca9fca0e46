# SPDX-License-Identifier: Apache-2.0
"""The rehearsal's device refuses what CUDA refuses, keeps the identity of tensors, and leaves nothing behind."""

import copy

import numpy as np
import pytest
import torch
from torch.utils import _device

from support.rehearsal.fake_cuda import rehearse
from support.rehearsal.fake_tensor import CUDA, FakeCudaTensor

IN_MODES = pytest.mark.parametrize("inference", [False, True], ids=["plain", "inference"])


@IN_MODES
def test_tensors_of_two_devices_never_meet(inference: bool) -> None:
    with torch.inference_mode(inference), rehearse():
        there, here = torch.ones(3, device=CUDA), torch.ones(3)
        for meet in (
            lambda: there + here,
            lambda: torch.cat([there, here]),
            lambda: torch.stack([there[0], here[0]]),
            lambda: torch.nn.functional.linear(there, torch.ones(2, 3)),
            lambda: torch.where(there > 0, there, here),
            lambda: there.index_select(0, torch.tensor([0])),
            lambda: torch.nn.functional.embedding(torch.tensor([0]), torch.ones(2, 3, device=CUDA)),
            lambda: there.add_(here),
        ):
            with pytest.raises(RuntimeError, match="same device"):
                meet()
        with pytest.raises(RuntimeError, match="same device"):
            there[torch.tensor([0, 1])] = here[:2]
        with pytest.raises(RuntimeError, match="indices should be"):
            here[torch.tensor([0], device=CUDA)]


@IN_MODES
def test_numbers_are_drawn_by_a_generator_of_the_device_alone(inference: bool) -> None:
    with torch.inference_mode(inference), rehearse(), pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
        torch.randn(3, generator=torch.Generator().manual_seed(1), device=CUDA)


def test_an_array_is_made_on_the_host_only() -> None:
    with rehearse():
        there = torch.ones(3, device=CUDA)
        with pytest.raises(TypeError, match="can't convert cuda:0"):
            there.numpy()
        with pytest.raises(TypeError, match="can't convert cuda:0"):
            np.asarray(there)


@IN_MODES
def test_a_tensor_says_that_it_is_on_the_device(inference: bool) -> None:
    with torch.inference_mode(inference), rehearse():
        there = torch.ones(2, 3, device="cuda")
        for found in (
            there,
            there[0],
            there.t(),
            there.to(torch.bfloat16),
            torch.zeros_like(there),
            copy.deepcopy(there),
            there.new_zeros(2),
        ):
            assert isinstance(found, FakeCudaTensor) and found.is_cuda and found.device == CUDA and found.get_device() == 0
        assert there.to("cuda") is there and there.to(CUDA, torch.float32) is there and there.cuda() is there
        assert there.to(torch.float32, copy=True) is not there
        assert not there.cpu().is_cuda and type(there.cpu()) is torch.Tensor


@IN_MODES
def test_changes_in_place_reach_all_views(inference: bool) -> None:
    with torch.inference_mode(inference), rehearse():
        there = torch.zeros(2, 3, device=CUDA)
        there[0] = 1.0
        there[1].add_(2)
        there[:, 2].copy_(torch.full((2,), 5.0, device=CUDA))
        assert there.cpu().tolist() == [[1, 1, 5], [2, 2, 5]]


def test_a_module_moves_to_the_device_and_to_another_precision() -> None:
    with rehearse():
        module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).eval().requires_grad_(False)
        truth = module(torch.ones(1, 3))
        module.to("cuda")
        assert all(isinstance(tensor, FakeCudaTensor) for tensor in module.state_dict().values())
        torch.testing.assert_close(module(torch.ones(1, 3, device=CUDA)).cpu(), truth)
        module.to(torch.float64)
        assert module(torch.ones(1, 3, device=CUDA, dtype=torch.float64)).cpu().dtype is torch.float64
        copied = copy.deepcopy(module)
        copied[0].weight.zero_()
        assert module[0].weight.any().item()


def test_a_shape_that_changes_in_place_is_refused() -> None:
    with rehearse(), pytest.raises(NotImplementedError, match="cannot change its shape"):
        torch.ones(2, 3, device=CUDA).squeeze_().resize_(6)


def test_an_operation_fails_where_the_test_says_so() -> None:
    with rehearse() as rehearsal:
        there = torch.ones(2, 3, device=CUDA)

        def before(name: str) -> None:
            if name == "aten::mm":
                raise torch.OutOfMemoryError("CUDA out of memory. (planted)")

        rehearsal.before = before
        assert (there + 1).sum().item() == 12
        with pytest.raises(torch.OutOfMemoryError, match="planted"):
            there @ there.t()


def test_nothing_stays_behind() -> None:
    before = torch.tensor, torch.as_tensor, torch.Tensor.to, torch.cuda.Stream, torch.cuda.is_available()
    with pytest.raises(ValueError, match="ends early"), rehearse():
        there = torch.ones(3, device=CUDA)
        raise ValueError("ends early")
    assert (torch.tensor, torch.as_tensor, torch.Tensor.to, torch.cuda.Stream, torch.cuda.is_available()) == before
    with pytest.raises(RuntimeError, match="outside of a rehearsal"):
        there + 1


def test_a_device_as_context_holds_after_a_rehearsal_that_used_the_first_one() -> None:
    _device._device_constructors.cache_clear()
    with rehearse(), torch.device("meta"):
        assert torch.tensor([1]).is_meta
    with torch.device("meta"):
        assert torch.tensor([1]).is_meta
        assert torch.empty(1).is_meta


def test_weights_made_outside_of_inference_mode_are_viewed_inside() -> None:
    with rehearse():
        weight = torch.ones(2, 3, device=CUDA)
        with torch.inference_mode():
            viewed = weight.view(3, 2).t()[0]
            viewed.mul_(3)
        assert weight.sum().item() == 12
