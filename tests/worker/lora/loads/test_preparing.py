# SPDX-License-Identifier: Apache-2.0
"""The process of a load turns an adapter's files into the bytes that a rank keeps, without the rank's model."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora import adapter_file
from diffusion_worker.lora.checkpoint import read_checkpoint
from diffusion_worker.lora.diffusion_manager import DiffusionLoRAManager
from diffusion_worker.lora.loads.model_table import ModelTable, PartCut
from diffusion_worker.lora.loads.process import prepare
from diffusion_worker.lora.loads.sealed_memory import SEALS, map_sealed, write_sealed
from diffusion_worker.lora.located import DIFFUSERS_WEIGHTS
from diffusion_worker.lora.pipeline_layers import AdapterLayers
from diffusion_worker.lora.request import LoadOptions
from diffusion_worker.messages import LoRAUse
from support.lora.loads import blocks, linear_part, manager_of, order_for, request, write_file


def _bank(manager: DiffusionLoRAManager) -> list[torch.Tensor]:
    """Activate adapter 1, fill the slots, and return the tensors of all slots."""
    manager.activate([LoRAUse(1, 1.0)])
    manager.fill()
    return [segment.rows for segment in manager.layers._segments]


def _rank(cut: PartCut | None, dtype: torch.dtype) -> DiffusionLoRAManager:
    """Return the manager of a rank that has the whole model, or a part of its key projections."""
    model = blocks().to(dtype)
    for name, layer in model.named_modules() if cut else ():
        if name.endswith("to_k"):
            layer.weight = nn.Parameter(cut.of(layer.weight, cut.dim).contiguous())
    return manager_of(model, part_of=lambda name: linear_part(cut) if cut and name.endswith("to_k") else None)


CUTS = [None, *(PartCut(dim, (8, 8) if dim == 0 else (8,), 2, index) for dim in (0, 1) for index in (0, 1))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("warm", [False, True])
def test_ranks_hold_the_same_by_a_load_elsewhere_as_by_one_of_their_own(warm: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    path = write_file(tmp_path / "style", blocks(), metadata={"lora_adapter_metadata": json.dumps({"transformer.r": 2})})
    first = write_file(tmp_path / "first", nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"to_q": nn.Linear(8, 8)})])}))
    ours, theirs = ([_rank(cut, dtype) for cut in CUTS] for _ in range(2))
    for manager in [*ours, *theirs] if warm else []:
        # These layers already have slots, in a segment of their own.
        manager.add_adapter(request(first, 9))
    with order_for(path, *ours) as order:
        parts = prepare(order)
        loaded = [manager.adopt(order.request, order.options, part) for manager, part in zip(ours, parts, strict=True)]
    own = [manager.add_adapter(request(path)) for manager in theirs]
    assert loaded == own
    for one, other in zip(ours, theirs, strict=True):
        assert [torch.equal(a, b) for a, b in zip(_bank(one), _bank(other), strict=True)] == [True] * (2 if warm else 1)
        assert one.identity_in("transformer", [LoRAUse(1, 1.0)]) == other.identity_in("transformer", [LoRAUse(1, 1.0)])
        assert not one.misapplied()


def test_a_table_says_of_a_model_all_that_its_own_layers_say() -> None:
    manager = manager_of(blocks(), target_modules=["to_q", "conv"])
    table = msgspec.msgpack.decode(msgspec.msgpack.encode(manager.table()), type=ModelTable)
    assert table == manager.table()
    assert (table.targets, table.max_rank, table.slots, table.components) == (["to_q", "conv"], 8, 2, {"transformer": "ModuleDict"})


@pytest.mark.parametrize(
    ("change", "options", "code", "says"),
    [
        ({"blocks": 5}, {}, ErrorCode.INVALID_ADAPTER, "transformer.blocks.3.to_q (no such layer)"),
        ({"width": 4}, {}, ErrorCode.INVALID_ADAPTER, "do not match ModuleDict"),
        ({"rank": 9}, {}, ErrorCode.RANK_TOO_LARGE, "rank 9 is over the limit of 8"),
        ({}, {"expected_rank": 3}, ErrorCode.INVALID_ADAPTER, "expected 3 as the largest rank of its modules, found 2"),
        ({}, {"components": ["text_encoder"]}, ErrorCode.NO_MATCHING_MODULES, "has no tensors for component text_encoder"),
        ({}, {"format": "kohya"}, ErrorCode.UNSUPPORTED_FORMAT, "expected tensor names in the format kohya"),
        ({"r": 4}, {}, ErrorCode.INVALID_ADAPTER, "expected rank 4 as the configuration says, found 2"),
    ],
)
def test_an_adapter_that_its_header_gives_away_is_refused_before_its_factors_are_read(
    change: dict[str, int], options: dict[str, Any], code: ErrorCode, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = {"lora_adapter_metadata": json.dumps({"transformer.r": change["r"]})} if "r" in change else None
    model = blocks(change.get("blocks", 3), change.get("width", 8))
    path = write_file(tmp_path / "style", model, rank=change.get("rank", 2), metadata=metadata)
    monkeypatch.setattr(adapter_file.os, "readv", lambda *_: pytest.fail("factors were read"))
    with order_for(path, manager_of(blocks()), **options) as order, pytest.raises(RequestError) as refused:
        prepare(order)
    assert (refused.value.code, says in refused.value.message) == (code, True), refused.value.message
    assert "'style'" in refused.value.message


def test_a_file_that_changes_between_its_header_and_its_factors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_file(tmp_path / "style", blocks()) / DIFFUSERS_WEIGHTS
    read = os.readv

    def shortened(descriptor: int, buffers: Any) -> int:
        os.truncate(path, 4096)
        return read(descriptor, buffers)

    monkeypatch.setattr(adapter_file.os, "readv", shortened)
    with order_for(path.parent, manager_of(blocks())) as order, pytest.raises(RequestError, match="became shorter"):
        prepare(order)


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        (r"blocks\.(?!1)\d+\.to_q", [0, 2]),
        (r"(?:\w+\.)+0\.to_q\Z", [0]),
        (r"(?=.*2)blocks.*q", [2]),
        # The reference is to the second group, because peft wraps the pattern in a group.
        (r"(b)locks\.2\.to_\w(?<!k)(?!\3)", [2]),
        (r"((((blocks|b+)+)\.){1,2}\d+)+\.to_q", [0, 1, 2]),
    ],
)
def test_patterns_of_real_configurations_run_as_peft_runs_them(pattern: str, fits: list[int], tmp_path: Path) -> None:
    settings = {"transformer.r": 2, "transformer.lora_alpha": 2, "transformer.alpha_pattern": {pattern: 6}}
    path = write_file(tmp_path / "style", blocks(), metadata={"lora_adapter_metadata": json.dumps(settings)})
    modules = read_checkpoint(str(path)).modules
    assert [number for number in range(3) if modules[f"transformer.blocks.{number}.to_q"].scaling == 3.0] == fits


def test_a_rank_uses_no_memory_that_could_still_change(tmp_path: Path) -> None:
    path, manager = write_file(tmp_path / "style", blocks()), manager_of(blocks())
    with order_for(path, manager) as order:
        [part] = prepare(order)
        with pytest.raises(OSError, match="not permitted"):
            os.truncate(part.path, 0)
        with pytest.raises(OSError, match="not permitted"):
            write_sealed(part.path, part.size, lambda buffer: None)
        open_memory = os.memfd_create("open", os.MFD_ALLOW_SEALING)
        os.truncate(open_memory, part.size)
        unsealed = msgspec.structs.replace(part, path=f"/proc/{os.getpid()}/fd/{open_memory}")
        with pytest.raises(RequestError, match="sealed bytes of shared memory, found"):
            manager.adopt(order.request, order.options, unsealed)
        os.close(open_memory)
        with pytest.raises(RequestError, match="cannot use the prepared weights: KeyError"):
            manager_of(blocks(1)).adopt(order.request, order.options, part)
        kept = map_sealed(part.path, part.size)
    # The memory stays for those who have mapped it.
    assert kept.numel() == part.size and bool(kept.any()) and SEALS


def test_a_slot_is_filled_in_pieces_and_holds_what_one_copy_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusion_worker.lora.slot_bank.PIECE_BYTES", 16)
    path = write_file(tmp_path / "style", blocks(), metadata={"lora_adapter_metadata": json.dumps({"transformer.r": 2})})
    model = blocks().bfloat16()
    layers = AdapterLayers({"transformer": model}, slots=2, max_rank=8, device=torch.device("cpu"))
    adapter = layers.pack(read_checkpoint(str(path), options=LoadOptions()), name="style")
    layers.write(0, adapter)
    layers.fill()
    expected = [segment.of_slot(0).clone() for segment in layers._segments]
    layers.write(1, adapter)
    pieces = 0
    while not layers.is_filled(1):
        layers.fill(at_most=1)
        pieces += 1
    assert pieces > 20
    assert all(torch.equal(segment.of_slot(1), whole) for segment, whole in zip(layers._segments, expected, strict=True))
    # A copy that is replaced halfway leaves nothing behind.
    layers.write(1, layers.dummy(1))
    layers.fill(at_most=100)
    layers.write(1, adapter)
    assert layers.holds(1, adapter)
    assert all(torch.equal(segment.of_slot(1), whole) for segment, whole in zip(layers._segments, expected, strict=True))
