# SPDX-License-Identifier: Apache-2.0
"""The slot bank and adapters in host memory: no byte too many, no copy too many, nothing left behind, nothing moved."""

import weakref

import pytest
import torch
from torch import nn

from diffusion_worker.lora.slot_bank import ColumnRun, Scaling, Segment, Widths
from support.lora.adapters import checkpoint_of, factors_of, layers_of, load, random_factors

CPU = torch.device("cpu")
WIDTHS = [Widths(16, 8), Widths(24, 40), Widths(6, 3)]


def segment_of(dtype: torch.dtype = torch.float32) -> Segment:
    return Segment(WIDTHS, slots=3, max_rank=4, dtype=dtype, device=CPU)


def run_of(segment: Segment, start: int, values: torch.Tensor, *scalings: Scaling) -> ColumnRun:
    return ColumnRun(segment, start, values, scalings)


def net() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))


NAMES = [str(number) for number in range(5)]


# --- the bank ---------------------------------------------------------------------------------------------------------------


def test_all_a_come_before_all_b_and_parts_begin_aligned() -> None:
    columns = segment_of().columns
    assert [(each.a.start, each.a.stop) for each in columns] == [(0, 16), (16, 40), (40, 46)]
    assert [(each.b.start, each.b.stop) for each in columns] == [(48, 56), (56, 96), (96, 99)]


def test_a_slot_holds_what_was_written_last_and_zeros() -> None:
    segment = segment_of()
    before = segment.rows.data_ptr()
    segment.write(1, [run_of(segment, 0, torch.ones(4, 104))])
    segment.write(1, [run_of(segment, 0, torch.full((2, 40), 2.0)), run_of(segment, 56, torch.full((3, 40), 3.0))])
    expected = torch.zeros(4, 104)
    expected[:2, :40], expected[:3, 56:96] = 2.0, 3.0
    assert torch.equal(segment.of_slot(1), expected)
    segment.write(1, [run_of(segment, 0, torch.full((1, 40), 4.0))])
    expected = torch.zeros(4, 104)
    expected[:1, :40] = 4.0
    assert torch.equal(segment.of_slot(1), expected)
    assert not segment.of_slot(0).any() and not segment.of_slot(2).any()
    assert segment.rows.data_ptr() == before


@pytest.mark.parametrize("bank", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("file", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_scaling_is_rounded_once_to_the_banks_precision(bank: torch.dtype, file: torch.dtype) -> None:
    segment = segment_of(bank)
    values = torch.randn(4, 40, generator=torch.Generator().manual_seed(1)).to(file)
    run = run_of(segment, 8, values, Scaling(10, 30, 1 / 3))
    for slot in (1, 0):
        segment.write(slot, [run])
    expected = values.double()
    # The factor itself is a float32, as peft multiplies with it.
    expected[:, 10:30] *= torch.tensor(1 / 3).double()
    exact = expected.float() if bank is torch.float32 else expected.float().to(bank)
    assert torch.equal(segment.of_slot(0)[:, 8:48], exact)


def test_memory_of_a_slot_that_was_never_written_is_never_touched() -> None:
    segment = Segment([Widths(1 << 19, 1 << 19)], slots=8, max_rank=16, dtype=torch.float32, device=CPU)  # 512 MiB
    segment.write(5, [run_of(segment, 0, torch.ones(1, 1 << 20))])
    from diffusion_worker.memory.slabs import resident_bytes

    assert resident_bytes([segment._slab]) <= 32 << 20


# --- adapters on the host -----------------------------------------------------------------------------------------------------


def test_an_adapter_that_names_all_layers_is_a_run_of_its_a_and_one_of_its_b_and_of_any_kind_as_large_as_its_factors() -> None:
    model = net()
    layers = layers_of(model)
    whole = layers.pack(checkpoint_of(random_factors(model, NAMES, rank=3)), name="whole")
    assert [run.values.shape for run in whole.runs] == [(3, 80), (3, 80)]
    for names, runs in ((["1", "2"], 2), (["0", "2", "4"], 6)):
        factors = {name: factors_of(model.get_submodule(name), rank=int(name) + 1, dtype=torch.bfloat16) for name in names[:1]}
        factors |= random_factors(model, names[1:], rank=int(names[0]) + 1)
        some = layers.pack(checkpoint_of(factors), name="some")
        assert some.nbytes == sum(each.a.nbytes + each.b.nbytes for each in factors.values())
        assert len(some.runs) == (4 if runs == 2 else 6), "another precision is another run"


def test_layers_of_one_kind_lie_side_by_side_so_that_an_adapter_of_some_kinds_is_few_runs() -> None:
    blocks = nn.Sequential(*(nn.ModuleDict({kind: nn.Linear(8, 8) for kind in ("q", "k", "mlp")}) for _ in range(12)))
    layers = layers_of(blocks, target_modules=["all"])
    names = [f"{block}.{kind}" for block in range(12) for kind in ("q", "mlp")]
    adapter = layers.pack(checkpoint_of(random_factors(blocks, names)), name="some kinds")
    # The layers lie in the order k, mlp, q; the runs are those of their A and their B.
    assert [run.values.shape[1] for run in adapter.runs] == [24 * 8] * 2


def test_nothing_of_the_checkpoint_is_kept() -> None:
    model = net()
    layers = layers_of(model)
    checkpoint = checkpoint_of(random_factors(model, NAMES))
    tensors = [weakref.ref(tensor) for each in checkpoint.modules.values() for tensor in (each.a, each.b)]
    adapter = layers.pack(checkpoint, name="mine")
    del checkpoint
    assert adapter.runs and not any(tensor() is not None for tensor in tensors)


def test_what_a_smaller_adapter_leaves_out_is_zero_in_every_segment() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16, dtype=torch.bfloat16))
    layers = layers_of(model, target_modules=["all"])
    load(layers, 1, {name: factors_of(model.get_submodule(name), rank=4) for name in ("0", "1")})
    assert all(segment.of_slot(1).any() for segment in layers._segments) and len(layers._segments) == 2
    load(layers, 1, random_factors(model, ["0"], rank=2))
    assert [bool(segment.of_slot(1).any()) for segment in layers._segments] == [True, False]


def test_loading_and_clearing_never_moves_a_layers_memory() -> None:
    model = net()
    layers = layers_of(model)
    load(layers, 0, random_factors(model, NAMES))
    before = [(part.a.data_ptr(), part.b.data_ptr()) for layer in model for part in layer.parts]  # type: ignore[union-attr]
    for slot in (0, 1, 2):
        load(layers, slot, random_factors(model, NAMES[slot:], rank=16, seed=slot))
    layers.clear(1)
    layers.make_static([model])
    assert [(part.a.data_ptr(), part.b.data_ptr()) for layer in model for part in layer.parts] == before  # type: ignore[union-attr]
    assert layers.nbytes == 4 * 16 * 160 * 4
