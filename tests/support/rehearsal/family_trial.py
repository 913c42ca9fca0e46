# SPDX-License-Identifier: Apache-2.0
"""A family's requests on the rehearsal's device, through the model runner: results as on the CPU, and the waits of each steady step.

A step is steady from the second step of a request to its last but one. The runner, its slabs, mirrors and meters are real. Three
requests run in a batch.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from diffusion_worker.messages import Tick
from diffusion_worker.runner.pipelines.view import modules_of
from diffusion_worker.runner.stepping.step_output import StepOutput
from support.families.rig.family import Arguments, Family
from support.families.rig.family_rig import Asked, FamilyRig, apart
from support.rehearsal.fake_cuda import rehearse
from support.rehearsal.fake_tensor import CUDA, FakeCudaTensor, inner_of
from support.rehearsal.mode import Rehearsal
from support.rehearsal.records import Cause

STEPS = 6
ASKED = Asked(seed=1, steps=STEPS)
COMPANY = (Asked(seed=2, steps=STEPS, guidance=3.0), Asked(seed=3, steps=STEPS, guidance=7.0))
STEADY = range(2, STEPS - 1)
# The largest difference from the CPU's result, in standard deviations of it.
TOLERANCE = 1e-4

# Families that the rehearsal cannot run, with the reason.
BEYOND = {
    "StableVideoDiffusionPipeline": "its scheduler calls torch.Tensor with a list of numbers of the device, which C++ reads by itself"
}
# The function that waits for a tick's times at its end.
METER = "StageSpan.seconds"


@dataclass
class Trial:
    """The outcome of a family: its distance from the CPU's result, and the causes of waits and copies in `ticks` steady steps."""

    family: str
    apart: float
    ticks: int = 0
    waits: Counter[Cause] = field(default_factory=Counter)
    copies: Counter[Cause] = field(default_factory=Counter)
    races: list[str] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """Return whether the result is at most `TOLERANCE` standard deviations from the CPU's."""
        return self.apart <= TOLERANCE

    def causes(self) -> list[str]:
        """Return a line for each cause with its number per step: first the waits, then the copies, each with the most frequent first."""
        each = max(1, self.ticks)
        kinds = (("wait", self.waits), ("copy", self.copies))
        return [f"  {kind} {count / each:.1f}  {cause}" for kind, found in kinds for cause, count in found.most_common()]


class RehearsedRig(FamilyRig):
    """A rig whose runner serves on the rehearsal's device; tensors among a request's arguments are there, as a user's would be."""

    def __init__(self, family: Family, rehearsal: Rehearsal, **config: Any) -> None:
        super().__init__(family, device=CUDA, **config)
        self.after_tick: Callable[[Tick], None] = lambda tick: None
        self.rehearsal = rehearsal
        execute = self.runner.execute_stepwise

        def execute_stepwise(tick: Tick, *frames: Any) -> StepOutput:
            output = execute(tick, *frames)
            self.after_tick(tick)
            return output

        self.runner.execute_stepwise = execute_stepwise  # type: ignore[method-assign]

    def _arguments(self, asked: Asked) -> Arguments:
        return {name: value if name == "generator" else _moved(value) for name, value in super()._arguments(asked).items()}

    def misplaced(self) -> list[str]:
        """List the weights that are not on the device."""
        named = ((f"{part}.{name}", tensor) for part, module in modules_of(self.pipeline).items() for name, tensor in _weights(module))
        return [name for name, tensor in named if not isinstance(tensor, FakeCudaTensor)]


def _weights(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _moved(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(CUDA)
    if isinstance(value, dict):
        return {key: _moved(item) for key, item in value.items()}
    return type(value)(map(_moved, value)) if isinstance(value, list | tuple) else value


def try_family(family: Family) -> Trial:
    """Run a family on the CPU and on the rehearsal's device, and return the comparison, of results in the same company if need be.

    Waits and copies are those of the steady steps, races those of all steps.

    Raises:
        AssertionError: a request failed, or weights are on the wrong device.
    """
    (truth,) = FamilyRig(family).together(ASKED)
    with rehearse() as rehearsal:
        rig = RehearsedRig(family, rehearsal)
        assert not (misplaced := rig.misplaced()), misplaced
        trial = Trial(family.name, 0.0)
        records = rehearsal.records

        def note(tick: Tick) -> None:
            if tick.number in STEADY:
                trial.ticks += 1
                trial.waits += records.waits
                trial.copies += records.copies
            trial.races += records.races
            records.clear()

        rig.after_tick = note
        # Without the check of the modules' attributes: some models move a table to the device at their first call.
        results, errors = rig.finish((ASKED, *COMPANY), (0, 0, 0))
        # Some calls cannot be merged on a CPU either, and are made apart.
        refused = [str(failure) for failure in rig.rank.failures if "device" in str(failure)]
        assert not errors and not refused, errors or refused
        found = inner_of(results["0"])
    trial.apart = apart(found, truth)
    if not trial.is_equal:
        # Company alone moves some results so far in float32, on a CPU as well.
        trial.apart = apart(found, FamilyRig(family).together(ASKED, *COMPANY)[0])
    return trial
