# SPDX-License-Identifier: Apache-2.0
"""Scenarios for the rank processes that run families: under the parallel kinds, and with step caches as well.

Real: the ranks and their groups, and the model runner with its fibers, merged calls, rows and kinds, on pipelines of diffusers. Not real:
the models, which are tiny and have random weights. In float64 a difference from one rank that remains is no rounding error. The processes
start once for many families and kinds.
"""

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from diffusion_worker.config import StepCache
from diffusion_worker.lora.request import LoRARequest
from diffusion_worker.messages import LoRAUse, Tick
from diffusion_worker.runner.model_call.call import ModelCall
from diffusion_worker.runner.model_call.faults import RankFault
from diffusion_worker.runner.pipelines.description import denoiser_of
from diffusion_worker.runner.step_cache import first_block
from support.families.images import flux, flux2, qwen, stable_diffusion, stable_diffusion_3, worded_images
from support.families.rig.family import Family, with_config
from support.families.rig.family_rig import Asked, FamilyRig, apart
from support.families.videos import ltx, wan
from support.lora.adapters import write_adapter
from support.runner.rank_processes import Rank
from support.runner.rig import OneRank, request
from support.runner.scenarios import calls_of, tiles
from support.sample import sample

MODULES = (flux, flux2, ltx, qwen, stable_diffusion, stable_diffusion_3, wan, worded_images)
# Latents, since decoding is independent of these kinds.
BY_NAME = {family.name: replace(family, output_type="latent") for module in MODULES for family in module.FAMILIES}
ADAPTER = LoRAUse(7, 1.0)


SEQUENCE_FAMILIES = ("FluxPipeline", "Flux2Pipeline", "QwenImagePipeline", "WanPipeline", "LTXPipeline", "StableDiffusion3Pipeline")
# The same families with other arguments: reference images, a time for each token, a second denoiser.
OTHER_ARGUMENTS = (
    "FluxKontextPipeline",
    "Flux2Pipeline (two references)",
    "QwenImageEditPipeline",
    "WanPipeline (a time for each token)",
    "LTXImageToVideoPipeline",
)
MORE_SEQUENCE_FAMILIES = (*sample(OTHER_ARGUMENTS, 2), "WanPipeline (two experts)")
TENSOR_FAMILIES = ("FluxPipeline", "Flux2Pipeline", "QwenImagePipeline")
# The roles of OmniGen's arguments depend on the name of its model's class, which sharding changes.
SHARDED_FAMILIES = (*sample(SEQUENCE_FAMILIES, 1), "StableDiffusionPipeline", "OmniGenPipeline")
# Over four ranks the kinds are joined. What is split in a family is the same.
FOUR_RANKS_SEQUENCE_FAMILIES = sample(SEQUENCE_FAMILIES, 2)
FOUR_RANKS_TENSOR_FAMILIES = sample(TENSOR_FAMILIES, 1)
# Rows of two requests with guidance share calls from the second step on.
REQUESTS = (Asked(1, 3, 5.0), Asked(2, 2, 3.0))
WITH_ADAPTER = (replace(REQUESTS[0], loras=[ADAPTER]), *REQUESTS[1:])
ACCELERATED = tuple(Asked(tick + 1, steps, 3.0 + tick, accelerated=True) for tick, steps in enumerate((8, 10, 7)))
# With this threshold about half of the few steps is skipped.
THRESHOLD = 0.3


@dataclass(frozen=True)
class Run:
    """The flat results of requests, with the denoiser's tokens of an image (0 in a U-Net) and bytes of weights on this rank.

    `rows` are the rows that a step cache skipped and all rows, in each tick.
    """

    results: list[torch.Tensor]
    rows: list[tuple[int, int]]
    tokens: int
    weights_bytes: int


@dataclass(frozen=True)
class Difference:
    """A run compared with that of one rank: the largest difference in standard deviations, and this rank's shares of tokens and weights."""

    apart: float
    tokens: float
    weights: float


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
    """Run requests until all are done, and return their results as float64 tensors in the order of `requests`.

    Each joins one tick after the one before. AssertionError if one fails or is repeated.
    """
    results, errors = rig.finish(requests, range(len(requests)))
    assert not errors, errors
    assert not rig.replays, rig.replays
    return [results[str(number)].double().clone() for number in range(len(requests))]


def difference(rank: Rank, family: Family, requests: tuple[Asked, ...] = REQUESTS, **sizes: int) -> Difference:
    """Run requests on all ranks, divided by the kinds in `sizes`, and undivided on rank 0, whose result is broadcast. Return the largest
    difference and this rank's shares."""
    with rank.group(**sizes) as parallel:
        many = run(family, parallel, requests, ranks=rank.world, **sizes)
        one = [run(family, OneRank(), requests) if rank.rank == 0 else many]
        dist.broadcast_object_list(one, 0)
    return compare(many, one[0])


def compare(run: Run, expected: Run) -> Difference:
    """Return the largest difference from the expected run, and this run's shares of the expected tokens and bytes of weights."""
    most = max(apart(one, other) for one, other in zip(run.results, expected.results, strict=True))
    return Difference(most, run.tokens / max(1, expected.tokens), run.weights_bytes / expected.weights_bytes)


def block_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Return every linear layer whose dotted path contains `blocks` or `layers`, keyed by that path."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {name: module for name, module in linears.items() if "blocks" in name or "layers" in name}


def two(rank: Rank) -> dict[str, Any]:
    """Run the families listed for each parallel kind over two ranks, and more checks of such ranks. Return the results by case."""
    found: dict[str, Any] = {
        f"{name} sequence": difference(rank, BY_NAME[name], sequence=2) for name in (*SEQUENCE_FAMILIES, *MORE_SEQUENCE_FAMILIES)
    }
    for name in TENSOR_FAMILIES:
        found[f"{name} tensor"] = difference(rank, BY_NAME[name], WITH_ADAPTER, tensor=2)
        adapted, plain = (run(BY_NAME[name], OneRank(), requests[:1]) for requests in (WITH_ADAPTER, REQUESTS))
        found[f"{name} adapter"] = compare(adapted, plain).apart
    for name in SHARDED_FAMILIES:
        found[f"{name} shard"] = _sharded(rank, name)
    more = {"tiles": tiles(rank), "an odd text": odd_text(rank), "gradients": gradients(rank), "sleep": sleep_in_parts(rank)}
    return found | more


def four(rank: Rank) -> dict[str, Any]:
    """Run families with rows spread as well, or with two kinds at once, over four ranks. Return the differences by case, and the
    `places`."""
    found: dict[str, Any] = {
        f"{name} sequence 2 x rows 2": difference(rank, BY_NAME[name], sequence=2) for name in FOUR_RANKS_SEQUENCE_FAMILIES
    }
    for name in FOUR_RANKS_TENSOR_FAMILIES:
        found[f"{name} tensor 2 x rows 2"] = difference(rank, BY_NAME[name], tensor=2)
        found[f"{name} tensor 4"] = difference(rank, with_config(BY_NAME[name], num_attention_heads=4), WITH_ADAPTER, tensor=4)
    found["QwenImagePipeline sequence 4"] = difference(rank, with_config(BY_NAME["QwenImagePipeline"], num_attention_heads=4), sequence=4)
    found["QwenImagePipeline sequence 2 x shard 2"] = difference(rank, BY_NAME["QwenImagePipeline"], sequence=2, shard=2)
    found["FluxPipeline shard 2 x rows 2"] = difference(rank, BY_NAME["FluxPipeline"], WITH_ADAPTER, shard=2)
    return found | {"places": places(rank)}


def places(rank: Rank) -> dict[str, Any]:
    """Return the dimensions of the mesh by kind, and the rows of four that this rank computes there; the error for an invalid mesh."""
    found = {}
    for sizes in ({"sequence": 2}, {"tensor": 2}, {"shard": 2}, {"sequence": 2, "shard": 2}, {"tensor": 4}, {"tensor": 3}):
        try:
            with rank.group(**sizes) as parallel:
                ran: list[int] = []

                def execute(call: ModelCall, rows: slice, ran: list[int] = ran) -> torch.Tensor:
                    ran.extend(range(rows.start, rows.stop))
                    return call.arguments["x"]

                parallel.compute_together("transformer", lambda call: call)
                x = torch.arange(4.0).reshape(4, 1)
                assert torch.equal(parallel.run([ModelCall("transformer", "forward", {"x": x})], execute), x)
                assert parallel.mesh is not None
                found[str(sizes)] = (dict(zip(parallel.mesh.mesh_dim_names or (), parallel.mesh.shape, strict=True)), ran)
        except ValueError as error:
            found[str(sizes)] = str(error)
    return found


def _sharded(rank: Rank, name: str) -> Any:
    """Compare sharded weights in float32 with whole weights and the rows spread in the same way."""
    runs = []
    for shard in (2, 1):
        with rank.group(shard=shard) as parallel:
            runs.append(run(BY_NAME[name], parallel, WITH_ADAPTER, torch.float32, ranks=rank.world, shard=shard))
    return compare(*runs)


def odd_text(rank: Rank) -> list[str]:
    """Run two prompts of 7 and 6 tokens with sequence=2, which 7 does not divide. Return the error of the first as `code: message`, then
    the names of those with a result."""
    family = BY_NAME["FluxPipeline"]
    with rank.group(sequence=2) as parallel:
        for _ in range(2):  # a second pipeline in the same group, as when a worker loads another one
            rig = FamilyRig(family, torch.float32, parallel, ranks=rank.world, sequence=2)
        texts = {"odd": 7, "even": 6}
        asked = [Asked(1, 2, 3.0, changes={"prompt_embeds": torch.randn(1, tokens, 16)}) for tokens in texts.values()]
        results, errors = rig.finish(asked, (0, 0))
    error, names = errors["0"], list(texts)
    return [f"{error.code}: {error.message}", *(names[int(number)] for number in results)]


def gradients(rank: Rank) -> dict[str, Any]:
    """Return by kind whether models run in inference mode, and whether with gradients."""
    found = {}
    for sizes in ({}, {"shard": 2}, {"sequence": 2}, {"tensor": 2}):
        with rank.group(**sizes) as parallel:
            runner = FamilyRig(BY_NAME["FluxPipeline"], torch.float32, parallel, ranks=rank.world, **sizes).runner
            runner.join(request("r"), lambda: (torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
            found[" ".join(sizes)] = runner.execute_stepwise(Tick(0)).images["r"]
    return found


def sleep_in_parts(rank: Rank) -> dict[str, Any]:
    """Load a tensor-parallel transformer from files and run requests before and after a release. Return if both results are equal
    (`same`), if the release left zeros (`emptied`), and the memory report."""
    family = BY_NAME["FluxPipeline"]
    with rank.group(tensor=2) as parallel, tempfile.TemporaryDirectory() as folder:
        family.build().transformer.save_pretrained(Path(folder) / "transformer")
        rig = FamilyRig(family, torch.float32, parallel, ranks=rank.world, tensor=2, model=folder)
        runner = rig.runner
        before, awake = finish(rig, REQUESTS), runner.weights.report()
        runner.weights.release()
        # On a CPU released memory reads as zero.
        emptied = not any(parameter.any() for parameter in runner.pipeline.transformer.parameters())
        runner.weights.restore()
        same = all(map(torch.equal, before, finish(rig, REQUESTS)))
    return {"same": same, "awake": awake, "emptied": emptied}


def step_caches(rank: Rank) -> dict[str, Any]:
    """Run step caches with rows spread and with layers split. Return by case the distance from one rank, whether as much is skipped, and
    the share."""
    first_block.THRESHOLD = THRESHOLD
    found = {}
    cases: list[tuple[str, StepCache, dict[str, int]]] = [
        ("StableDiffusion3Pipeline", StepCache.FIRST_BLOCK, {}),
        ("StableDiffusion3Pipeline", StepCache.TAYLOR_SEER, {}),
        ("FluxPipeline", StepCache.MAG_CACHE, {}),
        ("FluxPipeline", StepCache.FIRST_BLOCK, {"tensor": 2}),
        ("FluxPipeline", StepCache.TAYLOR_SEER, {"tensor": 2}),
    ]
    for name, kind, sizes in cases:
        one = run(BY_NAME[name], OneRank(), ACCELERATED, step_cache=kind)
        with rank.group(**sizes) as parallel:
            many = run(BY_NAME[name], parallel, ACCELERATED, step_cache=kind, ranks=rank.world, **sizes)
        skipped, rows = (sum(column) for column in zip(*many.rows, strict=True))
        found[f"{name} {kind} {sizes}"] = (compare(many, one).apart, many.rows == one.rows, skipped / rows)
    return found


def left_in_a_collective(rank: Rank) -> None:
    """Let attention run out of memory on rank 1 under sequence=2, while rank 0 waits in a collective. Each ends with exit code 70 on its
    RankFault."""
    with rank.group(sequence=2) as parallel:
        family = BY_NAME["FluxPipeline"]
        if rank.rank == 1:
            torch.nn.functional.scaled_dot_product_attention = _raise_out_of_memory
        try:
            run(family, parallel, ranks=2, sequence=2)
        except RankFault:
            os._exit(70)


def _raise_out_of_memory(*arguments: Any, **options: Any) -> torch.Tensor:
    raise torch.OutOfMemoryError("no memory left for a fake attention")
