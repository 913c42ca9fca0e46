# SPDX-License-Identifier: Apache-2.0
"""Freezing skips objects that were frozen before, and a model that is given up is still freed."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from diffusion_worker.memory.heap import freeze_gc, unfreeze_gc


class Loop:
    """An object that refers to itself, so that reference counts never free it and only the cyclic collector does."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def settled_again() -> Iterator[None]:
    """Freeze the heap after each test, as the collection of tests left it."""
    yield
    gc.freeze()


def test_a_freeze_looks_at_nothing_that_was_settled_before_it() -> None:
    loop = Loop()
    settled = weakref.ref(loop)
    try:
        gc.freeze()
        del loop
        freeze_gc()
        assert settled() is not None
    finally:
        unfreeze_gc()
    gc.collect()
    assert settled() is None


def test_garbage_of_the_load_is_gone_after_a_freeze() -> None:
    made = weakref.ref(Loop())
    try:
        freeze_gc()
        assert made() is None
    finally:
        unfreeze_gc()
