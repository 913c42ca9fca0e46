# SPDX-License-Identifier: Apache-2.0
"""Separation of requests in company: their seeds, their bits if they ask for exactness, and the model if one changes it."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from diffusion_worker.errors import RequestError
from diffusion_worker.lora.request import LoRARequest
from diffusion_worker.messages import LoRAUse, Tick
from diffusion_worker.runner.families import ModelRecord
from diffusion_worker.runner.loading.pipeline import load_pipeline
from diffusion_worker.runner.model_runner import DiffusionModelRunner, DuplicateRequest
from diffusion_worker.runner.stepping.request_state import mark_step
from diffusion_worker.runner.stepping.suspending_module import SuspendingModule
from support.runner.records import with_records
from support.runner.rig import RunnerRig, image_of_diffusers, levels_apart, request
from support.worker.process import DIGITS


@pytest.fixture(scope="module")
def rig() -> RunnerRig:
    return RunnerRig()


@pytest.fixture(scope="module")
def plain(rig: RunnerRig) -> Any:
    return load_pipeline(rig.config, torch.float32)


class Double(torch.nn.Module):
    """A model that doubles its input."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states * 2


@pytest.fixture(scope="module", autouse=True)
def _record() -> Iterator[None]:
    """Give `Double` a record in this file, so that its calls are merged."""
    with with_records(ModelRecord("Double", signatures={"forward": "hidden_states"})):
        yield


class FakePipeline:
    """A pipeline that calls its model so many times in each step, or so many times in all without steps; `made` counts the calls."""

    def __init__(self, *, calls: int, steps: int = 0, component: str = "transformer", whole: bool = False, batch_key: Any = None) -> None:
        self.model: Any = SuspendingModule(component, Double())
        self.calls, self.steps, self.whole, self.batch_key = calls, steps, whole, batch_key
        self.made = 0

    def __call__(self) -> torch.Tensor:
        states = torch.ones(1, 2)
        for _ in range(self.steps or 1):
            for _ in range(self.calls):
                states = self.model(states)
                self.made += 1
            if self.steps:
                mark_step()
        return states


@pytest.fixture
def joined(rig: RunnerRig) -> Any:
    """Provide a function that adds requests to the runner, by name, with these bodies; afterwards drop all requests."""

    def join(**bodies: Callable[[], Any]) -> None:
        for name, body in bodies.items():
            rig.runner.join(request(name), body)

    yield join
    rig.runner.drop_all()


def test_numbers_drawn_without_a_generator_are_the_requests_own(rig: RunnerRig, joined: Any) -> None:
    def draw() -> torch.Tensor:
        model: Any = SuspendingModule("transformer", Double())
        model(torch.ones(1, 2))
        mark_step()
        return torch.rand(3)

    def drawn(*names: str) -> dict[str, torch.Tensor]:
        joined(**dict.fromkeys(names, draw))
        rig.runner.execute_stepwise(Tick(1))
        return rig.runner.execute_stepwise(Tick(2)).images

    alone, company = drawn("a"), drawn("b", "a")
    assert torch.equal(alone["a"], company["a"])


def test_an_exact_request_in_company_is_bit_equal_to_diffusers_and_its_rows_stay_together(rig: RunnerRig, plain: Any) -> None:
    exact, other = request("exact", exact=True), request("other", seed=2)
    images, _ = rig.run(exact, other)
    np.testing.assert_array_equal(images["exact"], image_of_diffusers(plain, exact))
    assert sorted((call.rows, call.whole) for call in rig.denoiser_calls()) == [(2, False)] * 3 + [(2, True)] * 3


def test_a_worker_told_to_be_exact_shares_no_call_at_all() -> None:
    rig = RunnerRig(exact=True)
    rig.run(request("a"), request("b"))
    assert [call.whole for call in rig.denoiser_calls()] == [True] * 6


def test_a_pipeline_without_steps_ends_its_tick_after_each_call_so_that_others_advance(rig: RunnerRig, joined: Any) -> None:
    whole, stepped = FakePipeline(calls=20), FakePipeline(calls=1, steps=30)
    joined(whole=whole)
    rig.runner.execute_stepwise(Tick(1))
    assert whole.made == 8  # at the ninth call the pipeline counts as one without steps
    rig.runner.execute_stepwise(Tick(2))
    assert whole.made == 9
    joined(stepped=stepped)
    for number in range(3, 5):
        rig.runner.execute_stepwise(Tick(number))
    assert stepped.made == 2
    assert 10 < whole.made < 20


def test_a_pipeline_without_steps_is_cancelled_between_its_calls(rig: RunnerRig, joined: Any) -> None:
    whole = FakePipeline(calls=100)
    joined(whole=whole)
    rig.runner.execute_stepwise(Tick(1))
    rig.runner.execute_stepwise(Tick(2))
    made = whole.made
    assert 0 < made < 20
    output = rig.runner.execute_stepwise(Tick(3, leave=["whole"]))
    assert (whole.made, output.images, output.errors) == (made, {}, {})
    assert "whole" not in rig.runner._states


def test_frames_that_are_decoded_in_parts_are_cancelled_between_parts(rig: RunnerRig, joined: Any) -> None:
    decoding = FakePipeline(calls=50, component="vae")
    joined(decoding=decoding)
    rig.runner.execute_stepwise(Tick(1))
    assert decoding.made == 8


def test_a_pipeline_without_steps_is_made_to_its_end(rig: RunnerRig, joined: Any) -> None:
    joined(whole=FakePipeline(calls=12))
    outputs = [rig.runner.execute_stepwise(Tick(number)) for number in range(14)]
    (image,) = [output.images["whole"] for output in outputs if output.images]
    assert image.tolist() == [[4096.0, 4096.0]]


def test_a_request_that_changes_the_model_runs_while_the_others_wait(rig: RunnerRig, joined: Any) -> None:
    others, alone = FakePipeline(calls=1, steps=5), FakePipeline(calls=1, steps=3, whole=True)
    joined(others=others)
    rig.runner.execute_stepwise(Tick(1))
    joined(alone=alone)
    seen = []
    for number in range(2, 8):
        rig.runner.execute_stepwise(Tick(number))
        seen.append((others.made, alone.made))
    # The fourth tick of `alone` is the end of the request.
    assert seen == [(1, 1), (1, 2), (1, 3), (1, 3), (2, 3), (3, 3)]


def test_requests_with_another_batch_key_never_share_a_call(rig: RunnerRig, joined: Any) -> None:
    model = FakePipeline(calls=1, steps=1).model
    bodies = {name: FakePipeline(calls=1, steps=1, batch_key=key) for name, key in (("a", 1), ("b", 2), ("c", 1))}
    for body in bodies.values():
        body.model = model
    joined(**bodies)
    rig.parallel.calls.clear()
    rig.runner.execute_stepwise(Tick(1))
    assert sorted(call.rows for call in rig.parallel.calls) == [1, 2]


def test_only_the_requests_that_a_tick_names_advance_and_unknown_names_are_passed_over(rig: RunnerRig) -> None:
    rig.runner.execute_stepwise(Tick(1, [request("a", steps=4), request("b", steps=4)], advance=["a"]))
    rig.runner.execute_stepwise(Tick(2, advance=["a", "gone"]))
    assert (rig.runner._states["a"].steps_done, rig.runner._states["b"].steps_done) == (2, 0)
    rig.runner.drop_all()


def test_a_tick_with_a_running_request_among_its_new_ones_is_refused_and_changes_nothing(rig: RunnerRig) -> None:
    rig.runner.execute_stepwise(Tick(1, [request("old", steps=4)]))
    with pytest.raises(DuplicateRequest, match="tick 2: request 'old': expected an id that is new to this rank"):
        rig.runner.execute_stepwise(Tick(2, [request("new"), request("old")]))
    assert rig.runner._states["old"].steps_done == 1
    assert "new" not in rig.runner._states
    rig.runner.drop_all()


def test_a_tick_that_fails_takes_back_only_its_new_requests(rig: RunnerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.runner.execute_stepwise(Tick(1, [request("old", steps=4)]))

    def broken(*_: Any) -> None:
        raise OSError("the wire is gone")

    monkeypatch.setattr(rig.runner._stepper, "advance", broken)
    with pytest.raises(OSError, match="wire"):
        rig.runner.execute_stepwise(Tick(2, [request("new")]))
    assert rig.runner._states["old"].steps_done == 1
    assert "new" not in rig.runner._states
    rig.runner.drop_all()


def test_one_request_at_a_time_needs_a_prompt(rig: RunnerRig) -> None:
    with pytest.raises(RequestError, match="prompt: expected some text"):
        rig.runner.execute_model(request("one", prompt=""))


def test_one_request_at_a_time_fails_as_its_request_does(rig: RunnerRig) -> None:
    with pytest.raises(RequestError, match="divisible"):
        rig.runner.execute_model(request("one", height=33))


def test_a_pipeline_that_returns_no_image_is_refused_by_its_name(rig: RunnerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusion_worker.runner.pipelines.tasks.make_body", lambda pipeline, spec, **_: lambda: "a string")
    with pytest.raises(RequestError, match="StableDiffusion3Pipeline returned str, expected an image"):
        rig.runner.execute_model(request("one"))


def test_a_precision_of_one_request_is_not_the_others(rig: RunnerRig, joined: Any) -> None:
    layer = torch.nn.Linear(2, 2)

    def under_autocast() -> torch.dtype:
        model: Any = SuspendingModule("transformer", layer)
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(3):
                states = model(torch.ones(1, 2))
                mark_step()
        return states.dtype

    def plainly() -> list[Any]:
        model: Any = SuspendingModule("transformer", layer)
        seen = []
        for _ in range(3):
            seen += [model(torch.ones(1, 2)).dtype, torch.is_autocast_enabled("cpu")]
            mark_step()
        return seen

    joined(half=under_autocast, full=plainly)
    outputs = [rig.runner.execute_stepwise(Tick(number)) for number in range(4)]
    assert outputs[-1].images == {"half": torch.bfloat16, "full": [torch.float32, False] * 3}
    assert not torch.is_autocast_enabled("cpu")


def test_a_tick_says_how_long_the_denoisers_took(rig: RunnerRig) -> None:
    output = rig.runner.execute_stepwise(Tick(1, [request("a", prompt="a tick kumquatfen", steps=2)]))
    assert output.calls == 3  # two text encoders, one denoiser
    assert output.rows == 2
    assert 0 < output.denoise_seconds < 60
    assert output.peak_bytes == 0
    rig.runner.drop_all()


def test_steps_are_supported_by_what_has_a_scheduler_and_by_nothing_before_it_is_loaded(rig: RunnerRig) -> None:
    assert rig.runner.supports_step_mode()
    empty = DiffusionModelRunner(rig.config, torch.device("cpu"), rig.parallel)  # type: ignore[arg-type]
    assert not empty.supports_step_mode()


def test_a_request_whose_adapter_is_being_copied_waits_and_stops_no_other(rig: RunnerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusion_worker.lora.slot_bank.PIECE_BYTES", 131_072)  # an eighth of a fresh slot
    monkeypatch.setattr("diffusion_worker.runner.model_runner.PIECE_BYTES", 1)
    assert rig.runner.loras is not None
    rig.runner.loras.add_adapter(LoRARequest("stripes", 1, str(DIGITS / "loras" / "stripes")))
    styled = request("styled", loras=[LoRAUse(1, 1.0)])
    # Alone the request delays nobody, so its adapter is copied at once.
    output = rig.runner.execute_stepwise(Tick(0, [styled]))
    assert [each.request_id for each in output.progress] == ["styled"]
    alone, _ = rig.run(running=1)
    rig.runner.loras.release(forget=False)
    rig.runner.loras.restore()
    rig.runner.execute_stepwise(Tick(0, [request("base", steps=60)]))
    steps = [[each.request_id for each in rig.runner.execute_stepwise(Tick(1, [styled])).progress]]
    while steps[-1] == ["base"]:
        steps.append([each.request_id for each in rig.runner.execute_stepwise(Tick(len(steps))).progress])
    assert len(steps) > 5 and all("base" in names for names in steps), "a piece a tick, and no tick without the other's step"
    together, errors = rig.run(running=2)
    assert (errors, together.keys()) == ({}, {"base", "styled"})
    assert levels_apart(together["styled"], alone["styled"]) <= 3
    rig.runner.loras.remove_all_adapters()
