# SPDX-License-Identifier: Apache-2.0
"""Families under the parallel kinds, in real processes: how far each result is from that of one rank.

Requests go through the model runner, so that fibers, merged calls, rows and kinds work together. In float64 what is left
of a difference is no rounding.
"""

import copy
import tempfile
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from diffusion_worker.config import WorkerConfig
from diffusion_worker.lora.request import LoRARequest
from diffusion_worker.messages import LoRAUse, RequestSpec, Tick
from diffusion_worker.runner.model_runner import DiffusionModelRunner
from diffusion_worker.runner.pipelines.description import denoiser_of
from diffusion_worker.runner.pipelines.view import view_of
from support.families.images import flux, flux2, qwen, stable_diffusion, stable_diffusion_3, worded_images
from support.families.rig.family import Family, as_tensor, in_float64, randomise_zeros
from support.families.videos import ltx, wan
from support.lora.peft_adapters import write_adapter
from support.runner.rank_processes import Rank
from support.runner.rig import OneRank

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


@dataclass(frozen=True)
class Run:
    """What requests got, and what it took: tokens of an image in the denoiser (0 in a U-Net) and its weights in bytes, on this rank."""

    results: list[torch.Tensor]
    tokens: int
    weights_bytes: int


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

    def build() -> Any:
        pipeline = family.build()
        torch.manual_seed(20)
        own = pipeline.transformer
        pipeline.register_modules(transformer=type(own).from_config(dict(own.config) | {"num_attention_heads": heads}))
        randomise_zeros(pipeline.transformer)
        return pipeline

    return replace(family, build=build)


def runner_of(family: Family, parallel: Any, dtype: torch.dtype, **config: Any) -> DiffusionModelRunner:
    """A runner that serves a family's tiny pipeline."""
    runner = DiffusionModelRunner(WorkerConfig(**{"model": "(in memory)", "served_name": "tiny"} | config), torch.device("cpu"), parallel)
    pipeline = family.build()
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            part.to(dtype)
    runner.adopt(pipeline, dtype, lambda done, total: None)
    return runner


def run(family: Family, parallel: Any, requests: tuple[Asked, ...] = REQUESTS, dtype: torch.dtype = torch.float64, **config: Any) -> Run:
    """Run requests together on a family's tiny pipeline."""
    runner = runner_of(family, parallel, dtype, **config)
    denoiser = denoiser_of(runner.pipeline)
    tokens = [0]
    if hasattr(denoiser, "proj_out"):
        denoiser.proj_out.register_forward_pre_hook(lambda module, inputs: tokens.append(inputs[0].shape[1]))
    if any(asked.adapted for asked in requests):
        _load_adapter(runner, family)
    return Run(results_of(family, runner, requests), max(tokens), sum(map(_local_bytes, denoiser.parameters())))


def difference(rank: Rank, family: Family, requests: tuple[Asked, ...] = REQUESTS, **sizes: int) -> Difference:
    """A run under a kind beside that of one rank."""
    with rank.group(**sizes) as parallel:
        many = run(family, parallel, requests, ranks=rank.world, **sizes)
        one = _shared(run(family, OneRank(), requests) if rank.rank == 0 else many)
    return Difference(apart(many, one), many.tokens / max(1, one.tokens), many.weights_bytes / one.weights_bytes)


def _shared(run: Run) -> Run:
    """The run of the first rank, on all of them: what one rank makes is computed once."""
    results = [result.clone() for result in run.results]
    numbers = torch.tensor([run.tokens, run.weights_bytes])
    for tensor in (*results, numbers):
        dist.broadcast(tensor, 0)
    return Run(results, *numbers.tolist())


def apart(run: Run, expected: Run) -> float:
    """The largest difference, in standard deviations of what is expected."""
    pairs = list(zip(run.results, expected.results, strict=True))
    assert all(other.isfinite().all() and float(other.std()) > 1e-4 for _, other in pairs), "nothing to compare with"
    return max(float((one - other).abs().max() / max(1.0, float(other.std()))) for one, other in pairs)


def results_of(family: Family, runner: DiffusionModelRunner, requests: tuple[Asked, ...]) -> list[torch.Tensor]:
    """What requests get that run together, flat."""
    results: dict[str, torch.Tensor] = {}
    for tick in range(20):
        for number, asked in enumerate(requests):
            if asked.tick == tick:
                loras = [LoRAUse(ADAPTER, 1.0)] if asked.adapted else []
                runner.join(RequestSpec(request_id=str(number), prompt="", seed=asked.seed, loras=loras), _body(family, runner, asked))
        output = runner.execute_stepwise(Tick(tick))
        assert not output.errors, output.errors
        results |= {name: as_tensor(result).double() for name, result in output.images.items()}
        if len(results) == len(requests):
            break
    return [results[str(number)].clone() for number in range(len(requests))]


def _body(family: Family, runner: DiffusionModelRunner, asked: Asked) -> Any:
    arguments = family.request(asked.seed, asked.steps, asked.guidance)
    if next(denoiser_of(runner.pipeline).parameters()).dtype is torch.float64:
        arguments = in_float64(arguments)
    arguments |= {"generator": torch.Generator().manual_seed(asked.seed), "output_type": family.output_type}
    return lambda: family.call(view_of(runner.pipeline), copy.copy(arguments))


def _load_adapter(runner: DiffusionModelRunner, family: Family) -> None:
    """An adapter of every linear layer of the denoiser's blocks, the same on every rank."""
    assert runner.loras is not None
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(folder, block_linears(denoiser_of(family.build())))
        runner.loras.add_adapter(LoRARequest("adapter", ADAPTER, folder))


def block_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers inside a model's blocks."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and ("blocks" in name or "layers" in name)
    }


def _local_bytes(parameter: torch.Tensor) -> int:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return int(local.numel() * local.element_size())
