# SPDX-License-Identifier: Apache-2.0
"""P5: how long a wake takes, against the least that it could, and what the first step after it costs.

`wake_vs_copy`: 6 GB of weights that fill their slabs from the page cache, against one `copy_` of the same bytes. The copy reads the same
pages of the page cache, mapped and touched before, and writes a fresh mapping of the same kind.
`level2_vs_raw_read`: 2 GB whose pages were dropped, against a plain parallel read of the cold file into such a mapping.
`first_step_ratio`: the first tick of a request, which is its text encoders and one step. The tick after a wake is compared with one before
the sleep. The wake was verified, as all are.

Each is the median ratio of adjacent pairs. `…_cpu` is the same ratio in the seconds that this process computed. A wake is verified by a
checksum of all weights; `verified_…` includes it.
"""

import mmap
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch._C._distributed_c10d import HashStore

from benchmarks.loading import drop_pages, make_model, plain_read
from benchmarks.pairs import TINY_PLAN, Pairs, Plan, Times, take_pairs, timed
from benchmarks.result import Measured
from benchmarks.stand_ins.linear_stack import CPU, place_stack, require_memory, write_stack
from diffusion_worker.config import Dtype, WorkerConfig, usable_cores
from diffusion_worker.memory.checksum import checksum
from diffusion_worker.memory.heap import freeze_gc
from diffusion_worker.memory.slabs import HostSlab
from diffusion_worker.memory.weights import ModelWeights
from diffusion_worker.messages import RequestSpec, SleepLevel, Tick
from diffusion_worker.runner.model_runner import DiffusionModelRunner
from diffusion_worker.runner.parallel.rows import Parallel

SPARE_BYTES = 2_000_000_000
MAP_POPULATE = 0x8000
# A width of 1,024: half a gigabyte in float32, and a step of a few tenths of a second.
STEPPING = {"num_attention_heads": 32, "caption_projection_dim": 1024, "num_layers": 4}
TARGETS = {"wake_vs_copy": ">= 0.9", "first_step_ratio": "<= 1.02", "level2_vs_raw_read": ">= 0.9"}


class Size(msgspec.Struct, frozen=True):
    """The size of a run: bytes of weights in the page cache, bytes of cold ones, the model that steps, and the plan.

    `spare` is the memory in bytes that has to be free beside them.
    """

    warm: int = 6_000_000_000
    cold: int = 2_000_000_000
    stepping: Mapping[str, int] = msgspec.field(default_factory=lambda: STEPPING)
    spare: int = SPARE_BYTES
    # Memory, a disk and every core are asked for seconds; see P6.
    plan: Plan = Plan(wanted=9, noise=0.20, within_s=120)


TINY = Size(warm=60_000_000, cold=60_000_000, stepping={"num_layers": 1}, spare=0, plan=TINY_PLAN)


def measure(*, tiny: bool = False) -> Measured:
    """Time wakes from the page cache, wakes from a cold file, and first steps after a wake.

    Figures are medians over pairs; the samples list all pairs.
    """
    size = TINY if tiny else Size()
    torch.set_num_threads(usable_cores())
    wakes, wake_gb = _wakes(size)
    cold, cold_gb = _cold_wakes(size)
    steps = _first_steps(size)
    figures = {
        "wake_vs_copy": 1 / wakes.ratio("s"),
        "first_step_ratio": steps.ratio("s"),
        "level2_vs_raw_read": 1 / cold.ratio("s"),
        "wake_vs_copy_cpu": 1 / wakes.ratio("cpu_s"),
        "first_step_ratio_cpu": steps.ratio("cpu_s"),
        "verified_wake_vs_copy": 1 / wakes.ratio("verified_s", "s"),
        "wake_gb_per_s": wake_gb / wakes.ours("s"),
        "copy_gb_per_s": wake_gb / wakes.baseline("s"),
        "cold_wake_gb_per_s": cold_gb / cold.ours("s"),
    }
    judged = [wakes, cold, steps]
    samples = [sample for pairs in judged for sample in pairs.samples()]
    return Measured({name: round(value, 3) for name, value in figures.items()}, TARGETS, samples, judged)


def _wakes(size: Size) -> tuple[Pairs, float]:
    """Time wakes from the page cache, each between two copies of the same bytes; return the pairs and the GB of the weights.

    Raises:
        RuntimeError: there is too little memory, or the weights changed.
    """
    require_memory(2 * size.warm + size.spare)  # the weights or the copy, and the pages of the file
    with tempfile.TemporaryDirectory() as folder:
        path = write_stack(Path(folder), size.warm)
        _, weights = place_stack(Path(folder))
        weights_bytes = weights.report().weights_bytes
        before = checksum(weights.tensors())
        weights.release()
        pages = _mapped(path)[-weights_bytes:]
        pairs = take_pairs("the copy", lambda: _copy(pages), lambda: _wake(weights), plan=size.plan)
        weights.restore()
        if checksum(weights.tensors()) != before:
            raise RuntimeError("the weights changed over sleep and wake")
        return pairs, weights_bytes / 1e9


def _copy(pages: torch.Tensor) -> Times:
    fresh = HostSlab(pages.numel())
    times = timed(lambda: fresh.bytes.copy_(pages))
    fresh.release()
    return times


def _wake(weights: ModelWeights) -> Times:
    """Restore weights that are released, take their checksum, and release them again. `verified_s` is restoring and checksum together."""
    times = timed(weights.restore)
    verified = timed(lambda: checksum(weights.tensors()))
    weights.release()
    return times | {"verified_s": times["s"] + verified["s"]}


def _mapped(path: Path) -> torch.Tensor:
    """Map a file with all its pages in the page cache, and return its bytes."""
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | MAP_POPULATE, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the tensor is read-only
        return torch.frombuffer(content, dtype=torch.uint8)


def _cold_wakes(size: Size) -> tuple[Pairs, float]:
    """Time wakes from a file without cached pages, each between two plain reads; return the pairs and the GB of the weights."""
    require_memory(2 * size.cold + size.spare)
    with tempfile.TemporaryDirectory() as folder:
        path = write_stack(Path(folder), size.cold)
        os.sync()  # pages that are not written yet cannot be dropped
        _, weights = place_stack(Path(folder))
        weights_bytes = weights.report().weights_bytes
        weights.release(SleepLevel.DISCARD)

        def read() -> Times:
            drop_pages([path])
            return timed(lambda: plain_read([path], path.stat().st_size))

        def wake() -> Times:
            drop_pages([path])
            times = timed(weights.restore)
            weights.release(SleepLevel.DISCARD)
            return times

        return take_pairs("the plain read", read, wake, plan=size.plan), weights_bytes / 1e9


def _first_steps(size: Size) -> Pairs:
    with tempfile.TemporaryDirectory() as place:
        folder = make_model(Path(place) / "model", size.stepping)
        parallel = Parallel(rank=0, world=1, device=CPU, store=HashStore(), timeout_s=60)
        try:
            # A text encoder that does not run again would be no first step.
            config = WorkerConfig(model=str(folder), served_name="big", dtype=Dtype.FLOAT32, prompt_cache_size=0)
            runner = DiffusionModelRunner(config, CPU, parallel)
            runner.load_model(lambda done, total: None)
            freeze_gc()
            _step(runner)
            return take_pairs("a step before the sleep", lambda: timed(lambda: _step(runner)), lambda: _woken_step(runner), plan=size.plan)
        finally:
            parallel.close()


def _woken_step(runner: DiffusionModelRunner) -> Times:
    runner.release()
    runner.restore()
    # Part of every wake: nothing is served before it.
    runner.fingerprint(probe=True)
    return timed(lambda: _step(runner))


def _step(runner: DiffusionModelRunner) -> None:
    """Let a request join and run its first tick, which is the text encoders and the first of two steps; then drop it.

    Raises:
        RuntimeError: the request ended with an error.
    """
    spec = RequestSpec(request_id="one", prompt="a red digit seven", seed=1, height=32, width=32, steps=2)
    output = runner.execute_stepwise(Tick(1, [spec]))
    if output.errors:
        raise RuntimeError(f"the request failed: {output.errors['one'].message}")
    runner.drop_all()
