# SPDX-License-Identifier: Apache-2.0
"""Memory that this process freed and still holds: garbage in cycles, and blocks that allocators keep for later."""

import ctypes
import gc

import torch


def freeze_gc() -> None:
    """Exempt all living objects from garbage collection, in a process that serves one model to its end.

    A collection of them took a third of a second. Until `unfreeze_gc`, an exempt object that is part of a cycle is never freed. The
    collection here skips objects that the fork server froze: looking through them took 0.8 s, and copied their pages for each rank.
    """
    gc.collect()
    gc.freeze()


def unfreeze_gc() -> None:
    """Make frozen objects collectable again; call it before the model is replaced by another."""
    gc.unfreeze()


def give_back_heap(device: torch.device) -> None:
    """Collect garbage, and return memory that allocators hold unused to the system and, on an accelerator, to the device."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's, other libraries keep nothing back
        trim(0)
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def give_back_pinned(device: torch.device) -> None:
    """Return pinned host memory that torch holds unused to the system; do nothing on a CPU."""
    if device.type != "cpu":
        # torch 2.11 has no public function for it.
        getattr(torch.accelerator.memory, "empty_host_cache", torch._C._host_emptyCache)()
