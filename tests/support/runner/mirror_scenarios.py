# SPDX-License-Identifier: Apache-2.0
"""Scenarios of mirrors that two rank processes make together, as `rank_processes.run` starts them.

Real: the processes, their group, and their memory. Not real: the accelerator, which is the CPU, and a driver that registers no memory.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from diffusion_worker.errors import RequestError
from diffusion_worker.memory import host_memory, shared_memory
from diffusion_worker.memory.weights import ModelWeights
from diffusion_worker.messages import SleepLevel
from diffusion_worker.runner import mirroring
from diffusion_worker.runner.parallel.rows import CallFailed
from support.runner.rank_processes import Rank
from support.worker.extensions import write_limit

CPU = torch.device("cpu")
WEIGHT_BYTES = 4 << 20


def mirrors_of(maps: str) -> list[str]:
    """Return the inodes of the shared mirrors in the text of a `/proc/PID/maps`, one for each mapping."""
    return [line.split()[4] for line in maps.splitlines() if f"memfd:{shared_memory.NAME}" in line]


def placed(seed: int) -> tuple[torch.nn.Linear, ModelWeights]:
    """Return a layer of `WEIGHT_BYTES` and a bias, random by the seed, and its weights with mirrors, in no file."""
    torch.manual_seed(seed)
    layer = torch.nn.Linear(1024, 1024)
    layer.requires_grad_(False)
    weights = ModelWeights(CPU, mirrored=True)
    weights.place(layer, Path("/nonexistent"))
    return layer, weights


def mirrors(rank: Rank, *, folder: str) -> dict[str, Any]:
    """Return for each case the bytes of the rank's own mirror, those of a shared one, and the error's words, empty without an error.
    Under `CASE mappings` is the number of shared mirrors that the process has mapped after the case."""
    found: dict[str, Any] = {}
    with rank.group() as parallel:

        def case(name: str, *, seed: int = 1, alike: bool = True) -> None:
            layer, weights = placed(seed)
            before, problem = layer.weight.clone(), ""
            try:
                mirroring.mirror_weights(weights, parallel, CPU, alike=alike)
            except RequestError as error:
                problem = f"{error.code}: {error.message}"
            except CallFailed:
                problem = "CallFailed"
            report = weights.report()
            found[name] = (report.mirror_memory_bytes, report.mirror_shared_bytes, problem)
            found[f"{name} mappings"] = len(mirrors_of(Path("/proc/self/maps").read_text()))
            for level in () if problem else SleepLevel:
                weights.release(level)
                weights.restore()
                assert torch.equal(layer.weight, before), name

        case("alike")
        case("other weights", seed=rank.rank)
        case("in parts", alike=False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mirroring, "SharedMemory", refused if rank.rank else mirroring.SharedMemory)
            case("not registered")
        with pytest.MonkeyPatch.context() as patch:
            write_limit(Path(folder), free_bytes=WEIGHT_BYTES)
            patch.setattr(host_memory, "CGROUP", Path(folder))
            patch.setattr(mirroring, "new_memory", must_not_be_made)
            patch.setattr("diffusion_worker.memory.weights.own_mirrors", must_not_be_made)
            case("no room")
        with pytest.MonkeyPatch.context() as patch:
            # There is room for one mirror and not for two.
            write_limit(Path(folder), free_bytes=2 * WEIGHT_BYTES)
            patch.setattr(host_memory, "CGROUP", Path(folder))
            case("room for one")
            case("no room for two", alike=False)
        with pytest.MonkeyPatch.context() as patch:
            if rank.rank == 0:
                patch.setattr(mirroring, "shared_mirrors", ends_in_the_middle)
            case("ended in the middle")
    return found


def refused(path: str, size: int, device: torch.device) -> Any:
    raise RuntimeError("cudaHostRegister failed")


def must_not_be_made(*arguments: Any, **options: Any) -> Any:
    raise AssertionError("memory was allocated")


def ends_in_the_middle(*arguments: Any) -> Any:
    raise ValueError("a fault of the copy")
