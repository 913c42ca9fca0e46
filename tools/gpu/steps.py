# SPDX-License-Identifier: Apache-2.0
"""Models of real sizes on the model runner, in this process: alone, in a batch, and with adapters, against diffusers' own call.

Weights are random numbers, made on the device. Ours and the baseline share the modules and their kernels.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch._C._distributed_c10d import HashStore

from benchmarks.pairs import TINY_PLAN, Pairs, Plan, take_pairs, timed
from diffusion_worker.config import LoadFormat, WorkerConfig
from diffusion_worker.memory.heap import freeze_gc
from diffusion_worker.messages import LoRAUse, RequestSpec, Tick
from diffusion_worker.runner.model_runner import DiffusionModelRunner
from diffusion_worker.runner.parallel.rows import Parallel
from diffusion_worker.runner.stepping.pixels import pixels_of

from .device import GIGA, memory_bytes
from .models import write_model
from .process import Run

PROMPT = "a red digit seven"
STEPS = 4
ROWS = 4
PLAN = Plan(wanted=5, least=2, at_most=9, noise=0.10, within_s=10)
MOST_LEVELS = 2


@dataclass
class Loaded:
    """A loaded model: its name and device, whether it is a tiny one, its runner, and the size of its images."""

    name: str
    device: str
    tiny: bool
    runner: DiffusionModelRunner
    size: dict[str, int]

    @property
    def transformer(self) -> Any:
        """The denoiser of the loaded pipeline."""
        return self.runner.pipeline.transformer


def load(run: Run) -> None:
    """Load the model that the item's name begins with, and report load time and memory; do nothing if this process has it already."""
    load_named(run, run.subject)


def load_named(run: Run, name: str) -> Loaded:
    """Return the model of this name: loaded by an earlier item of this process, else loaded now, with random weights."""
    if name not in run.kept:
        run.kept[name] = _load(run, name)
    loaded: Loaded = run.kept[name]
    return loaded


def _load(run: Run, name: str) -> Loaded:
    torch.set_num_threads(1 if run.tiny else torch.get_num_threads())
    device = torch.device("cpu") if run.device == "cpu" else torch.device("cuda", 0)
    folder = Path(run.closing.enter_context(tempfile.TemporaryDirectory(prefix=f"gpu-{name}-"))) / name
    described = write_model(name, folder, tiny=run.tiny)
    # Layers with slots for adapters from the start.
    adapters: dict[str, Any] = {"max_loras": ROWS, "max_lora_rank": 16, "lora_target_modules": described.get("adapted", [])}
    # A text encoder that does not run again would make ours the faster one.
    config = WorkerConfig(model=str(folder), served_name=name, load_format=LoadFormat.DUMMY, prompt_cache_size=0, **adapters)
    if "parallel" not in run.kept:
        run.kept["parallel"] = Parallel(rank=0, world=1, device=device, store=HashStore(), timeout_s=60)
        run.closing.callback(run.kept["parallel"].close)
    runner = DiffusionModelRunner(config, device, run.kept["parallel"])
    began = time.perf_counter()
    info = runner.load_model(lambda done, total: None)
    run.figure("load_s", time.perf_counter() - began)
    # A rank does the same after its load.
    freeze_gc()
    run.figure("weights_gb", info.weights_bytes / GIGA)
    run.figure("memory_gb", memory_bytes(run.device) / GIGA)
    return Loaded(name, run.device, run.tiny, runner, described["size"])


def alone(run: Run) -> None:
    """Make an image of four steps alone, and compare time and image with diffusers' own call.

    Raises:
        AssertionError: the images differ by more than 2 of 255 levels.
    """
    loaded = load_named(run, run.subject)
    apart = _levels(_diffusers(loaded, 1)[0], image(loaded, "seen", steps=STEPS))
    run.figure("levels_apart", apart)
    pairs = _pairs(run, loaded, "diffusers' own call", lambda: _diffusers(loaded, 1), lambda: images(loaded, 1))
    run.figure("image_s", pairs.baseline(pairs.by))
    run.figure("overhead_ratio", pairs.ratio(), "<= 1.02")
    run.require(apart <= MOST_LEVELS, f"the image that diffusers makes, found {apart} levels between them")


def batch(run: Run) -> None:
    """Make four images at once, and report the time and how it compares with diffusers' own batch of four."""
    loaded = load_named(run, run.subject)
    pairs = _pairs(run, loaded, "diffusers' own batch", lambda: _diffusers(loaded, ROWS), lambda: images(loaded, ROWS))
    run.figure("batch_s", pairs.ours(pairs.by))
    run.figure("vs_static_batch_decoded", 1 / pairs.ratio(), ">= 0.95")


def adapters(run: Run) -> None:
    """Make four images with an adapter each, and report the throughput against the same batch without adapters.

    Raises:
        AssertionError: the adapters did not all get a slot.
    """
    loaded = load_named(run, run.subject)
    loras = loaded.runner.loras
    assert loras is not None
    with loras.dummy_adapters(ROWS) as ids:
        run.require(len(ids) == ROWS, f"{ROWS} adapters in their slots, found {len(ids)}")
        each = [[LoRAUse(number, 1.0)] for number in ids]
        pairs = _pairs(run, loaded, "no adapters", lambda: images(loaded, ROWS), lambda: images(loaded, ROWS, each))
    run.figure("throughput_vs_no_lora", 1 / pairs.ratio(), ">= 0.93")


def image(loaded: Loaded, name: str, *, steps: int) -> Any:
    """Make one image of so many steps and return its pixels; raise RuntimeError if the request fails."""
    return _finish(loaded, [_spec(loaded, name, seed=1, steps=steps)])[name]


def images(loaded: Loaded, rows: int, loras: Sequence[list[LoRAUse]] = ()) -> dict[str, Any]:
    """Make `rows` images of four steps that begin at once, and return their pixels by name; `loras` has the adapters of each.

    Raises:
        RuntimeError: a request failed.
    """
    specs = [_spec(loaded, f"row-{row}", seed=1 + row, steps=STEPS) for row in range(rows)]
    if loras:
        specs = [msgspec.structs.replace(spec, loras=uses) for spec, uses in zip(specs, loras, strict=True)]
    return _finish(loaded, specs)


def begin(loaded: Loaded, *, steps: int) -> Callable[[], None]:
    """Run the first step of an image, and return a function that runs its next step and raises RuntimeError if the request fails."""
    runner = loaded.runner
    _require_good(runner.execute_stepwise(Tick(0, [_spec(loaded, "steady", seed=1, steps=steps)])))
    return lambda: _require_good(runner.execute_stepwise(Tick(1)))


def _spec(loaded: Loaded, name: str, *, seed: int, steps: int) -> RequestSpec:
    return RequestSpec(request_id=name, prompt=PROMPT, seed=seed, steps=steps, **loaded.size)  # type: ignore[arg-type]


def _finish(loaded: Loaded, specs: list[RequestSpec]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    output = loaded.runner.execute_stepwise(Tick(0, specs))
    while True:
        _require_good(output)
        found |= output.images
        if len(found) == len(specs):
            # In a rank this is beside the next step.
            return {name: pixels_of(image) for name, image in found.items()}
        output = loaded.runner.execute_stepwise(Tick(1))


def _require_good(output: Any) -> None:
    """Raise RuntimeError if a request failed, or was sent back because it must run alone."""
    for error in output.errors.values():
        raise RuntimeError(error.message)
    for reason in output.replays.values():
        raise RuntimeError(f"expected a request that shares calls, found one that must run alone: {reason}")


def _diffusers(loaded: Loaded, rows: int) -> Any:
    """Call diffusers' own pipeline on the same modules; return uint8 images or videos, a row each."""
    sizes = {{"frames": "num_frames"}.get(name, name): value for name, value in loaded.size.items()}
    # On the host, as ours: the same noise on every device.
    seeds = [torch.Generator().manual_seed(1 + row) for row in range(rows)]
    prompt = [PROMPT] * rows if rows > 1 else PROMPT
    pipeline = loaded.runner.pipeline
    with torch.inference_mode():
        made = pipeline(prompt, num_inference_steps=STEPS, generator=seeds if rows > 1 else seeds[0], output_type="np", **sizes)[0]
    return (np.asarray(made) * 255).round().astype(np.uint8)


def _pairs(run: Run, loaded: Loaded, what: str, baseline: Callable[[], Any], ours: Callable[[], Any]) -> Pairs:
    """Measure `ours` between two runs of `baseline`, in pairs: by the clock on a GPU, and by processor time on a CPU.

    Each runs once before. Both sides have to end with pixels in host memory.
    """
    for warm in (baseline, ours):
        warm()
    by = "s" if run.on_gpu else "cpu_s"
    plan = TINY_PLAN if loaded.tiny else PLAN
    return take_pairs(what, lambda: timed(baseline), lambda: timed(ours), by=by, plan=plan)


def _levels(one: Any, other: Any) -> int:
    return int(np.abs(one.astype(np.int16) - other.astype(np.int16)).max())
