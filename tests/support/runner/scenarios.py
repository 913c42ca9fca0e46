# SPDX-License-Identifier: Apache-2.0
"""Scenarios for the processes of the runner's tests with several ranks, but for those of the parallel kinds.

Real: the ranks and their groups, and the part of the runner that a scenario is about. Adapters have their manager, and prompts have text
encoders. Not real: the sizes and weights of models, some of which are a single layer.
"""

import copy
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import diffusers
import torch

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.diffusion_manager import DiffusionLoRAManager
from diffusion_worker.lora.request import LoadOptions, LoRARequest
from diffusion_worker.runner.loading.adapter_layers import add_on_all_ranks
from diffusion_worker.runner.model_call.call import ModelCall
from diffusion_worker.runner.model_runner import DiffusionModelRunner
from diffusion_worker.runner.parallel.rows import CallFailed, Parallel
from diffusion_worker.runner.parallel.vae_tiles import VaeTiles
from diffusion_worker.runner.stepping.request_state import DiffusionRequestState, mark_step
from diffusion_worker.runner.stepping.step_output import StepOutput
from diffusion_worker.runner.stepping.stepper import Stepper
from diffusion_worker.runner.stepping.suspending_module import SuspendingModule
from diffusion_worker.runner.stepping.tick_meter import TickMeter
from support.families.images.worded_images import worded_flux
from support.families.rig.family import build_seeded, randomise_zeros
from support.families.rig.texts import letters, tiny_umt5
from support.families.videos import wan
from support.lora.adapters import write_adapter
from support.runner.rank_processes import Rank
from support.runner.rig import request, runner_with
from support.worker.extensions import flip


def _call(rows: int) -> ModelCall:
    return ModelCall("transformer", "forward", {"hidden_states": torch.arange(rows * 3.0).reshape(rows, 3), "scale": 2.0})


def spread(rank: Rank) -> list[dict[str, Any]]:
    """Run calls of one to five rows through the group. For each, return the row numbers that this rank executed, and both outputs as all
    ranks get them."""
    seen = []

    def execute(call: ModelCall, part: slice) -> Any:
        states = call.arguments["hidden_states"]
        seen.append({"ran": list(range(part.start, part.stop))})
        return states * call.arguments["scale"], [states.sum(dim=1).to(torch.int32)]

    with rank.group() as parallel:
        for rows in range(1, 6):
            doubled, (sums,) = parallel.run([_call(rows)], execute)
            seen[-1] |= {"doubled": doubled.tolist(), "sums": sums.tolist()}
    return seen


def one_fails(rank: Rank) -> dict[str, Any]:
    """Run a call that raises on rank 1, then a sound one, in the same group. Return the first call's message, which every rank gets, and
    the second's result."""

    def execute(call: ModelCall, part: slice) -> torch.Tensor:
        if rank.rank == 1:
            raise RuntimeError("out of memory")
        return call.arguments["hidden_states"] + 0

    with rank.group() as parallel:
        try:
            parallel.run([_call(4)], execute)
        except CallFailed as error:
            message = str(error)
        after = parallel.run([_call(2)], lambda call, part: call.arguments["hidden_states"] + 1)
    return {"message": message, "after": after.tolist()}


class Refusing(torch.nn.Module):
    """A toy model, `2 * x`, which on rank 1 raises a RequestError (CapacityExceeded) when a row contains 13."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.rank == 1 and (hidden_states == 13).any():
            raise RequestError(ErrorCode.CAPACITY_EXCEEDED, "rank 1 has no room")
        return hidden_states * 2


def one_rank_refuses(rank: Rank) -> dict[str, Any]:
    """Step five requests, of which some raise on rank 1 between calls or in one, and one sets requires_grad there. Return errors,
    finished images and replays."""
    model: Any = SuspendingModule("transformer", Refusing(rank.rank))

    def body(first: float, error: Exception | None = None, *, changes: bool = False) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            states = model(torch.full((2, 3), first))
            mark_step()
            if error and rank.rank == 1:
                raise error
            if changes and rank.rank == 1:
                with suppress(Exception):  # a pipeline may do so
                    model.requires_grad_(True)
            states = model(states)
            mark_step()
            return states

        return run

    bodies = {
        "good": body(1),
        "between calls": body(2, RequestError(ErrorCode.INVALID_REQUEST, "rank 1 does not like it")),
        "in a call": body(13),
        "broken": body(3, RuntimeError("rank 1 broke")),
        "changing": body(4, changes=True),
    }
    with rank.group() as parallel:
        states = {name: DiffusionRequestState(request(name), run) for name, run in bodies.items()}
        stepper = Stepper(states, parallel, None)
        output = StepOutput()
        for _ in range(4):
            stepper.advance(list(states.values()), output, TickMeter(torch.device("cpu")))
    return {
        "errors": {name: [str(error.code), error.message] for name, error in sorted(output.errors.items())},
        "images": sorted(output.images),
        "replays": output.replays,
    }


def one_rank_cannot_load(rank: Rank) -> list[dict[str, Any]]:
    """Load four adapters in turn with room for one. The second is missing on rank 1, and the third has other bytes there.

    Return for each the error's message and code, empty without an error, the evicted ids, and the ids that are loaded afterwards.
    """
    torch.manual_seed(0)
    linear = torch.nn.Linear(6, 4)
    loras = DiffusionLoRAManager(
        {"transformer": torch.nn.Sequential(linear)}, denoiser="transformer", slots=1, cached=1, max_rank=4, device=torch.device("cpu")
    )
    found = []
    with tempfile.TemporaryDirectory() as folder, rank.group() as parallel:
        for number, name in enumerate(["first", "missing", "changed", "good"], start=1):
            path = Path(folder) / name
            path.mkdir()
            write_adapter(path, {"0": linear}, seed=rank.rank if name == "changed" else number)
            if name == "missing" and rank.rank == 1:
                shutil.rmtree(path)
            said, code, evicted = "", "", []
            try:
                evicted = add_on_all_ranks(loras, parallel, LoRARequest(name, number, str(path)), LoadOptions(evict=[1])).evicted
            except RequestError as error:
                said, code = error.message.replace(folder, ""), str(error.code)
            found.append({"said": said, "code": code, "evicted": evicted, "listed": loras.list_adapters()})
    return found


def worded_runner(kind: type[Any], parallel: Any, **options: Any) -> DiffusionModelRunner:
    """Return a runner on a tiny Flux or Wan that has a text encoder and tokenizer. All ranks get equal weights, as the seed is fixed."""

    def make() -> Any:
        if issubclass(kind, diffusers.WanPipeline):
            parts = wan.pipeline("WanPipeline", text_encoder=tiny_umt5(16), tokenizer=letters()).components
        else:
            parts = worded_flux("FluxPipeline").components
            parts["tokenizer"].model_max_length = 24
        return kind(**parts)

    return runner_with(build_seeded(make)(), parallel, **options)


def over_a_sleep(rank: Rank, **kind: int) -> dict[str, Any]:
    """Return three fingerprints of a small Flux that is split as `kind` says, each with a probe image. They are as loaded, after release
    and restore, and after a flipped weight bit."""
    with rank.group(**kind) as parallel:
        runner = worded_runner(diffusers.FluxPipeline, parallel, ranks=rank.world, **kind)
        before = runner.fingerprint(probe=True)
        runner.release()
        runner.restore()
        after = runner.fingerprint(probe=True)
        flip(runner.weights.tensors()[-1])
        return {"before": before, "after": after, "spoilt": runner.fingerprint(probe=True)}


def calls_of(module: torch.nn.Module) -> list[torch.Size]:
    """Record the shape of a module's first input in each later call, and return the growing list."""
    seen: list[torch.Size] = []
    module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape))
    return seen


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
    """Decode latents of many tiles and of one, and of one frame and two, on all ranks. Return by case how the images compare with one
    rank's; the case `a tile fails` has the messages of `_failing_tile`."""
    found: dict[str, Any] = {}
    with rank.group() as parallel:
        for kind in ("AutoencoderKL", "AutoencoderKLFlux2", "AutoencoderKLQwenImage"):
            # 5 x 3 tiles with the last ones truncated; one tile; tiles in one dimension.
            for height, width in ((29, 17), (8, 8), (8, 31)):
                frames = (1,) if kind == "AutoencoderKLQwenImage" else ()
                found[f"{kind} {height}x{width}"] = _decoded(parallel, kind, (2, 4, *frames, height, width))
        found["a copy in float64"] = _decoded(parallel, "AutoencoderKL", (2, 4, 29, 17), copied=True)
        found["two frames"] = _decoded(parallel, "AutoencoderKLQwenImage", (2, 4, 2, 17, 17))
        found["a tile fails"] = _failing_tile(parallel)
    return found


@torch.inference_mode()
def _decoded(parallel: Parallel, kind: str, shape: tuple[int, ...], *, copied: bool = False) -> dict[str, Any]:
    """Decode random latents on one rank and in tiles on all ranks. Return whether the images are `equal`, and `close` to 1e-5.

    `ran` and `alone` count the runs of the decoder's first layer on this rank and without other ranks. With `copied`, both are in float64.
    """
    z = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    one, many = _vae(kind), _vae(kind)
    one.enable_tiling()
    parallel.decode_tiles("vae", VaeTiles(many, parallel).decode)
    if copied:
        one, many, z = one.double(), copy.deepcopy(many).double(), z.double()
    ran_one, ran_many = calls_of(one.decoder.conv_in), calls_of(many.decoder.conv_in)
    expected = one.decode(z).sample
    output = parallel.run([ModelCall("vae", "decode", {"z": z}, many)], lambda call, rows: many.decode(**call.arguments)).sample
    close = bool((output - expected).abs().max() < 1e-5)
    return {"equal": torch.equal(output, expected), "close": close, "ran": len(ran_many), "alone": len(ran_one)}


@torch.inference_mode()
def _failing_tile(parallel: Parallel) -> list[str]:
    """Decode an image twice, and run out of memory in the first one's first tile on the last rank. Return the error's message and the
    second shape."""
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
            said.append(str(tuple(parallel.run([call], lambda call, rows: vae.decode(**call.arguments)).sample.shape)))
        except CallFailed as error:
            said.append(str(error))
    return said
