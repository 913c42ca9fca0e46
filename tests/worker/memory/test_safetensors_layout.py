# SPDX-License-Identifier: Apache-2.0
"""Headers of safetensors files as the library reads them, from a copy that has none of the tensors."""

import json
import resource
from typing import Any

import pytest

from diffusion_worker.memory.safetensors_layout import Layout, TensorEntry, read_layout


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def read(header: dict[str, Any], data_bytes: int) -> Layout:
    text = json.dumps(header).encode()
    return read_layout(len(text).to_bytes(8, "little") + text, 8 + len(text) + data_bytes)


def test_tensors_come_in_the_order_of_their_bytes() -> None:
    header = {"b": entry([1, 2], 4, 12), "__metadata__": {"format": "pt"}, "c": entry([0], 12, 12, "BF16"), "a": entry([], 0, 4)}
    metadata, tensors = read(header, 12)
    assert metadata == {"format": "pt"}
    assert list(tensors.items()) == [("a", TensorEntry("F32", ())), ("b", TensorEntry("F32", (1, 2))), ("c", TensorEntry("BF16", (0,)))]


def test_the_header_of_a_large_file_takes_no_memory_for_its_tensors() -> None:
    size = 1 << 42
    read({}, 0)  # the first call imports numpy
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert read({"a": entry([size], 0, size, "U8")}, size).tensors["a"].shape == (size,)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (entry([2], 8, 15), "invalid shape, data type, or offset for tensor"),
        (entry([2], 8, 16, "F33"), "unknown variant `F33`"),
        (entry([2], 16, 8), "invalid"),
        ({"dtype": "F32"}, "missing field"),
        ([], "invalid"),
        (None, "invalid type: null"),
    ],
)
def test_a_tensor_that_is_wrong_by_itself_is_named(wrong: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^b: .*{reason}"):
        read({"__metadata__": {"a": "x"}, "a": entry([2], 0, 8), "b": wrong}, 16)


def test_a_header_that_is_wrong_as_a_whole_is_refused_with_the_reason_only() -> None:
    with pytest.raises(ValueError, match=r"^invalid offset for tensor `b`$"):
        read({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, 12)


def test_a_file_that_does_not_end_with_its_last_tensor_is_refused_with_the_place_of_that_end() -> None:
    header = {"a": entry([2], 0, 8), "b": entry([3], 8, 20)}
    end = 8 + len(json.dumps(header)) + 20
    for size in (9, 19, 21):
        with pytest.raises(ValueError, match=rf"^its last tensor, b, ends at byte {end}$"):
            read(header, size)
