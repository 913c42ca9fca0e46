# SPDX-License-Identifier: Apache-2.0
"""What the processes of the runner's tests with several ranks run."""

from collections.abc import Callable
from typing import Any

import torch

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.runner.stepping.request_state import DiffusionRequestState, mark_step
from diffusion_worker.runner.stepping.stepper import StepOutput, Stepper
from diffusion_worker.runner.stepping.suspending_module import SuspendingModule
from diffusion_worker.runner.stepping.tick_meter import TickMeter
from support.runner.rank_processes import Rank
from support.runner.rig import request


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

    def body(first: float, trouble: Callable[[], None] = lambda: None) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            states = model(torch.full((2, 3), first))
            mark_step()
            trouble()
            states = model(states)
            mark_step()
            return states

        return run

    def refuse() -> None:
        if rank.rank == 1:
            raise RequestError(ErrorCode.INVALID_REQUEST, "rank 1 does not like it")

    def change() -> None:
        if rank.rank == 1:
            try:
                model.requires_grad_(True)
            except Exception:  # a pipeline may do so
                return

    def break_down() -> None:
        if rank.rank == 1:
            raise RuntimeError("rank 1 broke")

    bodies = {
        "good": body(1),
        "between calls": body(2, refuse),
        "in a call": body(13),
        "broken": body(3, break_down),
        "changing": body(4, change),
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
