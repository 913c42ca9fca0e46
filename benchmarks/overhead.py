# SPDX-License-Identifier: Apache-2.0
"""P1: what the engine's step loop costs one request, over diffusers' own call of the same pipeline object.

Both make the same image with the same modules and kernels on one thread. The result is the median ratio of adjacent pairs in CPU time,
which other processes disturb less than the clock on the wall. The wall's ratio is
given beside it. The digits model has steps of a few milliseconds, where overhead shows most; the larger transformer stands for models
that somebody would serve. The prompt cache is off: it would make the engine the faster one.
"""

from pathlib import Path
from typing import Any

import msgspec
import torch
from diffusers import SD3Transformer2DModel
from torch._C._distributed_c10d import HashStore

from benchmarks.pairs import TINY_PLAN, Pairs, Plan, take_pairs, timed
from benchmarks.result import Measured
from diffusion_worker.config import WorkerConfig
from diffusion_worker.messages import RequestSpec, Tick
from diffusion_worker.runner.loading.pipeline import load_pipeline
from diffusion_worker.runner.model_runner import DiffusionModelRunner
from diffusion_worker.runner.parallel.rows import Parallel
from diffusion_worker.runner.stepping.pixels import pixels_of

DIGITS = Path(__file__).parents[1] / "examples" / "digits" / "model"
PROMPT = "a red digit seven"


class Size(msgspec.Struct, frozen=True):
    """The amount of work in a run.

    `digits` and `larger` are the image sides in pixels for the two models, `steps` the denoising steps per image, and `plan` bounds the
    pairs.
    """

    steps: int = 10
    digits: int = 32
    larger: int = 64
    plan: Plan = Plan(wanted=11, within_s=120)


TINY = Size(steps=2, larger=32, plan=TINY_PLAN)


def measure(*, tiny: bool = False) -> Measured:
    """Measure the engine's time over diffusers' own for both models; `overhead_ratio` is the larger of the two ratios.

    Sets one torch thread for the process.
    """
    size = TINY if tiny else Size()
    torch.set_num_threads(1)
    parallel = _one_rank()
    try:
        pairs = {name: _pairs(name, parallel, size) for name in ("digits", "larger")}
    finally:
        parallel.close()
    figures = {"overhead_ratio": max(taken.ratio() for taken in pairs.values())}
    for name, taken in pairs.items():
        figures[f"overhead_ratio_{name}"] = taken.ratio()
        figures[f"wall_ratio_{name}"] = taken.ratio("s")
        figures[f"bare_step_ms_{name}"] = taken.baseline("cpu_s") * 1000 / size.steps
    samples = [sample for taken in pairs.values() for sample in taken.samples()]
    return Measured(
        {name: round(value, 4) for name, value in figures.items()}, {"overhead_ratio": "<= 1.05"}, samples, list(pairs.values())
    )


def _one_rank() -> Parallel:
    return Parallel(rank=0, world=1, device=torch.device("cpu"), store=HashStore(), timeout_s=60)


def _pairs(name: str, parallel: Parallel, size: Size) -> Pairs:
    config = WorkerConfig(model=str(DIGITS), served_name="digits", prompt_cache_size=0)
    pipeline = load_pipeline(config, torch.float32)
    side = size.digits
    if name == "larger":
        pipeline.register_modules(transformer=_larger(pipeline.transformer))
        side = size.larger
    runner = DiffusionModelRunner(config, torch.device("cpu"), parallel)
    runner.adopt(pipeline, torch.float32, lambda done, total: None)

    def bare() -> None:
        _bare(pipeline, side, size.steps)

    def engine() -> None:
        _engine(runner, side, size.steps)

    bare()
    engine()
    return take_pairs(f"diffusers' call of the {name} model", lambda: timed(bare), lambda: timed(engine), by="cpu_s", plan=size.plan)


def _larger(small: Any) -> SD3Transformer2DModel:
    """Build a random transformer with ten times as many parameters as `small`, in evaluation mode.

    It takes the same prompt embeddings and latents.
    """
    torch.manual_seed(0)
    config = dict(small.config) | {"num_layers": 6, "num_attention_heads": 8, "attention_head_dim": 48, "caption_projection_dim": 384}
    made: SD3Transformer2DModel = SD3Transformer2DModel.from_config(config)
    return made.eval()


def _bare(pipeline: Any, side: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    pipeline(PROMPT, height=side, width=side, num_inference_steps=steps, generator=generator, output_type="np")


def _engine(runner: DiffusionModelRunner, side: int, steps: int) -> None:
    spec = RequestSpec(request_id="one", prompt=PROMPT, seed=1, height=side, width=side, steps=steps)
    output = runner.execute_stepwise(Tick(0, [spec]))
    while not output.images:
        if output.errors:
            raise RuntimeError(output.errors["one"].message)
        output = runner.execute_stepwise(Tick(1))
    # In a rank this is beside the next step.
    pixels_of(output.images["one"])
