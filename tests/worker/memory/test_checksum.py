# SPDX-License-Identifier: Apache-2.0
"""The checksum of tensors does not depend on their place in memory, and every change of their content changes it."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion_worker.memory.checksum import BLOCK_BYTES, checksum

BLOCKS = torch.arange(4 * BLOCK_BYTES // 8, dtype=torch.int64)


def in_one_slab(sizes: list[int], *, gap: int = 0, padding: int = 0) -> list[torch.Tensor]:
    """Return byte tensors of these sizes with random content, one behind the other in one memory.

    After each are `gap` bytes of the value `padding`.
    """
    slab = torch.full((sum(sizes) + gap * len(sizes),), padding, dtype=torch.uint8)
    starts = [sum(sizes[:number]) + gap * number for number in range(len(sizes))]
    tensors = [slab[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    for number, tensor in enumerate(tensors):
        tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(number)))
    return tensors


@given(size=st.integers(1, 3 * BLOCK_BYTES), data=st.data())
@settings(max_examples=60)
def test_any_flipped_bit_is_seen(size: int, data: st.DataObject) -> None:
    at, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7))
    [tensor] = in_one_slab([size])
    before = checksum([tensor])
    tensor[at] ^= 1 << bit
    assert checksum([tensor]) != before
    tensor[at] ^= 1 << bit
    assert checksum([tensor]) == before


def test_blocks_that_changed_places_are_seen() -> None:
    blocks = BLOCKS.clone().view(4, -1)
    before = checksum([blocks])
    blocks[[1, 2]] = blocks[[2, 1]]
    assert checksum([blocks]) != before


def test_tensors_that_changed_places_are_seen() -> None:
    one, other = in_one_slab([64, 64])
    assert checksum([one, other]) != checksum([other, one])


@pytest.mark.parametrize("change", [lambda whole: whole.view(torch.float64), lambda whole: whole.view(-1, 8)])
def test_the_same_bytes_of_another_kind_or_shape_are_others(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert checksum([change(BLOCKS)]) != checksum([BLOCKS])


def test_what_lies_between_tensors_does_not_count() -> None:
    sizes = [BLOCK_BYTES + 40, 24, 100_000]
    assert checksum(in_one_slab(sizes, gap=64)) == checksum(in_one_slab(sizes, gap=64, padding=255))


def test_it_is_the_same_at_another_address_aligned_or_not_and_in_another_order_of_dimensions() -> None:
    [tensor] = in_one_slab([200_003])
    elsewhere = torch.empty(200_003 + 3, dtype=torch.uint8)[3:].copy_(tensor)
    assert checksum([elsewhere]) == checksum([tensor])
    matrix = torch.randn(50, 70)
    assert checksum([matrix.t().contiguous().t()]) == checksum([matrix])


def test_tensors_of_nothing_and_no_tensors_have_one() -> None:
    assert checksum([]) != checksum([torch.empty(0)]) != checksum([torch.empty(0), torch.empty(0)])


def test_it_is_taken_in_and_out_of_inference_mode() -> None:
    with torch.inference_mode():
        inside = checksum([BLOCKS])
    assert inside == checksum([BLOCKS])
