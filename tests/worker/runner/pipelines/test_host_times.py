# SPDX-License-Identifier: Apache-2.0
"""Times on the host: on an accelerator made of the CPU, schedulers make the same and no longer wait for their times."""

import copy
import inspect
from typing import Any

import diffusers
import pytest
import torch

from diffusion_worker.runner.families import schedulers
from diffusion_worker.runner.pipelines.host_times import with_times_on_host
from support.rehearsal.fake_cuda import rehearse
from support.rehearsal.fake_tensor import CUDA, inner_of

STEPS = 6
CPU = torch.device("cpu")
# Schedulers that have a place of their own in their tables.
COUNTING = ("EulerDiscreteScheduler", "FlowMatchEulerDiscreteScheduler", "DPMSolverMultistepScheduler", "UniPCMultistepScheduler")


def _denoise(name: str, device: torch.device, wrapped: bool, *, steady: Any = None) -> torch.Tensor:
    """Run a loop of steps with a scheduler of diffusers, as pipelines do, and return the result.

    `steady` is called before the third step and before the last. With `wrapped` the step gets its times on the host.
    """
    scheduler: Any = getattr(diffusers, name)()
    takes_device = "device" in inspect.signature(scheduler.set_timesteps).parameters
    scheduler.set_timesteps(STEPS, **{"device": device} if takes_device else {})
    step = with_times_on_host(type(scheduler).step) if wrapped else type(scheduler).step
    drawn = {"generator": torch.Generator().manual_seed(1)} if "generator" in inspect.signature(step).parameters else {}
    sample = torch.linspace(-1, 1, 48).reshape(1, 3, 4, 4).to(device)
    for number, time in enumerate(scheduler.timesteps):
        if steady is not None and number in (2, STEPS - 1):
            steady(scheduler)
        predicted = 0.3 * scheduler.scale_model_input(sample, time) if hasattr(scheduler, "scale_model_input") else 0.3 * sample
        sample = step(scheduler, predicted, time, sample, return_dict=False, **drawn)[0]
    return sample


def _waits_for_times(name: str, wrapped: bool) -> int:
    """Return how often the host waited for a value in the steps between the third and the last; assert the CPU's result."""
    seen: list[int] = []
    with torch.inference_mode(), rehearse() as rehearsal:

        def note(scheduler: Any) -> None:
            seen.append(sum(count for cause, count in rehearsal.records.waits.items() if cause.operation == "aten::_local_scalar_dense"))
            # The pipeline's own times stay where they are.
            assert scheduler.timesteps.is_cuda or "device" not in inspect.signature(scheduler.set_timesteps).parameters

        made = inner_of(_denoise(name, CUDA, wrapped, steady=note))
    torch.testing.assert_close(made, _denoise(name, CPU, wrapped=False), rtol=1e-5, atol=1e-5)
    return seen[1] - seen[0]


@pytest.mark.parametrize("name", [record.name for record in schedulers()])
def test_a_scheduler_that_looks_up_its_times_waits_no_longer(name: str) -> None:
    assert _waits_for_times(name, wrapped=False) >= STEPS - 4
    assert _waits_for_times(name, wrapped=True) == 0


@pytest.mark.parametrize("name", COUNTING)
def test_a_scheduler_that_counts_its_steps_makes_the_same(name: str) -> None:
    assert _waits_for_times(name, wrapped=True) == 0


class _Recording:
    """A scheduler of somebody else's, which notes at each step if its times are on the device."""

    def __init__(self, times: torch.Tensor) -> None:
        self.timesteps = times
        self.seen: list[tuple[bool, bool]] = []

    def step(self, output: Any, timestep: Any) -> None:
        self.seen.append((timestep.is_cuda, self.timesteps.is_cuda))


class DDIMScheduler(_Recording):
    """A recording scheduler whose name and module look like those of diffusers' own."""

    __module__ = "diffusers.schedulers.recording"


def test_only_times_of_the_schedule_and_schedulers_that_look_them_up_are_meant() -> None:
    step = with_times_on_host(_Recording.step)
    with rehearse() as rehearsal:
        own = _Recording(torch.arange(4, device=CUDA))
        step(own, None, own.timesteps[1])
        assert own.seen == [(True, True)]
        own = DDIMScheduler(own.timesteps)
        step(own, None, own.timesteps[1])
        step(own, None, timestep=own.timesteps[3])
        other = copy.deepcopy(own)
        step(other, None, own.timesteps[1])
        assert other.seen[-1] == (True, True)
        step(own, None, torch.tensor(2, device=CUDA))
        step(own, None, own.timesteps[1:2])
        step(own, None, own.timesteps[1].float())
        assert own.seen == [(False, False), (False, False), (True, True), (True, True), (True, True)]
        assert own.timesteps.is_cuda
        # All steps of a schedule copy it once.
        assert sum(count for cause, count in rehearsal.records.copies.items() if cause.function == "_on_host") == 1
        own.timesteps = torch.arange(5, device=CUDA)
        step(own, None, own.timesteps[4])
        assert own.seen[-1] == (False, False)
        assert sum(count for cause, count in rehearsal.records.copies.items() if cause.function == "_on_host") == 2


def test_an_error_of_a_step_leaves_the_times_where_they_were() -> None:
    def fail(scheduler: _Recording, output: Any, timestep: Any) -> None:
        raise ValueError(f"at {int(timestep)}")

    with rehearse():
        own = DDIMScheduler(torch.arange(4, device=CUDA))
        with pytest.raises(ValueError, match="at 2"):
            with_times_on_host(fail)(own, None, own.timesteps[2])
        assert own.timesteps.is_cuda
