# SPDX-License-Identifier: Apache-2.0
"""Weights files are checked before they are read, in parallel. A fault is an error that names the file and the tensor."""

import json
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from diffusion_worker.errors import ConfigError
from diffusion_worker.memory import filling
from diffusion_worker.memory.checkpoint import read_checkpoint
from diffusion_worker.memory.filling import Fill, fill_tensors, read_tensor
from diffusion_worker.memory.weight_files import WeightFile

STEM = "model"
WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4, dtype=torch.int64), "c": torch.full((), 7.0)}


def one_file(folder: Path, **tensors: torch.Tensor) -> Path:
    path = folder / f"{STEM}.safetensors"
    save_file(dict(tensors) or WEIGHTS, path)
    return path


def sharded(folder: Path, change: Callable[[dict[str, Any]], None] = lambda index: None) -> Path:
    """Write tensors a and b to one file and c to another; return the path of the index, which `change` may spoil."""
    names = [f"{STEM}-0000{number}-of-00002.safetensors" for number in (1, 2)]
    save_file({name: WEIGHTS[name] for name in "ab"}, folder / names[0])
    save_file({"c": WEIGHTS["c"]}, folder / names[1])
    index = {"metadata": {"total_size": 60}, "weight_map": {"a": names[0], "b": names[0], "c": names[1]}}
    change(index)
    path = folder / f"{STEM}.safetensors.index.json"
    path.write_text(json.dumps(index))
    return path


def with_header(path: Path, header: object, data: bytes = b"\0" * 24) -> None:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def entry(dtype: str = "F32", shape: tuple[int, ...] = (2, 3), offsets: tuple[int, ...] = (0, 24)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


LIES: dict[str, tuple[object, str]] = {
    "offsets beyond the file": (
        {"a": entry(shape=(600, 3), offsets=(0, 7200))},
        "expected a complete safetensors file, found 101 bytes: its last tensor, a, ends at byte 7277",
    ),
    "fewer bytes than the shape": ({"a": entry(offsets=(0, 20))}, ".* a: invalid shape, data type, or offset"),
    "a negative shape": ({"a": entry(shape=(-2, -3))}, ".* a: invalid JSON in header: invalid value: integer `-2`"),
    "a begin before the data": ({"a": entry(offsets=(-8, 16))}, ".* invalid value: integer `-8`"),
    "two tensors in one place": ({"a": entry(), "b": entry(shape=(0,), offsets=(8, 8))}, ".* invalid offset for tensor `b`"),
    "bytes of no tensor": (
        {"a": entry(shape=(2, 2), offsets=(0, 16))},
        "expected a complete safetensors file, found 97 bytes: its last tensor, a, ends at byte 89",
    ),
    "an unknown dtype": ({"a": entry(dtype="F7")}, ".* a: invalid JSON in header: unknown variant `F7`"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2, 3]}}, ".* a: invalid JSON in header: missing field `data_offsets`"),
    "a list": ([1, 2], ".* invalid type: sequence"),
    "no JSON": (b"{not json", ".* key must be a string"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused_with_the_file_and_the_tensor(tmp_path: Path, lie: str) -> None:
    header, says = LIES[lie]
    with_header(tmp_path / "lies.safetensors", header)
    with pytest.raises(ConfigError, match=f"lies.safetensors: {says}"):
        WeightFile(tmp_path / "lies.safetensors")


LFS_POINTER = "version https://git-lfs.example/spec/v1\noid sha256:0\n"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "zero bytes": (lambda path: path.write_bytes(b""), "expected a safetensors file, found 0 bytes"),
    "half written": (
        lambda path: os.truncate(path, path.stat().st_size - 10),
        "expected a complete .*: its last tensor, .*, ends at byte 236",
    ),
    "cut in the header": (lambda path: os.truncate(path, 40), "expected a safetensors file, found a header of .* in a file of 40"),
    "a pickle": (lambda path: torch.save(WEIGHTS, path), "expected a safetensors file, found a header of"),
    "a pointer of git lfs": (lambda path: path.write_text(LFS_POINTER), "expected a safetensors file, found a header"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "expected a safetensors file|cannot be read"),
    "a link to nothing": (lambda path: (path.unlink(), path.symlink_to(path.parent / "gone")), "cannot be read: No such file"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_file_that_is_no_whole_safetensors_file_is_refused(tmp_path: Path, fault: str) -> None:
    path = one_file(tmp_path)
    breaks, says = BROKEN[fault]
    breaks(path)
    with pytest.raises(ConfigError, match=f"{path.name}: ({says})"):
        WeightFile(path)


def test_a_file_that_must_not_be_read_is_refused_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = one_file(tmp_path)

    def forbidden(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", forbidden)  # tests may run as root, for whom a file's mode forbids nothing
    with pytest.raises(ConfigError, match=f"{path.name}: cannot be read: Permission denied"):
        WeightFile(path)


def rename(index: dict[str, Any], tensor: str, file: str) -> None:
    index["weight_map"][tensor] = file


INDICES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a missing shard": (lambda index: rename(index, "c", "gone.safetensors"), "the file gone.safetensors is missing, and with it tensor c"),
    "a tensor in another file": (
        lambda index: rename(index, "b", index["weight_map"]["c"]),
        "expected tensor b in model-00002-of-00002.safetensors, found b in model-00001",
    ),
    "a tensor in no file": (
        lambda index: rename(index, "d", index["weight_map"]["c"]),
        "this index lists tensor d, which none of its files has",
    ),
    "a tensor that it does not name": (lambda index: index["weight_map"].pop("b"), "does not list tensor b, which its files hold"),
    "a file elsewhere": (
        lambda index: rename(index, "c", "../model.safetensors"),
        "expected names of files in its own folder, found '../model",
    ),
    "no map": (lambda index: index.pop("weight_map"), "cannot be read as an index of weights files: .*weight_map"),
    "a list for a name": (lambda index: index["weight_map"].update(c=["x"]), "cannot be read as an index of weights files: .*weight_map"),
}


@pytest.mark.parametrize("lie", INDICES)
def test_an_index_that_lies_is_refused_with_the_file_and_the_tensor(tmp_path: Path, lie: str) -> None:
    change, says = INDICES[lie]
    path = sharded(tmp_path, lambda index: (change(index), None)[1])
    with pytest.raises(ConfigError, match=f"{path.name}: {says}"):
        read_checkpoint(tmp_path, STEM, index_first=True)


def test_a_tensor_that_two_files_have_is_refused(tmp_path: Path) -> None:
    path = sharded(tmp_path)
    save_file({"c": WEIGHTS["c"], "a": WEIGHTS["a"]}, tmp_path / f"{STEM}-00002-of-00002.safetensors")
    with pytest.raises(ConfigError, match=f"{path.name}: both .*-00001-of-00002.* and .*-00002-of-00002.* have tensor a"):
        read_checkpoint(tmp_path, STEM, index_first=True)


def test_a_wrong_total_of_an_index_is_said_and_does_no_harm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sharded(tmp_path, lambda index: index["metadata"].update(total_size=1))
    assert read_checkpoint(tmp_path, STEM, index_first=True).tensors.keys() == WEIGHTS.keys()
    assert "total_size says 1 bytes, and its files have 60; they are used" in caplog.text


@pytest.mark.parametrize("layout", ["one file", "shards"])
def test_tensors_of_one_file_and_of_shards_are_read_as_they_were_saved(tmp_path: Path, layout: str) -> None:
    one_file(tmp_path) if layout == "one file" else sharded(tmp_path)
    found = read_checkpoint(tmp_path, STEM, index_first=True)
    assert (found.variant, found.sharded) == (None, layout == "shards")
    for name, expected in WEIGHTS.items():
        tensor = read_tensor(found.tensors[name])
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected)


@pytest.mark.parametrize("index_first", [True, False])
def test_of_a_single_file_and_an_index_the_one_wins_that_the_library_takes(tmp_path: Path, index_first: bool) -> None:
    sharded(tmp_path)
    one_file(tmp_path)
    assert read_checkpoint(tmp_path, STEM, index_first=index_first).sharded is index_first


def test_the_only_variant_is_taken_where_there_is_no_plain_file(tmp_path: Path) -> None:
    one_file(tmp_path).rename(tmp_path / f"{STEM}.fp16.safetensors")
    assert read_checkpoint(tmp_path, STEM, index_first=True).variant == "fp16"
    save_file(WEIGHTS, tmp_path / f"{STEM}.ema.safetensors")
    with pytest.raises(ConfigError, match=r"files of a single variant \(no option selects one\), found the variants ema, fp16"):
        read_checkpoint(tmp_path, STEM, index_first=True)
    one_file(tmp_path)
    assert read_checkpoint(tmp_path, STEM, index_first=True).variant is None


@pytest.mark.parametrize(
    ("pickled", "found"), [(True, "only pytorch_model.bin, and pickled weights are never loaded"), (False, "none there")]
)
def test_a_folder_without_safetensors_says_what_it_has(tmp_path: Path, pickled: bool, found: str) -> None:
    if pickled:
        torch.save(WEIGHTS, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=f"expected weights in {STEM}.safetensors or in shards with an index, found {found}"):
        read_checkpoint(tmp_path, STEM, index_first=True)


def many(folder: Path) -> tuple[WeightFile, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"t{number:03}": torch.randn(number % 7, number % 40, generator=generator) for number in range(120)}
    tensors |= {"large": torch.randn(70_000, generator=generator), "flags": torch.tensor([True, False, True])}
    return WeightFile(one_file(folder, **tensors)), tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_many_tensors_are_filled_in_pieces_by_several_threads_in_any_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(filling, "PIECE_BYTES", 4096)
    run, first = filling._run, iter(range(2))
    together = threading.Barrier(2)

    def meeting(job: Any) -> int:
        if next(first, None) is not None:
            together.wait(timeout=30)  # waits for another thread, so a single thread would never go on
        return run(job)

    monkeypatch.setattr(filling, "_run", meeting)
    file, tensors = many(tmp_path)
    views = {name: torch.empty(tensor.shape, dtype=tensor.dtype if name == "flags" else dtype) for name, tensor in tensors.items()}
    reported: list[int] = []
    fill_tensors([Fill(view, file.tensors[name]) for name, view in views.items()], reported.append)
    for name, view in views.items():
        assert torch.equal(view, tensors[name].to(view.dtype)), name
    assert sum(reported) == sum(view.nbytes for view in views.values())
    assert len(reported) > 50


def test_a_part_of_a_tensor_is_filled_from_the_whole_in_the_file(tmp_path: Path) -> None:
    file, tensors = many(tmp_path)
    view = torch.empty(35_000)
    fill_tensors([Fill(view, file.tensors["large"], cut=lambda whole: whole.chunk(2)[1])])
    assert torch.equal(view, tensors["large"].chunk(2)[1])


def test_a_file_that_is_written_to_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    file, _ = many(tmp_path)
    view = torch.empty(70_000)

    def write(count: int) -> None:
        os.utime(file.path, ns=(1, 1))

    with pytest.raises(ConfigError, match=r"model\.safetensors: was written to since it was opened"):
        fill_tensors([Fill(view, file.tensors["large"])], write)


def test_a_file_that_is_cut_short_after_it_was_opened_is_an_error_and_no_crash(tmp_path: Path) -> None:
    file, _ = many(tmp_path)
    os.truncate(file.path, 100)
    with pytest.raises(ConfigError, match=r"model\.safetensors: expected \d+ more bytes at \d+, found the file's end"):
        read_tensor(file.tensors["large"])


def test_a_file_that_is_replaced_after_it_was_opened_changes_nothing(tmp_path: Path) -> None:
    file, tensors = many(tmp_path)
    file.path.unlink()
    one_file(tmp_path, large=torch.zeros(70_000))
    assert torch.equal(read_tensor(file.tensors["large"]), tensors["large"])
