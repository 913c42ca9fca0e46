# SPDX-License-Identifier: Apache-2.0
"""P4: how long sleep takes and how much memory it gives back, by the slabs that every rank keeps its weights in.

Modules of three sizes with their checkpoint beside them; resident memory is what the kernel counts in /proc/self/smaps.
"""

import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from benchmarks.result import Measured
from diffusion_worker.memory.weights import ModelWeights

SIZES_MB = (64, 256, 1024)
ROUNDS = 5
WIDTH = 2048
LAYER_MB = WIDTH * WIDTH * 4 // 2**20


def measure() -> Measured:
    """Largest time and smallest freed part over sizes and rounds. Waking is timed beside it, for the record."""
    samples = [sample for size_mb in SIZES_MB for sample in _rounds(size_mb)]
    return Measured(
        results={
            "sleep_ms": round(max(sample["sleep_ms"] for sample in samples), 3),
            "freed_fraction": round(min(sample["freed_fraction"] for sample in samples), 4),
            "wake_gb_per_s": round(min(sample["wake_gb_per_s"] for sample in samples), 3),
        },
        targets={"sleep_ms": "<= 50", "freed_fraction": ">= 0.98"},
        samples=samples,
    )


def _rounds(size_mb: int) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        first, *others = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(size_mb // LAYER_MB))
        module = nn.Sequential(first, *others).requires_grad_(False)
        save_file(module.state_dict(), Path(folder) / "model.safetensors")
        weights = ModelWeights(torch.device("cpu"))
        weights.place(module, Path(folder))
        before = first.weight[:4].clone()
        samples = [_round(weights, size_mb) for _ in range(ROUNDS)]
        if not torch.equal(before, first.weight[:4]):
            raise RuntimeError("the weights changed over sleep and wake")
        return samples


def _round(weights: ModelWeights, size_mb: int) -> dict[str, float]:
    awake = weights.report()
    started = time.perf_counter()
    weights.release()
    slept = time.perf_counter()
    asleep = weights.report()
    woke_from = time.perf_counter()
    weights.restore()
    woke = time.perf_counter()
    return {
        "size_mb": size_mb,
        "resident_awake": awake.weights_resident_bytes,
        "resident_asleep": asleep.weights_resident_bytes,
        "sleep_ms": (slept - started) * 1000,
        "wake_ms": (woke - woke_from) * 1000,
        "freed_fraction": (awake.weights_resident_bytes - asleep.weights_resident_bytes) / awake.weights_resident_bytes,
        "wake_gb_per_s": awake.weights_bytes / (woke - woke_from) / 1e9,
    }
