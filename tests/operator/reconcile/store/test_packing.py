# SPDX-License-Identifier: Apache-2.0
"""Objects of one kind are stored as their difference from one of them."""

import random

import pytest

from diffusion_operator.reconcile.store.packing import Packer, unpack


def content(number: int, *, status: str = "") -> bytes:
    """Return an object of about 3 KB in bytes. Objects differ in name, UID and status alone."""
    chance = random.Random(1)
    spec = [chance.randbytes(20).hex() for _ in range(60)]
    return f'{{"name":"d{number}","uid":"{random.Random(number).randbytes(16).hex()}","spec":{spec},"status":"{status}"}}'.encode()


@pytest.mark.parametrize("size", [0, 1, 8191, 8192, 8193, 1 << 20])
def test_what_is_packed_comes_back(size: int) -> None:
    packer = Packer()
    for one in (content(1), random.Random(2).randbytes(size), content(2)):
        assert unpack(*packer.pack(one)) == one


def test_an_object_like_others_takes_little() -> None:
    packer = Packer()
    packer.pack(content(0))
    packed, _ = packer.pack(content(1))
    assert len(packed) < 100 < len(content(1)) / 10


def test_an_object_with_a_status_becomes_the_reference_and_earlier_ones_keep_theirs() -> None:
    packer, status = Packer(), random.Random(3).randbytes(1000).hex()
    before = packer.pack(content(0))
    packer.pack(content(0, status=status))
    packed, reference = packer.pack(content(1, status=status))
    assert len(packed) < 100
    assert unpack(packed, reference) == content(1, status=status)
    assert unpack(*before) == content(0)


def test_alike_objects_share_one_reference_of_a_few_kilobytes() -> None:
    packer = Packer()
    references = [packer.pack(content(number, status="x" * number))[1] for number in range(100)]
    assert all(one is references[0] for one in references)
    _, long = packer.pack(bytes(1 << 20))
    assert len(long) == 8192
