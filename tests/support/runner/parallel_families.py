# SPDX-License-Identifier: Apache-2.0
"""Families under the parallel kinds, in real processes: how far each result is from that of one rank.

Real: the model runner with its fibers, merged calls, rows and kinds, on pipelines of diffusers. Not real: the models, which are
tiny and have random weights. In float64 what is left of a difference is no rounding.
"""

import tempfile
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from diffusion_worker.lora.request import LoRARequest
from diffusion_worker.messages import LoRAUse
from diffusion_worker.runner.pipelines.description import denoiser_of
from support.families.images import flux, flux2, qwen, stable_diffusion, stable_diffusion_3, worded_images
from support.families.rig.family import Family
from support.families.rig.family_rig import Asked, FamilyRig, apart
from support.families.videos import ltx, wan
from support.lora.adapters import write_adapter
from support.runner.rank_processes import Rank
from support.runner.rig import OneRank

MODULES = (flux, flux2, ltx, qwen, stable_diffusion, stable_diffusion_3, wan, worded_images)
# Latents: decoding has nothing to do with these kinds.
BY_NAME = {family.name: replace(family, output_type="latent") for module in MODULES for family in module.FAMILIES}
ADAPTER = LoRAUse(7, 1.0)


@dataclass(frozen=True)
class Run:
    """Results of requests, flat, and on this rank the denoiser's tokens of an image (0 in a U-Net) and its weights in bytes.

    `rows` are those that a step cache skipped and all of them, in each tick.
    """

    results: list[torch.Tensor]
    rows: list[tuple[int, int]]
    tokens: int
    weights_bytes: int


@dataclass(frozen=True)
class Difference:
    """A run beside that of one rank: the largest difference in standard deviations, and the parts of tokens and weights here."""

    apart: float
    tokens: float
    weights: float


# Rows of two requests with guidance share calls from the second step on.
REQUESTS = (Asked(1, 3, 5.0), Asked(2, 2, 3.0))
WITH_ADAPTER = (replace(REQUESTS[0], loras=[ADAPTER]), *REQUESTS[1:])


def run(family: Family, parallel: Any, requests: tuple[Asked, ...] = REQUESTS, dtype: torch.dtype = torch.float64, **config: Any) -> Run:
    """Run requests together on a family's tiny pipeline; each joins a tick after the one before."""
    rig = FamilyRig(family, dtype, parallel, **config)
    denoiser = denoiser_of(rig.pipeline)
    seen = calls_of(denoiser.proj_out) if hasattr(denoiser, "proj_out") else []
    if any(asked.loras for asked in requests):
        assert rig.runner.loras is not None
        # On every linear layer of the denoiser's blocks, and the same on every rank.
        with tempfile.TemporaryDirectory() as folder:
            write_adapter(folder, block_linears(denoiser_of(family.build())))
            rig.runner.loras.add_adapter(LoRARequest("adapter", ADAPTER.lora_int_id, folder))
    results = finish(rig, requests)
    local = [parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in denoiser.parameters()]
    tokens, weights_bytes = max((shape[1] for shape in seen), default=0), sum(each.nbytes for each in local)
    return Run(results, list(rig.rows), tokens, weights_bytes)


def finish(rig: FamilyRig, requests: tuple[Asked, ...]) -> list[torch.Tensor]:
    """Run requests together to their end, and return each result in float64."""
    results, errors = rig.finish(requests, range(len(requests)))
    assert not errors, errors
    assert not rig.replays, rig.replays
    return [results[str(number)].double().clone() for number in range(len(requests))]


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


def block_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers inside a model's blocks."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {name: module for name, module in linears.items() if "blocks" in name or "layers" in name}


def calls_of(module: nn.Module) -> list[torch.Size]:
    """The shapes of what a module is given from now on, one for each of its calls."""
    seen: list[torch.Size] = []
    module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape))
    return seen
