# SPDX-License-Identifier: Apache-2.0
"""Free memory: for one rank beside its weights, and for weights that a wake restores."""

from pathlib import Path

import torch

from diffusion_worker.memory.host_memory import available_host_bytes, machine_bytes


def free_bytes(
    device: torch.device, *, ranks: int, weights_bytes: int, resident_bytes: int | None = None, cgroup: Path | None = None
) -> int:
    """Return the bytes for one rank beside its weights, at least 0.

    On a GPU these are its free memory, less the weights that are not in memory now. On a CPU they are an equal share of all memory of the
    machine or cgroup, less the weights. `resident_bytes` counts the weights in memory now; None stands for all of them.
    """
    if device.type == "cuda":
        missing = 0 if resident_bytes is None else max(0, weights_bytes - resident_bytes)
        return max(0, _free_on(device) - missing)
    return max(0, machine_bytes(cgroup) // ranks - weights_bytes)


def available_bytes(device: torch.device, *, cgroup: Path | None = None) -> int:
    """Return the bytes that could be taken now: a GPU's free memory, or for a CPU host memory within the cgroup's limit.

    Memory that torch has reserved on a GPU and does not use counts as free. Cached pages of files do not count as used, because the system
    drops them when it needs room.
    """
    if device.type == "cuda":
        return _free_on(device)
    return available_host_bytes(cgroup)


def _free_on(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
