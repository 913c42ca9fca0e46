# SPDX-License-Identifier: Apache-2.0
"""How much memory a rank has for what is not its weights."""

import os
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")
# Limits of memory cgroups, version 2 then 1; both say "no limit" by a word or by a huge number.
LIMITS = ("memory.max", "memory/memory.limit_in_bytes")


def free_bytes(device: torch.device, *, ranks: int, weights_bytes: int, cgroup: Path = CGROUP) -> int:
    """Bytes for one rank, once its weights are loaded: what the device has free, or this rank's part of the machine's memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, machine_bytes(cgroup) // ranks - weights_bytes)


def machine_bytes(cgroup: Path = CGROUP) -> int:
    """Memory that this process and its siblings may use: the machine's, or less where a cgroup limits it."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_limit(cgroup / name) for name in LIMITS]
    return min([physical, *(limit for limit in limits if limit)])


def _limit(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
