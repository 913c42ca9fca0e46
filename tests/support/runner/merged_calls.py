# SPDX-License-Identifier: Apache-2.0
"""Requests whose merged calls fail or draw, on a toy model, for one rank and as scenarios for processes of several.

Real: the stepper, the fibers, the merging, and in the scenarios the ranks and their groups. Not real: the model, and the errors it raises.
"""

from collections.abc import Callable
from typing import Any

import torch

from diffusion_worker.runner.model_call.call import ModelCall
from diffusion_worker.runner.parallel.rows import Execute, Parallel
from diffusion_worker.runner.stepping.request_state import DiffusionRequestState, mark_step
from diffusion_worker.runner.stepping.step_output import StepOutput
from diffusion_worker.runner.stepping.stepper import Stepper
from diffusion_worker.runner.stepping.suspending_module import SuspendingModule
from diffusion_worker.runner.stepping.tick_meter import TickMeter
from support.runner.rank_processes import Rank
from support.runner.rig import request

STEPS = 3
# Seeds of the requests that are run for their random numbers.
SEEDS = {"a": 5, "b": 6, "c": 7}
Body = Callable[[], torch.Tensor]


class Toy(torch.nn.Module):
    """A model that adds one to its input. `before` gets the input first, and may raise."""

    def __init__(self, before: Callable[[torch.Tensor], None] = lambda states: None) -> None:
        super().__init__()
        self.before = before

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.before(hidden_states)
        return hidden_states + 1


class Drawing(Toy):
    """A model that adds a random number of torch's default generator to each element of its input. It does not call `before`."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + torch.randn(hidden_states.shape)


def body(model: torch.nn.Module, first: float = 0.0, *, rows: int = 1, width: int = 2, device: str = "cpu", **more: Any) -> Body:
    """Return a function that acts as a pipeline: `STEPS` steps with a call of `rows` rows each, which start with `first` everywhere.

    `more` are other arguments of each call.
    """
    stand_in: Any = SuspendingModule("transformer", model)

    def run() -> torch.Tensor:
        states = torch.full((rows, width), first, device=device)
        for _ in range(STEPS):
            states = stand_in(states, **more)
            mark_step(STEPS)
        return states

    return run


def serve(parallel: Any, bodies: dict[str, Body], *, stepper: Stepper | None = None, **seeds: int) -> StepOutput:
    """Step the pipelines `bodies` together, each as a request with its name, until all have ended. Return the output with images and
    errors; `seeds` has the seeds of requests by name, 1 by default."""
    states = {name: DiffusionRequestState(request(name, seed=seeds.get(name, 1)), run) for name, run in bodies.items()}
    stepper = stepper or Stepper({}, parallel, None)
    stepper._states.update(states)
    output = StepOutput()
    for _ in range(2 * STEPS):
        stepper.advance(list(stepper._states.values()), output, TickMeter(torch.device("cpu")))
    assert not stepper._states
    return output


def failing_over(rows: int, error: Exception) -> Callable[[torch.Tensor], None]:
    """Return a check, for a `Toy`, that raises `error` if its input has more than `rows` rows."""

    def check(states: torch.Tensor) -> None:
        if len(states) > rows:
            raise error

    return check


def merged_calls_fail(rank: Rank) -> dict[str, Any]:
    """Run four requests whose merged calls fail on one rank or on both, while they are built or run.

    Return for each case the finished images, the errors, and the number of requests in each call, which must be equal on all ranks.
    """
    cases: dict[str, dict[str, Any]] = {
        "running on rank 1": {"error": RuntimeError("rows of a kind"), "on": (1,)},
        "running on both": {"error": IndexError("rows of a kind"), "on": (0, 1)},
        "building on rank 1": {"meta": (1,)},
        "building on both": {"meta": (0, 1)},
        "building on rank 1, computed together": {"meta": (1,), "together": True},
        "memory on rank 1": {"error": torch.OutOfMemoryError("out of memory"), "on": (1,)},
    }
    return {name: _case(rank, **case) for name, case in cases.items()}


def _case(
    rank: Rank, *, error: Exception | None = None, on: tuple[int, ...] = (), meta: tuple[int, ...] = (), together: bool = False
) -> dict[str, Any]:
    model = Toy(failing_over(1, error)) if error is not None and rank.rank in on else Toy()
    with rank.group(**({"sequence": 2} if together else {})) as parallel:
        if together:
            parallel.compute_together("transformer", lambda call: call)
        made = counted(parallel)
        # A tensor of another device in one of the requests cannot be concatenated with the others.
        bodies = {name: body(model, device="meta" if name == "b" and rank.rank in meta else "cpu") for name in "abcd"}
        output = serve(parallel, bodies)
    return {"images": sorted(output.images), "errors": sorted(output.errors), "calls": made}


def draws(rank: Rank) -> dict[str, Any]:
    """Return the result of a request of two rows whose model draws, alone and in company, and the requests in each call there."""
    with rank.group() as parallel:
        alone = serve(parallel, {"a": body(Drawing(), rows=2)}, **SEEDS).images["a"]
        made, model = counted(parallel), Drawing()
        together = serve(parallel, {name: body(model, rows=2) for name in SEEDS}, **SEEDS).images
    return {"alone": alone.tolist(), "together": together["a"].tolist(), "calls": made}


def counted(parallel: Parallel) -> list[int]:
    """Replace `parallel.run` by one that also counts, and return the list that it fills. Each merged call, also one that fails, adds its
    number of requests."""
    made: list[int] = []
    run = parallel.run

    def counting(calls: list[ModelCall], execute: Execute) -> Any:
        made.append(len(calls))
        return run(calls, execute)

    parallel.run = counting  # type: ignore[method-assign]
    return made
