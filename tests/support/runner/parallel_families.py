# SPDX-License-Identifier: Apache-2.0
"""Families under the parallel kinds, in real processes: how far each result is from that of one rank.

Real: the model runner with its fibers, merged calls, rows and kinds, on pipelines of diffusers. Not real: the models, which are
tiny and have random weights. In float64 what is left of a difference is no rounding.
"""

import copy
import tempfile
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from diffusion_worker.lora.request import LoRARequest
from diffusion_worker.messages import LoRAUse, RequestSpec, Tick
from diffusion_worker.runner.model_runner import DiffusionModelRunner
from diffusion_worker.runner.pipelines.description import denoiser_of
from diffusion_worker.runner.pipelines.view import view_of
from support.families.images import flux, flux2, qwen, stable_diffusion, stable_diffusion_3, worded_images
from support.families.rig.family import Family, as_tensor, build_seeded, in_float64
from support.families.rig.family_rig import apart
from support.families.videos import ltx, wan
from support.lora.peft_adapters import write_adapter
from support.runner.rank_processes import Rank
from support.runner.rig import OneRank, runner_with

MODULES = (flux, flux2, ltx, qwen, stable_diffusion, stable_diffusion_3, wan, worded_images)
# Latents: decoding has nothing to do with these kinds.
BY_NAME = {family.name: replace(family, output_type="latent") for module in MODULES for family in module.FAMILIES}
ADAPTER = 7


@dataclass(frozen=True)
class Asked:
    """One request, and at which tick it joins."""

    seed: int
    steps: int
    guidance: float
    tick: int = 0
    adapted: bool = False
    accelerated: bool = False


@dataclass(frozen=True)
class Run:
    """Results of requests, flat, and on this rank the denoiser's tokens of an image (0 in a U-Net) and its weights in bytes.

    `rows` are those that a step cache skipped and all of them, in each tick.
    """

    results: list[torch.Tensor]
    rows: list[tuple[int, int]]
    tokens: int = 0
    weights_bytes: int = 0


@dataclass(frozen=True)
class Difference:
    """A run beside that of one rank: the largest difference in standard deviations, and the parts of tokens and weights here."""

    apart: float
    tokens: float
    weights: float


# Rows of two requests with guidance share calls from the second step on.
REQUESTS = (Asked(1, 3, 5.0), Asked(2, 2, 3.0, tick=1))
WITH_ADAPTER = (replace(REQUESTS[0], adapted=True), *REQUESTS[1:])


def with_heads(family: Family, heads: int) -> Family:
    """The same family on a denoiser with more attention heads than its own two."""

    def make() -> Any:
        pipeline = family.build()
        own = pipeline.transformer
        pipeline.register_modules(transformer=type(own).from_config(dict(own.config) | {"num_attention_heads": heads}))
        return pipeline

    return replace(family, build=build_seeded(make))


def runner_of(family: Family, parallel: Any, dtype: torch.dtype, **config: Any) -> DiffusionModelRunner:
    """A runner that serves a family's tiny pipeline."""
    return runner_with(family.build().to(dtype), parallel, dtype, **config)


def run(family: Family, parallel: Any, requests: tuple[Asked, ...] = REQUESTS, dtype: torch.dtype = torch.float64, **config: Any) -> Run:
    """Run requests together on a family's tiny pipeline."""
    runner = runner_of(family, parallel, dtype, **config)
    denoiser = denoiser_of(runner.pipeline)
    seen = calls_of(denoiser.proj_out) if hasattr(denoiser, "proj_out") else []
    if any(asked.adapted for asked in requests):
        assert runner.loras is not None
        # On every linear layer of the denoiser's blocks, and the same on every rank.
        with tempfile.TemporaryDirectory() as folder:
            write_adapter(folder, block_linears(denoiser_of(family.build())))
            runner.loras.add_adapter(LoRARequest("adapter", ADAPTER, folder))
    made = finish(family, runner, requests)
    local = [parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in denoiser.parameters()]
    return replace(made, tokens=max((shape[1] for shape in seen), default=0), weights_bytes=sum(each.nbytes for each in local))


def difference(rank: Rank, family: Family, requests: tuple[Asked, ...] = REQUESTS, **sizes: int) -> Difference:
    """A run under a kind beside that of one rank, which the first rank computes for all of them."""
    with rank.group(**sizes) as parallel:
        many = run(family, parallel, requests, ranks=rank.world, **sizes)
        one = [run(family, OneRank(), requests) if rank.rank == 0 else many]
        dist.broadcast_object_list(one, 0)
    return compare(many, one[0])


def compare(run: Run, expected: Run) -> Difference:
    """Measure a run against the one that is expected."""
    most = max(apart(one, other) for one, other in zip(run.results, expected.results, strict=True))
    return Difference(most, run.tokens / max(1, expected.tokens), run.weights_bytes / expected.weights_bytes)


def finish(family: Family, runner: DiffusionModelRunner, requests: tuple[Asked, ...]) -> Run:
    """Run requests together to their end."""
    results: dict[str, torch.Tensor] = {}
    rows = []
    for tick in range(20):
        for number, asked in enumerate(requests):
            if asked.tick == tick:
                loras = [LoRAUse(ADAPTER, 1.0)] if asked.adapted else []
                spec = RequestSpec(
                    request_id=str(number), prompt="", seed=asked.seed, steps=asked.steps, loras=loras, accelerated=asked.accelerated
                )
                runner.join(spec, _body(family, runner, asked))
        output = runner.execute_stepwise(Tick(tick))
        assert not output.errors, output.errors
        results |= {name: as_tensor(result).double() for name, result in output.images.items()}
        rows.append((output.skipped, output.rows))
        if len(results) == len(requests):
            break
    return Run([results[str(number)].clone() for number in range(len(requests))], rows)


def _body(family: Family, runner: DiffusionModelRunner, asked: Asked) -> Any:
    arguments = family.request(asked.seed, asked.steps, asked.guidance)
    if next(denoiser_of(runner.pipeline).parameters()).dtype is torch.float64:
        arguments = in_float64(arguments)
    arguments |= {"generator": torch.Generator().manual_seed(asked.seed), "output_type": family.output_type}
    return lambda: family.call(view_of(runner.pipeline), copy.copy(arguments))


def block_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers inside a model's blocks."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {name: module for name, module in linears.items() if "blocks" in name or "layers" in name}


def calls_of(module: nn.Module) -> list[torch.Size]:
    """The shapes of what a module is given from now on, one for each of its calls."""
    seen: list[torch.Size] = []
    module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape))
    return seen
