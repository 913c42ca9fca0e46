# SPDX-License-Identifier: Apache-2.0
"""Accelerated requests on real ranks, and on one: what the processes of the step caches' parallel tests run."""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from diffusion_worker.config import StepCache
from diffusion_worker.messages import RequestSpec, Tick
from diffusion_worker.runner.pipelines.view import view_of
from diffusion_worker.runner.step_cache import first_block
from support.families.rig.family import Family, as_tensor, in_float64
from support.runner.parallel_families import BY_NAME, runner_of
from support.runner.rank_processes import Rank
from support.runner.rig import OneRank

# So that about half of the few steps is skipped.
THRESHOLD = 0.3
STEPS = (8, 10, 7)


@dataclass(frozen=True)
class Accelerated:
    """What three requests got that joined one after the other, and how many rows of how many were skipped, in each tick."""

    results: list[torch.Tensor]
    rows: list[tuple[int, int]]


def accelerated(family: Family, kind: StepCache, parallel: Any, **config: int) -> Accelerated:
    """Run them on a family's tiny pipeline, in float64."""
    first_block.THRESHOLD = THRESHOLD
    runner = runner_of(family, parallel, torch.float64, step_cache=kind, **config)
    results: dict[str, torch.Tensor] = {}
    rows = []
    for tick in range(sum(STEPS)):
        if tick < len(STEPS):
            asked = family.request(tick + 1, STEPS[tick], 3.0 + tick)
            asked = in_float64(asked) | {"generator": torch.Generator().manual_seed(tick + 1), "output_type": "latent"}
            spec = RequestSpec(request_id=str(tick), prompt="", seed=tick + 1, steps=STEPS[tick], accelerated=True)
            runner.join(spec, functools.partial(family.call, view_of(runner.pipeline), asked))
        output = runner.execute_stepwise(Tick(tick))
        assert not output.errors, output.errors
        results |= {name: as_tensor(result) for name, result in output.images.items()}
        rows.append((output.skipped, output.rows))
        if len(results) == len(STEPS):
            return Accelerated([results[str(number)] for number in range(len(STEPS))], rows)
    raise AssertionError(f"only {sorted(results)} are done")


def two(rank: Rank) -> dict[str, Any]:
    """Each kind with its rows spread, and with each layer in two parts: how far from one rank, whether as much is skipped, and how much."""
    found = {}
    cases: list[tuple[str, StepCache, dict[str, int]]] = [
        ("StableDiffusion3Pipeline", StepCache.FIRST_BLOCK, {}),
        ("StableDiffusion3Pipeline", StepCache.TAYLOR_SEER, {}),
        ("FluxPipeline", StepCache.MAG_CACHE, {}),
        ("FluxPipeline", StepCache.FIRST_BLOCK, {"tensor": 2}),
        ("FluxPipeline", StepCache.TAYLOR_SEER, {"tensor": 2}),
    ]
    for name, kind, sizes in cases:
        one = accelerated(BY_NAME[name], kind, OneRank())
        with rank.group(**sizes) as parallel:
            many = accelerated(BY_NAME[name], kind, parallel, ranks=rank.world, **sizes)
        apart = max(float((mine - other).abs().max() / other.std()) for mine, other in zip(many.results, one.results, strict=True))
        skipped, rows = (sum(column) for column in zip(*many.rows, strict=True))
        found[f"{name} {kind} {sizes}"] = (apart, many.rows == one.rows, skipped / rows)
    return found
