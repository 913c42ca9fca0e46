# SPDX-License-Identifier: Apache-2.0
"""P5: how long a wake takes, against the least that it could, and what the first step after it costs.

`wake_vs_copy`: 6 GB of weights that fill their slabs from the page cache, against one `copy_` of the same bytes, from the same pages
in the page cache, mapped and touched before, into a fresh mapping of the same kind. Rounds of both alternate.
`level2_vs_raw_read`: 2 GB whose pages were dropped, against a plain parallel read of the cold file into such a mapping.
`first_step_ratio`: the first tick of a request (text encoders and one step) after a wake that was verified, as all are,
against the same one before the sleep.

The fastest rounds count, and the machine is too busy to measure where those of the baseline's halves are apart. `…_cpu` is the same
ratio in the seconds that this process computed. A wake is verified by a checksum of all weights: `verified_…` has it in.
"""

import functools
import mmap
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore

from benchmarks.linear_stack import CPU, place_stack, require_memory, write_stack
from benchmarks.loading import drop_pages, make_model, plain_read, require_calm
from benchmarks.result import Measured
from diffusion_worker.config import Dtype, WorkerConfig, usable_cores
from diffusion_worker.memory.checksum import checksum
from diffusion_worker.memory.heap import settle_heap
from diffusion_worker.memory.slabs import HostSlab
from diffusion_worker.memory.weights import ModelWeights
from diffusion_worker.messages import RequestSpec, SleepLevel, Tick
from diffusion_worker.runner.model_runner import DiffusionModelRunner
from diffusion_worker.runner.parallel import Parallel

WAKE_BYTES = 6_000_000_000
COLD_BYTES = 2_000_000_000
SPARE_BYTES = 2_000_000_000
ROUNDS = 12
COLD_ROUNDS = 8
STEP_ROUNDS = 16
MAP_POPULATE = 0x8000
# A width of 1,024: half a gigabyte in float32, and a step of a few tenths of a second.
STEPPING = {"num_attention_heads": 32, "caption_projection_dim": 1024, "num_layers": 4}

Sample = dict[str, Any]


def measure() -> Measured:
    """The three ratios; every round is a sample."""
    torch.set_num_threads(usable_cores())
    wakes, cold, steps = _wakes(), _cold_wakes(), _first_steps()
    for baseline, rounds in (("copy", wakes), ("raw_read", cold), ("step_before", steps)):
        require_calm(baseline, [sample[f"{baseline}_s"] for sample in rounds])

    def fastest(name: str, rounds: list[Sample]) -> float:
        return float(min(sample[name] for sample in rounds))

    copy_s = fastest("copy_s", wakes)
    results = {
        "wake_vs_copy": copy_s / fastest("wake_s", wakes),
        "first_step_ratio": fastest("step_after_s", steps) / fastest("step_before_s", steps),
        "level2_vs_raw_read": fastest("raw_read_s", cold) / fastest("cold_wake_s", cold),
        "wake_vs_copy_cpu": fastest("copy_cpu_s", wakes) / fastest("wake_cpu_s", wakes),
        "first_step_ratio_cpu": fastest("step_after_cpu_s", steps) / fastest("step_before_cpu_s", steps),
        "verified_wake_vs_copy": copy_s / (fastest("wake_s", wakes) + fastest("checksum_s", wakes)),
        "wake_gb_per_s": wakes[0]["bytes"] / fastest("wake_s", wakes) / 1e9,
        "copy_gb_per_s": wakes[0]["bytes"] / copy_s / 1e9,
        "cold_wake_gb_per_s": cold[0]["bytes"] / fastest("cold_wake_s", cold) / 1e9,
    }
    targets = {"wake_vs_copy": ">= 0.9", "first_step_ratio": "<= 1.02", "level2_vs_raw_read": ">= 0.9"}
    return Measured({name: round(value, 3) for name, value in results.items()}, targets, [*wakes, *cold, *steps])


def _timed(name: str, work: Callable[[], Any]) -> Sample:
    began, computed = time.perf_counter(), time.process_time()
    work()
    return {f"{name}_cpu_s": time.process_time() - computed, f"{name}_s": time.perf_counter() - began}


def _wakes() -> list[Sample]:
    require_memory(2 * WAKE_BYTES + SPARE_BYTES)  # the weights or the copy, and the pages of the file
    with tempfile.TemporaryDirectory() as folder:
        path = write_stack(Path(folder), WAKE_BYTES)
        _, weights = place_stack(Path(folder))
        size = weights.report().weights_bytes
        before = checksum(weights.tensors())
        weights.release()
        pages = _mapped(path)[-size:]
        samples = [_wake_round(weights, pages) for _ in range(ROUNDS)]
        weights.restore()
        if checksum(weights.tensors()) != before:
            raise RuntimeError("the weights changed over sleep and wake")
        return [{"bytes": size} | sample for sample in samples]


def _wake_round(weights: ModelWeights, pages: torch.Tensor) -> Sample:
    fresh = HostSlab(pages.numel())
    sample = _timed("copy", functools.partial(fresh.bytes.copy_, pages))
    fresh.release()
    sample |= _timed("wake", weights.restore)
    sample |= _timed("checksum", lambda: checksum(weights.tensors()))
    return sample | _timed("sleep", weights.release)


def _mapped(path: Path) -> torch.Tensor:
    """A file as it lies in the page cache; read, and mapped to its last page."""
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | MAP_POPULATE, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it cannot be written to
        return torch.frombuffer(content, dtype=torch.uint8)


def _cold_wakes() -> list[Sample]:
    require_memory(2 * COLD_BYTES + SPARE_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        path = write_stack(Path(folder), COLD_BYTES)
        os.sync()  # pages that are not written yet cannot be dropped
        _, weights = place_stack(Path(folder))
        size = weights.report().weights_bytes
        return [{"bytes": size} | _cold_round(weights, path) for _ in range(COLD_ROUNDS)]


def _cold_round(weights: ModelWeights, path: Path) -> Sample:
    weights.release(SleepLevel.DISCARD)
    sample = _timed("raw_read", lambda: plain_read([path], path.stat().st_size))
    drop_pages([path])
    return sample | _timed("cold_wake", weights.restore)


def _first_steps() -> list[Sample]:
    with tempfile.TemporaryDirectory() as place:
        folder = make_model(Path(place) / "model", STEPPING)
        parallel = Parallel(rank=0, world=1, device=CPU, store=HashStore(), timeout_s=60)
        try:
            # A text encoder that does not run again would be no first step.
            config = WorkerConfig(model=str(folder), served_name="big", dtype=Dtype.FLOAT32, prompt_cache_size=0)
            runner = DiffusionModelRunner(config, CPU, parallel)
            runner.load_model(lambda done, total: None)
            settle_heap()
            _step(runner)
            return [_step_round(runner) for _ in range(STEP_ROUNDS)]
        finally:
            parallel.close()


def _step_round(runner: DiffusionModelRunner) -> Sample:
    sample = _timed("step_before", lambda: _step(runner))
    runner.release()
    runner.restore()
    # Part of every wake: nothing is served before it.
    runner.fingerprint(probe=True)
    return sample | _timed("step_after", lambda: _step(runner))


def _step(runner: DiffusionModelRunner) -> None:
    """The first tick of a request."""
    spec = RequestSpec(request_id="one", prompt="a red digit seven", seed=1, height=32, width=32, steps=2)
    output = runner.execute_stepwise(Tick(1, [spec]))
    if output.errors:
        raise RuntimeError(f"the request failed: {output.errors['one'].message}")
    runner.drop_all()
