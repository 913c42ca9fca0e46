# SPDX-License-Identifier: Apache-2.0
"""The digits model on the rehearsal's device, from its checkpoint on: adapters, previews, sleep, cancellation and faults of the device.

Images are the CPU's within a level of 255.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from diffusion_worker.errors import ErrorCode, Fault
from diffusion_worker.lora.request import LoadOptions, LoRARequest
from diffusion_worker.messages import LoRAUse, SleepLevel, Tick
from diffusion_worker.runner.model_call.faults import RankFault
from support.rehearsal.fake_cuda import rehearse
from support.rehearsal.fake_tensor import CUDA
from support.rehearsal.family_trial import METER
from support.rehearsal.mode import Rehearsal
from support.runner.rig import Images, RunnerRig, levels_apart, request
from support.worker.process import DIGITS

pytestmark = pytest.mark.slow
ADAPTERS = ("stripes", "frame", "paper")
STEPS = 4
PLAIN = request("plain", steps=STEPS)
STRIPES = request("stripes", steps=STEPS, seed=2, loras=[LoRAUse(1, 1.0)])
BOTH = request("both", steps=STEPS, seed=3, loras=[LoRAUse(1, 0.5), LoRAUse(2, 0.8)])
PAPER = request("paper", steps=STEPS, seed=4, loras=[LoRAUse(3, 1.0)])


@dataclass
class Rehearsed:
    """A runner on the rehearsal's device, the rehearsal with its records, and the images that the CPU made of the same requests."""

    rig: RunnerRig
    rehearsal: Rehearsal
    truth: Images

    def waits(self) -> set[str]:
        """Return the names of the functions that waited for the device since the records were cleared."""
        return {cause.function for cause in self.rehearsal.records.waits}


def _with_adapters(rig: RunnerRig) -> RunnerRig:
    for number, name in enumerate(ADAPTERS, 1):
        rig.runner.add_lora(LoRARequest(name, number, str(DIGITS / "loras" / name)), LoadOptions())
    return rig


@pytest.fixture(scope="module")
def rehearsed() -> Iterator[Rehearsed]:
    truth, errors = _with_adapters(RunnerRig(max_loras=2)).run(PLAIN, STRIPES, BOTH)
    more, _ = _with_adapters(RunnerRig(max_loras=2)).run(PAPER)
    assert not errors
    with rehearse() as rehearsal:
        yield Rehearsed(_with_adapters(RunnerRig(device=CUDA, max_loras=2, dtype="float32")), rehearsal, truth | more)


@pytest.fixture(autouse=True)
def nothing_is_used_early(rehearsed: Rehearsed) -> Iterator[None]:
    rehearsed.rehearsal.records.clear()
    yield
    assert rehearsed.rehearsal.records.races == []


def test_rows_with_different_adapters_make_the_images_of_the_cpu(rehearsed: Rehearsed) -> None:
    images, errors = rehearsed.rig.run(PLAIN, STRIPES, BOTH)
    assert not errors
    for name, image in images.items():
        assert levels_apart(image, rehearsed.truth[name]) <= 1
    assert levels_apart(images["plain"], images["stripes"]) > 20


def test_steady_steps_with_adapters_wait_for_the_end_of_a_tick_alone(rehearsed: Rehearsed) -> None:
    rehearsed.rig.runner.execute_stepwise(Tick(0, [PLAIN, STRIPES, BOTH]))
    rehearsed.rig.runner.execute_stepwise(Tick(1))
    rehearsed.rehearsal.records.clear()
    rehearsed.rig.runner.execute_stepwise(Tick(2))
    assert rehearsed.waits() == {METER} and not rehearsed.rehearsal.records.copies
    rehearsed.rig.runner.drop_all()


def test_an_adapter_takes_the_slot_of_another_while_others_run_and_nothing_waits_for_its_copy(rehearsed: Rehearsed) -> None:
    rehearsed.rig.run(BOTH)
    rehearsed.rig.runner.execute_stepwise(Tick(0, [PLAIN]))
    rehearsed.rehearsal.records.clear()
    images, errors = rehearsed.rig.run(PAPER, running=1)
    assert not errors and levels_apart(images["paper"], rehearsed.truth["paper"]) <= 1
    assert levels_apart(images["plain"], rehearsed.truth["plain"]) <= 1
    assert not {name for name in rehearsed.waits() if name.startswith(("Segment", "_copy", "_Lists", "_sent", "RowAdapters"))}


def test_an_adapter_that_was_removed_leaves_the_model_as_it_was(rehearsed: Rehearsed) -> None:
    loras = rehearsed.rig.runner.loras
    assert loras is not None
    loras.remove_adapter(3)
    images, _ = rehearsed.rig.run(PLAIN, STRIPES)
    assert all(levels_apart(image, rehearsed.truth[name]) <= 1 for name, image in images.items())
    rehearsed.rig.runner.add_lora(LoRARequest("paper", 3, str(DIGITS / "loras" / "paper")), LoadOptions())


@pytest.mark.parametrize("level", list(SleepLevel))
def test_a_model_that_slept_makes_the_same_images(rehearsed: Rehearsed, level: SleepLevel) -> None:
    runner = rehearsed.rig.runner
    runner.release(level)
    weight = next(runner.pipeline.transformer.parameters())
    assert not weight.isfinite().all().item(), "a slab that sleeps holds no numbers"
    runner.restore()
    if level is SleepLevel.DISCARD:
        _with_adapters(rehearsed.rig)
    images, errors = rehearsed.rig.run(PLAIN, STRIPES)
    assert not errors
    assert all(levels_apart(image, rehearsed.truth[name]) <= 1 for name, image in images.items())


def test_previews_change_no_image_and_show_it_coming(rehearsed: Rehearsed) -> None:
    shown = request("plain", steps=STEPS, previews=2)
    outputs = [rehearsed.rig.runner.execute_stepwise(Tick(0, [shown]))]
    while not outputs[-1].images:
        assert not outputs[-1].errors
        outputs.append(rehearsed.rig.runner.execute_stepwise(Tick(len(outputs))))
    assert [preview.number for output in outputs for preview in output.previews] == [0, 1]
    assert levels_apart(outputs[-1].images["plain"].pixels(), rehearsed.truth["plain"]) <= 1


def test_a_request_that_is_cancelled_leaves_the_others_as_they_were(rehearsed: Rehearsed) -> None:
    rehearsed.rig.runner.execute_stepwise(Tick(0, [PLAIN, STRIPES]))
    rehearsed.rig.runner.execute_stepwise(Tick(1, leave=["stripes"]))
    images, errors = rehearsed.rig.run(running=1)
    assert not errors and levels_apart(images["plain"], rehearsed.truth["plain"]) <= 1


def _fail_at(rehearsal: Rehearsal, number: int, error: Exception) -> list[str]:
    """Make the matrix product of this number, counted from now, raise an error; return a list that gets the product's name then."""
    seen: list[str] = []
    left = [number]

    def before(name: str) -> None:
        left[0] -= name in ("aten::addmm", "aten::mm", "aten::bmm")
        if left[0] == 0 and not seen:
            seen.append(name)
            raise error

    rehearsal.before = before
    return seen


@pytest.mark.parametrize("at", [1, 20, 60])
def test_out_of_memory_at_any_operation_of_a_batch_splits_it_and_costs_no_image(rehearsed: Rehearsed, at: int) -> None:
    rehearsed.rig.runner.execute_stepwise(Tick(0, [PLAIN, STRIPES]))
    seen = _fail_at(rehearsed.rehearsal, at, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"))
    output = rehearsed.rig.runner.execute_stepwise(Tick(1))
    rehearsed.rehearsal.before = lambda name: None
    assert seen and output.split and not output.errors
    images, errors = rehearsed.rig.run(running=2)
    assert not errors
    assert all(levels_apart(image, rehearsed.truth[name]) <= 1 for name, image in images.items())


def test_out_of_memory_of_a_request_alone_is_its_own_error(rehearsed: Rehearsed) -> None:
    _fail_at(rehearsed.rehearsal, 5, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"))
    output = rehearsed.rig.runner.execute_stepwise(Tick(0, [PLAIN]))
    rehearsed.rehearsal.before = lambda name: None
    assert output.errors["plain"].code == ErrorCode.INSUFFICIENT_MEMORY


def test_an_error_of_the_device_ends_the_rank(rehearsed: Rehearsed) -> None:
    rehearsed.rig.runner.execute_stepwise(Tick(0, [PLAIN]))
    _fail_at(rehearsed.rehearsal, 5, torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RankFault) as raised:
        rehearsed.rig.runner.execute_stepwise(Tick(1))
    rehearsed.rehearsal.before = lambda name: None
    assert raised.value.fault is Fault.DEVICE
    rehearsed.rig.runner.drop_all()
