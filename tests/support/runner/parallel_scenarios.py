# SPDX-License-Identifier: Apache-2.0
"""Scenarios for the rank processes of the parallel tests, which start once for many families and kinds.

Real: the ranks, their groups, the model runner and diffusers' models. Not real: the models' sizes and weights, which are tiny and random.
"""

import copy
import os
import tempfile
from pathlib import Path
from typing import Any

import diffusers
import torch

from diffusion_worker.messages import Tick
from diffusion_worker.runner.model_call.call import ModelCall
from diffusion_worker.runner.model_call.faults import RankFault
from diffusion_worker.runner.parallel.rows import CallFailed, Parallel
from diffusion_worker.runner.parallel.vae_tiles import VaeTiles
from support.families.rig.family import randomise_zeros, with_config
from support.families.rig.family_rig import Asked, FamilyRig
from support.runner.parallel_families import BY_NAME, REQUESTS, WITH_ADAPTER, calls_of, compare, difference, finish, run
from support.runner.rank_processes import Rank
from support.runner.rig import OneRank, request

SEQUENCE_FAMILIES = ("FluxPipeline", "Flux2Pipeline", "QwenImagePipeline", "WanPipeline", "LTXPipeline", "StableDiffusion3Pipeline")
# Ways to use them with other arguments: reference images, a time for each token, a second denoiser.
MORE_SEQUENCE_FAMILIES = (
    "FluxKontextPipeline",
    "Flux2Pipeline (two references)",
    "QwenImageEditPipeline",
    "WanPipeline (a time for each token)",
    "WanPipeline (two experts)",
    "LTXImageToVideoPipeline",
)
TENSOR_FAMILIES = ("FluxPipeline", "Flux2Pipeline", "QwenImagePipeline")
# Roles of OmniGen's arguments are found by the name of its model's class, which sharding changes.
SHARDED_FAMILIES = (*SEQUENCE_FAMILIES, "StableDiffusionPipeline", "OmniGenPipeline")


def two(rank: Rank) -> dict[str, Any]:
    """Every kind over two ranks, every family."""
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
    """Kinds beside rows, over all four ranks, and two kinds at once."""
    found: dict[str, Any] = {f"{name} sequence 2 x rows 2": difference(rank, BY_NAME[name], sequence=2) for name in SEQUENCE_FAMILIES}
    for name in TENSOR_FAMILIES:
        found[f"{name} tensor 2 x rows 2"] = difference(rank, BY_NAME[name], tensor=2)
        found[f"{name} tensor 4"] = difference(rank, with_config(BY_NAME[name], num_attention_heads=4), WITH_ADAPTER, tensor=4)
    found["QwenImagePipeline sequence 4"] = difference(rank, with_config(BY_NAME["QwenImagePipeline"], num_attention_heads=4), sequence=4)
    found["QwenImagePipeline sequence 2 x shard 2"] = difference(rank, BY_NAME["QwenImagePipeline"], sequence=2, shard=2)
    found["FluxPipeline shard 2 x rows 2"] = difference(rank, BY_NAME["FluxPipeline"], WITH_ADAPTER, shard=2)
    return found | {"places": places(rank)}


def places(rank: Rank) -> dict[str, Any]:
    """The dimensions of the mesh by kind, this rank's place in it, and which rows of four it computes there."""
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
                assert torch.equal(parallel.run(ModelCall("transformer", "forward", {"x": x}), execute), x)
                assert parallel.mesh is not None
                found[str(sizes)] = (dict(zip(parallel.mesh.mesh_dim_names or (), parallel.mesh.shape, strict=True)), ran)
        except ValueError as error:
            found[str(sizes)] = str(error)
    return found


def _sharded(rank: Rank, name: str) -> Any:
    """Sharded weights in float32, beside whole weights with the rows spread in the same way."""
    runs = []
    for shard in (2, 1):
        with rank.group(shard=shard) as parallel:
            runs.append(run(BY_NAME[name], parallel, WITH_ADAPTER, torch.float32, ranks=rank.world, shard=shard))
    return compare(*runs)


def odd_text(rank: Rank) -> list[str]:
    """A prompt whose length does not divide, beside one whose does: an error of its own, before anything is computed."""
    family = BY_NAME["FluxPipeline"]
    with rank.group(sequence=2) as parallel:
        for _ in range(2):  # another pipeline in the same group, as when a worker takes up another one
            rig = FamilyRig(family, torch.float32, parallel, ranks=rank.world, sequence=2)
        texts = {"odd": 7, "even": 6}
        asked = [Asked(1, 2, 3.0, changes={"prompt_embeds": torch.randn(1, tokens, 16)}) for tokens in texts.values()]
        results, errors = rig.finish(asked, (0, 0))
    error, names = errors["0"], list(texts)
    return [f"{error.code}: {error.message}", *(names[int(number)] for number in results)]


def gradients(rank: Rank) -> dict[str, Any]:
    """Whether models run in inference mode, and whether with gradients, by kind."""
    found = {}
    for sizes in ({}, {"shard": 2}, {"sequence": 2}, {"tensor": 2}):
        with rank.group(**sizes) as parallel:
            runner = FamilyRig(BY_NAME["FluxPipeline"], torch.float32, parallel, ranks=rank.world, **sizes).runner
            runner.join(request("r"), lambda: (torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
            found[" ".join(sizes)] = runner.execute_stepwise(Tick(0)).images["r"]
    return found


def sleep_in_parts(rank: Rank) -> dict[str, Any]:
    """Layers over two ranks, from files: whether sleep empties them, and whether a request gets the same afterwards."""
    family = BY_NAME["FluxPipeline"]
    with rank.group(tensor=2) as parallel, tempfile.TemporaryDirectory() as folder:
        family.build().transformer.save_pretrained(Path(folder) / "transformer")
        rig = FamilyRig(family, torch.float32, parallel, ranks=rank.world, tensor=2, model=folder)
        runner = rig.runner
        before, awake = finish(rig, REQUESTS), runner.weights.report()
        runner.weights.release()
        # On a CPU memory that was given back reads as zero.
        emptied = not any(parameter.any() for parameter in runner.pipeline.transformer.parameters())
        runner.weights.restore()
        same = all(map(torch.equal, before, finish(rig, REQUESTS)))
    return {"same": same, "awake": awake, "emptied": emptied}


# Tiles of a VAE


def _vae(kind: str) -> Any:
    torch.manual_seed(5)
    if kind == "AutoencoderKLQwenImage":
        sizes = {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 1], "num_res_blocks": 1, "temperal_downsample": [False]}
        vae: Any = diffusers.AutoencoderKLQwenImage(latents_mean=[0.0] * 4, latents_std=[1.0] * 4, **sizes)
        vae.spatial_compression_ratio = 2
        vae.tile_sample_min_height = vae.tile_sample_min_width = 16
        vae.tile_sample_stride_height = vae.tile_sample_stride_width = 12
    else:
        levels = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
        vae = getattr(diffusers, kind)(block_out_channels=(4, 4), latent_channels=4, norm_num_groups=2, sample_size=16, **levels)
    randomise_zeros(vae)
    return vae


def tiles(rank: Rank) -> dict[str, Any]:
    """Latents of many tiles and of one, of one frame and of two: bit for bit what one rank makes of them."""
    found: dict[str, Any] = {}
    with rank.group() as parallel:
        for kind in ("AutoencoderKL", "AutoencoderKLFlux2", "AutoencoderKLQwenImage"):
            # 5 x 3 tiles, the last ones cut off; one tile; in one dimension.
            for height, width in ((29, 17), (8, 8), (8, 31)):
                frames = (1,) if kind == "AutoencoderKLQwenImage" else ()
                found[f"{kind} {height}x{width}"] = _decoded(parallel, kind, (2, 4, *frames, height, width))
        found["a copy in float64"] = _decoded(parallel, "AutoencoderKL", (2, 4, 29, 17), copied=True)
        found["two frames"] = _decoded(parallel, "AutoencoderKLQwenImage", (2, 4, 2, 17, 17))
        found["a tile fails"] = _failing_tile(parallel)
    return found


@torch.inference_mode()
def _decoded(parallel: Parallel, kind: str, shape: tuple[int, ...], *, copied: bool = False) -> dict[str, Any]:
    """Whether the image is equal to that of one rank, and how many times the decoder's first layer ran here and there."""
    z = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    one, many = _vae(kind), _vae(kind)
    one.enable_tiling()
    parallel.decode_tiles("vae", VaeTiles(many, parallel).decode)
    if copied:
        one, many, z = one.double(), copy.deepcopy(many).double(), z.double()
    ran_one, ran_many = calls_of(one.decoder.conv_in), calls_of(many.decoder.conv_in)
    expected = one.decode(z).sample
    output = parallel.run(ModelCall("vae", "decode", {"z": z}, many), lambda call, rows: many.decode(**call.arguments)).sample
    close = bool((output - expected).abs().max() < 1e-5)
    return {"equal": torch.equal(output, expected), "close": close, "ran": len(ran_many), "alone": len(ran_one)}


@torch.inference_mode()
def _failing_tile(parallel: Parallel) -> list[str]:
    """The last rank runs out of memory in a tile; the next image works."""
    vae = _vae("AutoencoderKL")

    def fail_once(module: torch.nn.Module, inputs: Any) -> None:
        hook.remove()
        if parallel.rank == parallel.world - 1:
            raise RuntimeError("out of memory")

    hook = vae.decoder.conv_in.register_forward_pre_hook(fail_once)
    parallel.decode_tiles("vae", VaeTiles(vae, parallel).decode)
    call = ModelCall("vae", "decode", {"z": torch.randn(1, 4, 17, 17)})
    said = []
    for _ in range(2):
        try:
            said.append(str(tuple(parallel.run(call, lambda call, rows: vae.decode(**call.arguments)).sample.shape)))
        except CallFailed as error:
            said.append(str(error))
    return said


# Failures


def left_in_a_collective(rank: Rank) -> None:
    """One rank fails in a block of a model whose tokens are split, while the other waits for it in an attention."""
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
