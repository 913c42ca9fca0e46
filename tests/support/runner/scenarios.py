# SPDX-License-Identifier: Apache-2.0
"""Scenarios for the processes of the runner's tests with several ranks, but for those of the parallel kinds.

Real: the ranks and their groups, and the runner or the part of it that a scenario is about; for adapters, their manager. Not real: the
models, of which one is a single layer.
"""

import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from diffusion_worker.config import StepCache
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.diffusion_manager import DiffusionLoRAManager
from diffusion_worker.lora.request import LoadOptions, LoRARequest
from diffusion_worker.runner.loading.adapter_layers import add_on_all_ranks
from diffusion_worker.runner.model_call.call import ModelCall
from diffusion_worker.runner.parallel.rows import CallFailed
from diffusion_worker.runner.step_cache import first_block
from diffusion_worker.runner.stepping.request_state import DiffusionRequestState, mark_step
from diffusion_worker.runner.stepping.stepper import StepOutput, Stepper
from diffusion_worker.runner.stepping.suspending_module import SuspendingModule
from diffusion_worker.runner.stepping.tick_meter import TickMeter
from support.families.rig.family_rig import Asked
from support.lora.adapters import write_adapter
from support.runner.parallel_families import BY_NAME, compare, run
from support.runner.rank_processes import Rank
from support.runner.rig import OneRank, request
from support.runner.wordy_pipelines import WordyFlux, runner_of
from support.worker.extensions import flip

ACCELERATED = tuple(Asked(tick + 1, steps, 3.0 + tick, accelerated=True) for tick, steps in enumerate((8, 10, 7)))
# So that about half of the few steps is skipped.
THRESHOLD = 0.3


def _call(rows: int) -> ModelCall:
    return ModelCall("transformer", "forward", {"hidden_states": torch.arange(rows * 3.0).reshape(rows, 3), "scale": 2.0})


def spread(rank: Rank) -> list[dict[str, Any]]:
    """Calls of one to five rows: which rows ran here, and the gathered result."""
    seen = []

    def execute(call: ModelCall, part: slice) -> Any:
        states = call.arguments["hidden_states"]
        seen.append({"ran": list(range(part.start, part.stop))})
        return states * call.arguments["scale"], [states.sum(dim=1).to(torch.int32)]

    with rank.group() as parallel:
        for rows in range(1, 6):
            doubled, (sums,) = parallel.run(_call(rows), execute)
            seen[-1] |= {"doubled": doubled.tolist(), "sums": sums.tolist()}
    return seen


def one_fails(rank: Rank) -> dict[str, Any]:
    """Rank 1 raises in a shared call; the call after it must work."""

    def execute(call: ModelCall, part: slice) -> torch.Tensor:
        if rank.rank == 1:
            raise RuntimeError("out of memory")
        return call.arguments["hidden_states"] + 0

    with rank.group() as parallel:
        try:
            parallel.run(_call(4), execute)
        except CallFailed as error:
            message = str(error)
        after = parallel.run(_call(2), lambda call, part: call.arguments["hidden_states"] + 1)
    return {"message": message, "after": after.tolist()}


class Refusing(torch.nn.Module):
    """Doubles its rows; on rank 1 it refuses one value."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.rank == 1 and (hidden_states == 13).any():
            raise RequestError(ErrorCode.CAPACITY_EXCEEDED, "rank 1 has no room")
        return hidden_states * 2


def one_rank_refuses(rank: Rank) -> dict[str, Any]:
    """Five requests of two steps; three of them go wrong on rank 1 only, and one would change the model there."""
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
    """Adapters for a full memory: one that rank 1 does not find, one of which it reads other bytes, and a good one."""
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


def over_a_sleep(rank: Rank, **kind: int) -> dict[str, Any]:
    """Fingerprints of ranks that make each call together, before and after a sleep, and with a bit of the weights flipped."""
    with rank.group(**kind) as parallel:
        runner = runner_of(WordyFlux, parallel, ranks=rank.world, **kind)
        before = runner.fingerprint(probe=True)
        runner.release()
        runner.restore()
        after = runner.fingerprint(probe=True)
        flip(runner.weights.tensors()[-1])
        return {"before": before, "after": after, "spoilt": runner.fingerprint(probe=True)}


def step_caches(rank: Rank) -> dict[str, Any]:
    """Each kind with its rows spread, and with each layer in two parts: how far from one rank, whether as much is skipped, and how much."""
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
