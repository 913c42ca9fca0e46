# SPDX-License-Identifier: Apache-2.0
"""P1: what the engine's step loop costs one request, over diffusers' own call of the same pipeline object.

Both make the same image with the same modules and kernels on one thread, in turn; the result is the ratio of the fastest
of each, in CPU time, which other processes of the machine disturb less than the clock on the wall (that ratio is printed
too). The digits model has steps of a few milliseconds, where overhead shows most; the larger transformer stands for models
that somebody would serve. The prompt cache is off: it would make the engine the faster one.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from torch._C._distributed_c10d import HashStore

from benchmarks.result import Measured
from diffusion_worker.config import WorkerConfig
from diffusion_worker.messages import RequestSpec, Tick
from diffusion_worker.runner.model_runner import DiffusionModelRunner
from diffusion_worker.runner.parallel import Parallel
from diffusion_worker.runner.pipeline import load_pipeline
from diffusion_worker.runner.pixels import pixels_of

DIGITS = Path(__file__).parents[1] / "examples" / "digits" / "model"
STEPS = 10
ROUNDS = 10
PROMPT = "a red digit seven"
# How far apart the fastest calls of both halves of the baseline may be before the machine counts as too busy.
NOISE = 0.10


def measure() -> Measured:
    """The larger of the two models' ratios, and both."""
    torch.set_num_threads(1)
    parallel = _one_rank()
    try:
        samples = {name: _rounds(name, parallel) for name in ("digits", "larger")}
    finally:
        parallel.close()
    ratios = {name: _fastest(rounds, "engine_cpu_s") / _fastest(rounds, "bare_cpu_s") for name, rounds in samples.items()}
    results = {"overhead_ratio": round(max(ratios.values()), 4)}
    for name, rounds in samples.items():
        results[f"overhead_ratio_{name}"] = round(ratios[name], 4)
        results[f"median_ratio_{name}"] = round(statistics.median(s["engine_cpu_s"] / s["bare_cpu_s"] for s in rounds), 4)
        results[f"wall_ratio_{name}"] = round(_fastest(rounds, "engine_s") / _fastest(rounds, "bare_s"), 4)
        results[f"bare_step_ms_{name}"] = round(_fastest(rounds, "bare_cpu_s") * 1000 / STEPS, 3)
    return Measured(results=results, targets={"overhead_ratio": "<= 1.05"}, samples=[s for rounds in samples.values() for s in rounds])


def _fastest(rounds: list[dict[str, float]], name: str) -> float:
    return min(sample[name] for sample in rounds)


def _one_rank() -> Parallel:
    return Parallel(rank=0, world=1, device=torch.device("cpu"), store=HashStore(), timeout_s=60)


def _rounds(name: str, parallel: Parallel) -> list[dict[str, float]]:
    config = WorkerConfig(model=str(DIGITS), served_name="digits", prompt_cache_size=0)
    pipeline = load_pipeline(config, torch.float32)
    size = 32
    if name == "larger":
        pipeline.register_modules(transformer=_larger(pipeline.transformer))
        size = 64
    runner = DiffusionModelRunner(config, torch.device("cpu"), parallel)
    runner.adopt(pipeline, torch.float32, lambda done, total: None)
    _bare(pipeline, size)
    _engine(runner, size)
    rounds = []
    for number in range(ROUNDS):
        # In turn first and second, so that neither always finds the warmer cache.
        pair = [("bare", lambda: _bare(pipeline, size)), ("engine", lambda: _engine(runner, size))]
        sample = {"larger": float(name == "larger")}
        for who, run in pair if number % 2 else pair[::-1]:
            sample |= _timed(who, run)
        rounds.append(sample)
    _require_calm(name, [sample["bare_cpu_s"] for sample in rounds])
    return rounds


def _timed(name: str, run: Callable[[], None]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return {f"{name}_cpu_s": time.process_time() - cpu, f"{name}_s": time.perf_counter() - wall}


def _larger(small: Any) -> SD3Transformer2DModel:
    """Ten times the parameters, for the same prompts and latents."""
    torch.manual_seed(0)
    config = dict(small.config) | {"num_layers": 6, "num_attention_heads": 8, "attention_head_dim": 48, "caption_projection_dim": 384}
    made: SD3Transformer2DModel = SD3Transformer2DModel.from_config(config)
    return made.eval()


def _bare(pipeline: Any, size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    pipeline(PROMPT, height=size, width=size, num_inference_steps=STEPS, generator=generator, output_type="np")


def _engine(runner: DiffusionModelRunner, size: int) -> None:
    spec = RequestSpec(request_id="one", prompt=PROMPT, seed=1, height=size, width=size, steps=STEPS)
    output = runner.execute_stepwise(Tick(0, [spec]))
    while not output.images:
        if output.errors:
            raise RuntimeError(output.errors["one"].message)
        output = runner.execute_stepwise(Tick(1))
    # In a rank this is beside the next step.
    pixels_of(output.images["one"])


def _require_calm(name: str, seconds: list[float]) -> None:
    halves = min(seconds[: ROUNDS // 2]), min(seconds[ROUNDS // 2 :])
    apart = max(halves) / min(halves) - 1
    if apart > NOISE:
        raise RuntimeError(f"{name}: rounds of the baseline differ by {apart:.0%}, more than {NOISE:.0%}: the machine is too busy")
