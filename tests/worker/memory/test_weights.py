# SPDX-License-Identifier: Apache-2.0
"""Weights in slabs: memory goes back to the system, and comes back with the same contents."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from diffusion_worker.errors import ConfigError, RequestError
from diffusion_worker.memory.checkpoint import stored_in
from diffusion_worker.memory.placeholders import Placeholders
from diffusion_worker.memory.slabs import HUGE_PAGE, HostSlab, resident_bytes
from diffusion_worker.memory.weights import ModelWeights, read_in_place

CPU = torch.device("cpu")


class Part(nn.Module):
    """A module whose buffers and parameters differ in storage.

    Two layers share a weight; the buffer `table` is saved in files, and `computed` is not.
    """

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.randn(17, 3))
        self.register_buffer("computed", torch.arange(5), persistent=False)


@pytest.fixture
def module() -> Part:
    torch.manual_seed(0)
    return Part().requires_grad_(False)


def contents(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in [*module.named_parameters(), *module.named_buffers()]}


def save(module: nn.Module, folder: Path, dtype: torch.dtype | None = None) -> None:
    state = {name: tensor.to(dtype) if dtype else tensor for name, tensor in module.state_dict().items() if name != "second.weight"}
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")


def assert_same(module: nn.Module, before: dict[str, torch.Tensor]) -> None:
    for name, tensor in contents(module).items():
        assert torch.equal(tensor, before[name]), name


def test_sleep_gives_the_memory_back_and_wake_brings_the_same_contents(module: Part, tmp_path: Path) -> None:
    save(module, tmp_path)
    before = contents(module)
    weights = ModelWeights(CPU)
    weights.place(module, tmp_path)
    awake = weights.report()
    assert awake.weights_resident_bytes >= awake.weights_bytes > 4_000_000
    weights.release()
    assert weights.report().weights_resident_bytes <= awake.weights_bytes * 0.02
    weights.restore()
    assert_same(module, before)
    assert module.second.weight is module.first.weight


def test_what_a_file_holds_is_not_kept_in_memory(module: Part, tmp_path: Path) -> None:
    save(module, tmp_path)
    weights = ModelWeights(CPU)
    weights.place(module, tmp_path)
    report = weights.report()
    assert report.mirror_memory_bytes == module.computed.nbytes
    assert report.mirror_file_bytes == report.weights_bytes - module.computed.nbytes


def test_a_file_of_another_dtype_is_converted_on_wake(module: Part, tmp_path: Path) -> None:
    module.to(torch.float16).to(torch.float32)
    save(module, tmp_path, torch.float16)
    before = contents(module)
    weights = ModelWeights(CPU)
    weights.place(module, tmp_path)
    assert weights.report().mirror_memory_bytes == module.computed.nbytes
    weights.release()
    weights.restore()
    assert_same(module, before)


@pytest.mark.parametrize("change", ["no file", "other values", "other names"])
def test_without_a_file_that_holds_the_weights_they_are_kept_in_memory(module: Part, tmp_path: Path, change: str) -> None:
    if change == "other values":
        save(Part().requires_grad_(False), tmp_path)
    elif change == "other names":
        save_file({f"model.{name}": tensor for name, tensor in {"first.bias": module.first.bias}.items()}, tmp_path / "a.safetensors")
    before = contents(module)
    weights = ModelWeights(CPU)
    weights.place(module, tmp_path)
    assert weights.report().mirror_file_bytes == 0
    weights.release()
    weights.restore()
    assert_same(module, before)


def test_a_file_that_is_replaced_while_the_model_sleeps_changes_nothing(module: Part, tmp_path: Path) -> None:
    save(module, tmp_path)
    before = contents(module)
    weights = ModelWeights(CPU)
    weights.place(module, tmp_path)
    weights.release()
    (tmp_path / "model.safetensors").unlink()
    save(Part().requires_grad_(False), tmp_path)
    weights.restore()
    assert_same(module, before)


def test_slabs_that_lie_side_by_side_are_counted_apart() -> None:
    slabs = [HostSlab(HUGE_PAGE) for _ in range(16)]
    for slab in slabs:
        slab.bytes.fill_(1)
    for slab in slabs[::2]:
        slab.release()
    assert [resident_bytes([slab]) for slab in slabs] == [0, HUGE_PAGE] * 8


def test_a_module_without_tensors_needs_no_slab(tmp_path: Path) -> None:
    weights = ModelWeights(CPU)
    assert weights.place(nn.Identity(), tmp_path) == 0
    report: Any = weights.report()
    assert (report.weights_bytes, report.mappings) == (0, [])


def test_a_part_of_each_tensor_is_placed_and_comes_back_from_the_file_of_the_whole(module: Part, tmp_path: Path) -> None:
    save(module, tmp_path)
    before = {name: tensor.chunk(2)[1] if name == "first.weight" else tensor for name, tensor in contents(module).items()}
    weights = ModelWeights(CPU)
    placed = weights.place(module, tmp_path, cut=lambda name, whole: whole.chunk(2)[1] if name == "first.weight" else whole)
    assert placed < 0.6 * 1024 * 1024 * 4
    report = weights.report()
    assert report.mirror_file_bytes == report.weights_bytes - module.computed.nbytes
    weights.release()
    weights.restore()
    assert_same(module, before)


def test_weights_that_are_left_elsewhere_are_counted_and_refuse_sleep(module: Part) -> None:
    weights = ModelWeights(CPU)
    assert weights.leave([module.first.weight]) == 1024 * 1024 * 4
    report = weights.report()
    assert report.weights_bytes == report.weights_resident_bytes == 1024 * 1024 * 4
    with pytest.raises(RequestError, match="sleep: not supported with --shard"):
        weights.release()


def unread_part(module: Part, folder: Path, unread: Placeholders) -> Part:
    """Save a module to a folder; return a copy of it with placeholders in place of every tensor that the file has."""
    save(module, folder)
    stored = stored_in(folder)
    empty = Part().requires_grad_(False)
    empty.load_state_dict(module.state_dict())
    for name, tensor in empty.named_parameters():
        tensor.data = unread.make(stored[name], tensor.dtype)
    empty.table = unread.make(stored["table"], torch.float32)
    return empty


def test_a_part_of_each_tensor_is_read_straight_to_its_place(module: Part, tmp_path: Path) -> None:
    before = {name: tensor.chunk(2)[1] if name == "first.weight" else tensor for name, tensor in contents(module).items()}
    unread, weights, told = Placeholders(), ModelWeights(CPU), [0]
    empty = unread_part(module, tmp_path, unread)
    placed = weights.place(
        empty, tmp_path, cut=lambda name, whole: whole.chunk(2)[1] if name == "first.weight" else whole, unread=unread, report=told.append
    )
    assert placed < 0.6 * 1024 * 1024 * 4
    assert sum(told) == sum(tensor.nbytes for tensor in contents(empty).values())
    weights.release()
    weights.restore()
    assert_same(empty, before)
    assert empty.second.weight is empty.first.weight


def test_weights_that_two_modules_share_are_in_one_slab(module: Part, tmp_path: Path) -> None:
    before = contents(module)
    unread, weights = Placeholders(), ModelWeights(CPU)
    empty = unread_part(module, tmp_path, unread)
    sharing = nn.ModuleDict({"inner": empty, "own": nn.Linear(4, 4)}).requires_grad_(False)
    weights.place(sharing, tmp_path / "none", unread=unread)  # the module that borrows weights comes first
    assert weights.place(empty, tmp_path, unread=unread) == 0
    assert len(weights.report().mappings) == 1
    assert_same(empty, before)


def test_weights_that_are_sharded_are_read_into_memory_of_their_own(module: Part, tmp_path: Path) -> None:
    before = contents(module)
    unread = Placeholders()
    empty = unread_part(module, tmp_path, unread)
    read_in_place(empty, unread, lambda count: None)
    assert_same(empty, before)
    assert empty.second.weight is empty.first.weight


@pytest.mark.parametrize("part", ["first", "table"])
def test_a_placeholder_that_was_copied_is_an_error_and_never_a_weight(module: Part, tmp_path: Path, part: str) -> None:
    unread = Placeholders()
    empty = unread_part(module, tmp_path, unread)
    setattr(empty, part, copy.deepcopy(getattr(empty, part)))
    with pytest.raises(ConfigError, match=rf"tensor {part}.*: the pipeline class copied it before its contents were read"):
        ModelWeights(CPU).place(empty, tmp_path, unread=unread)
