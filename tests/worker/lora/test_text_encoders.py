# SPDX-License-Identifier: Apache-2.0
"""Adapters in the life of requests: parts for text encoders, slots that are kept while they are used, and mixed calls."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.diffusion_manager import DiffusionLoRAManager
from diffusion_worker.lora.request import LoadOptions, LoRARequest
from diffusion_worker.messages import LoRAUse, Tick
from diffusion_worker.runner.loading.pipeline import load_pipeline
from diffusion_worker.runner.stepping.request_state import DiffusionRequestState, mark_step
from diffusion_worker.runner.stepping.step_output import StepOutput
from diffusion_worker.runner.stepping.stepper import Stepper
from diffusion_worker.runner.stepping.suspending_module import SuspendingModule
from diffusion_worker.runner.stepping.tick_meter import TickMeter
from support.lora.adapters import write_adapter
from support.runner.rig import OneRank, RunnerRig, image_of_diffusers, levels_apart, request
from support.worker.process import DIGITS

STRIPES = DIGITS / "loras" / "stripes"
RANK = 4
ENCODER_LAYERS = ("self_attn.q_proj", "self_attn.v_proj", "mlp.fc1")


def linears_of(pipeline: Any, component: str) -> dict[str, nn.Linear]:
    """Return the linear layers of a component that the test's adapters change, keyed by `component.path`.

    In a text encoder and in the denoiser they have different names.
    """
    found = getattr(pipeline, component).named_modules()
    ends = ENCODER_LAYERS if component.startswith("text") else ("attn.to_q", "ff.net.2")
    return {f"{component}.{name}": part for name, part in found if isinstance(part, nn.Linear) and name.endswith(ends)}


def write_parts(path: Path, pipeline: Any, components: list[str], *, seed: int = 5) -> dict[str, torch.Tensor]:
    """Write an adapter file for some components in the naming of diffusers; return the change that it makes to each weight."""
    generator = torch.Generator().manual_seed(seed)
    tensors, added = {}, {}
    for component in components:
        for name, linear in linears_of(pipeline, component).items():
            a = torch.randn(RANK, linear.in_features, generator=generator) / linear.in_features**0.5
            b = torch.randn(linear.out_features, RANK, generator=generator) / 4
            tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
            added[name] = b @ a
    save_file(tensors, path)
    return added


def merged_by_hand(rig: RunnerRig, added: dict[str, torch.Tensor], scale: float = 1.0) -> Any:
    """Load the pipeline and add `scale` times each change to the weight that its key `component.path` names.

    It is the reference without LoRA layers.
    """
    pipeline = load_pipeline(rig.config, torch.float32)
    with torch.no_grad():
        for name, delta in added.items():
            component, _, path = name.partition(".")
            getattr(pipeline, component).get_submodule(path).weight += scale * delta
    return pipeline


class Adapters:
    """A runner of the digits model with adapters 1 to 4.

    Adapter 1 changes the first text encoder, 2 the second and the denoiser, and 3 the denoiser; 4 is the example stripes.
    """

    def __init__(self, folder: Path, **config: Any) -> None:
        self.rig = RunnerRig(**config)
        assert self.rig.runner.loras is not None
        self.loras: DiffusionLoRAManager = self.rig.runner.loras
        plain = load_pipeline(self.rig.config, torch.float32)
        self.parts = {1: ["text_encoder"], 2: ["text_encoder_2", "transformer"], 3: ["transformer"]}
        self.added = {}
        for number, components in self.parts.items():
            path = folder / f"{number}.safetensors"
            self.added[number] = write_parts(path, plain, components, seed=number)
            loaded = self.loras.add_adapter(LoRARequest(f"adapter {number}", number, str(path)))
            assert loaded.components == components
        self.loras.add_adapter(LoRARequest("stripes", 4, str(STRIPES)))

    def encoded(self, loras: list[LoRAUse], prompt: str) -> list[str]:
        """Run a request of one step with these adapters, and return the sorted names of the text encoders that it called."""
        self.rig.run(request("asked", prompt=prompt, steps=1, loras=loras))
        return sorted({call.component for call in self.rig.parallel.calls if call.component.startswith("text_encoder")})


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("parts"), max_loras=4)


@pytest.mark.parametrize(("number", "scale"), [(1, 1.0), (2, 0.7)])
def test_an_adapter_with_a_part_for_a_text_encoder_makes_the_image_that_its_merged_weights_make(
    adapters: Adapters, number: int, scale: float
) -> None:
    spec = request("styled", loras=[LoRAUse(number, scale)])
    images, errors = adapters.rig.run(spec)
    assert not errors
    expected = image_of_diffusers(merged_by_hand(adapters.rig, adapters.added[number], scale), spec)
    assert levels_apart(images["styled"], expected) <= 1
    base, _ = adapters.rig.run(request("base"))
    assert levels_apart(base["base"], expected) > 3


@pytest.mark.slow
def test_prompts_of_adapters_for_text_encoders_and_of_others_are_encoded_together_each_with_its_own(adapters: Adapters) -> None:
    specs = [request(str(number), seed=number, loras=[LoRAUse(number, 1.0)]) for number in adapters.parts] + [request("base")]
    alone = {spec.request_id: adapters.rig.run(spec)[0][spec.request_id] for spec in specs}
    adapters.rig.runner.clear_prompt_embed_cache()
    together, errors = adapters.rig.run(*specs)
    assert not errors
    rows = [call.rows for call in adapters.rig.parallel.calls if call.component == "text_encoder"]
    assert rows and max(rows) > 1
    assert all(levels_apart(image, alone[name]) <= 1 for name, image in together.items())


def test_a_prompt_is_encoded_again_for_whoever_changes_that_encoder_and_for_nobody_else(adapters: Adapters) -> None:
    prompt = "kumquatfen"
    both = ["text_encoder", "text_encoder_2"]
    assert adapters.encoded([], prompt) == both
    assert adapters.encoded([LoRAUse(3, 1.0)], prompt) == []
    assert adapters.encoded([LoRAUse(1, 1.0)], prompt) == ["text_encoder"]
    assert adapters.encoded([LoRAUse(1, 1.0), LoRAUse(3, 1.0)], prompt) == []
    assert adapters.encoded([LoRAUse(1, 0.5)], prompt) == ["text_encoder"]
    assert adapters.encoded([LoRAUse(1, 0.0)], prompt) == []
    assert adapters.encoded([LoRAUse(2, 1.0)], prompt) == ["text_encoder_2"]
    assert adapters.encoded([LoRAUse(2, 1.0), LoRAUse(1, 1.0)], prompt) == []
    assert adapters.encoded([], prompt) == []


@pytest.mark.slow
def test_two_adapters_of_one_request_add_up_also_where_one_is_for_a_text_encoder(adapters: Adapters) -> None:
    spec = request("both", loras=[LoRAUse(1, 0.8), LoRAUse(3, 0.5)])
    images, _ = adapters.rig.run(spec)
    added = {name: 0.8 * delta for name, delta in adapters.added[1].items()} | {
        name: 0.5 * delta for name, delta in adapters.added[3].items()
    }
    assert levels_apart(images["both"], image_of_diffusers(merged_by_hand(adapters.rig, added), spec)) <= 1


# --- slots in use ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def one_slot(tmp_path: Path) -> Adapters:
    return Adapters(tmp_path, max_loras=1)


def in_slots(adapters: Adapters) -> list[int]:
    return [number for number in range(1, 5) if adapters.loras._copies.slot_of(number) is not None]


@pytest.mark.slow
def test_a_request_holds_its_slot_from_its_join_to_its_end(one_slot: Adapters) -> None:
    runner = one_slot.rig.runner
    output = runner.execute_stepwise(Tick(1, [request("first", loras=[LoRAUse(4, 1.0)], previews=1)]))
    assert len(output.previews) == 1 and in_slots(one_slot) == [4]
    output = runner.execute_stepwise(Tick(2, [request("late", loras=[LoRAUse(1, 1.0)]), request("base", steps=1)]))
    assert output.errors["late"].code == ErrorCode.CAPACITY_EXCEEDED
    assert in_slots(one_slot) == [4]
    while not runner.execute_stepwise(Tick(3)).images.keys() & {"first"}:
        assert in_slots(one_slot) == [4]
    images, errors = one_slot.rig.run(request("late", loras=[LoRAUse(1, 1.0)]))
    assert not errors and in_slots(one_slot) == [1]
    # The same adapter is shared by any number of requests.
    images, errors = one_slot.rig.run(*(request(str(number), loras=[LoRAUse(1, 1.0)]) for number in range(3)))
    assert len(images) == 3


def ends_by_leaving(adapters: Adapters) -> None:
    adapters.rig.runner.execute_stepwise(Tick(2, leave=["held"]))


def ends_by_all_being_dropped(adapters: Adapters) -> None:
    adapters.rig.runner.drop_all()


def ends_by_sleep(adapters: Adapters) -> None:
    adapters.rig.runner.release()
    adapters.rig.runner.restore()


def ends_by_an_error(adapters: Adapters) -> None:
    def fail(call: Any) -> None:
        raise RuntimeError("the model broke")

    adapters.rig.parallel.before = fail
    output = adapters.rig.runner.execute_stepwise(Tick(2))
    adapters.rig.parallel.before = lambda call: None
    assert "held" in output.errors


@pytest.mark.slow
@pytest.mark.parametrize("end", [ends_by_leaving, ends_by_all_being_dropped, ends_by_sleep, ends_by_an_error])
def test_however_a_request_ends_its_slot_is_free_for_the_next(one_slot: Adapters, end: Any) -> None:
    one_slot.rig.runner.execute_stepwise(Tick(1, [request("held", loras=[LoRAUse(4, 1.0)])]))
    with pytest.raises(RequestError, match="all 1 slots are in use"):
        one_slot.loras.activate([LoRAUse(1, 1.0)])
    end(one_slot)
    expected = image_of_diffusers(merged_by_hand(one_slot.rig, one_slot.added[3]), request("next"))
    images, errors = one_slot.rig.run(request("next", loras=[LoRAUse(3, 1.0)]))
    assert not errors
    assert levels_apart(images["next"], expected) <= 1


@pytest.mark.slow
def test_a_request_that_is_refused_holds_no_slot(one_slot: Adapters) -> None:
    output = one_slot.rig.runner.execute_stepwise(Tick(1, [request("two", loras=[LoRAUse(1, 1.0), LoRAUse(2, 1.0)])]))
    assert output.errors["two"].code == ErrorCode.CAPACITY_EXCEEDED
    images, errors = one_slot.rig.run(request("stale", loras=[LoRAUse(99, 1.0)]), request("good", loras=[LoRAUse(3, 1.0)]))
    assert errors["stale"].code == ErrorCode.ADAPTER_NOT_LOADED and list(images) == ["good"]


@pytest.mark.slow
def test_adapters_work_after_sleep_as_they_did_before(one_slot: Adapters) -> None:
    spec = request("styled", loras=[LoRAUse(2, 1.0)])
    before, _ = one_slot.rig.run(spec)
    one_slot.rig.runner.release()
    one_slot.rig.runner.restore()
    after, _ = one_slot.rig.run(spec)
    np.testing.assert_array_equal(after["styled"], before["styled"])


@pytest.mark.slow
def test_an_adapter_stays_with_its_request_while_others_come_and_go(adapters: Adapters) -> None:
    spec = request("long", steps=4, loras=[LoRAUse(2, 1.0)])
    alone = adapters.rig.run(spec)[0]["long"]
    others = [request(f"other {number}", steps=1, seed=number, loras=[LoRAUse(number, 1.0)]) for number in (1, 3, 4)]
    together, errors = adapters.rig.run(spec, *others, joining=[0, 1, 2, 3])
    assert not errors and levels_apart(together["long"], alone) <= 1


# --- layers that do not see rows ------------------------------------------------------------------------------------------


class Folding(nn.Module):
    """A toy model that records the rows of its calls. The layer sees them folded into one, so a call can serve only one set of adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.calls: list[int] = []

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.calls.append(hidden_states.shape[0])
        folded: torch.Tensor = self.layer(hidden_states.reshape(1, -1, 6))
        return folded.reshape(hidden_states.shape)


def test_where_a_layer_sees_no_rows_each_set_of_adapters_has_a_call_and_that_is_found_out_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Folding()
    loras = DiffusionLoRAManager({"transformer": model}, denoiser="transformer", slots=2, cached=2, max_rank=4, device=torch.device("cpu"))
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        write_adapter(tmp_path / str(number), {"layer": model.layer}, seed=number)
        loras.add_adapter(LoRARequest(str(number), number, str(tmp_path / str(number))))
    uses: list[list[LoRAUse]] = [[LoRAUse(1, 1.0)], [LoRAUse(2, 1.0)], [LoRAUse(1, 1.0)], []]
    loras.activate([*uses[0], *uses[1]])

    def run(*numbers: int) -> dict[str, torch.Tensor]:
        """Step the numbered requests together through two calls of the folding model. Return the final states by number; an error or a
        split call fails the test."""
        states: dict[str, DiffusionRequestState] = {}

        def body() -> torch.Tensor:
            calls: Any = SuspendingModule("transformer", model)
            x = torch.ones(1, 3, 6)
            for _ in range(2):
                x = calls(x)
                mark_step()
            return x

        for number in numbers:
            states[str(number)] = DiffusionRequestState(request(str(number), loras=uses[number]), body)
        stepper, output = Stepper(states, OneRank(), None), StepOutput()  # type: ignore[arg-type]
        stepper.serve({"transformer": model}, loras)
        for _ in range(3):
            stepper.advance(list(states.values()), output, TickMeter(torch.device("cpu")))
        assert not output.errors and not output.split
        return output.images

    with torch.inference_mode():
        alone = {str(number): run(number)[str(number)] for number in range(4)}
        model.calls.clear()
        together = run(0, 1, 2, 3)
    # All four rows fail together; then come an adapter's two, the other's and the base. The second step makes these three calls at once.
    assert model.calls == [4, 2, 1, 1, 2, 1, 1]
    for name, made in together.items():
        torch.testing.assert_close(made, alone[name])
    assert not torch.allclose(together["0"], together["1"])


@pytest.mark.slow
def test_without_slots_a_worker_refuses_adapters_and_serves_the_base() -> None:
    rig = RunnerRig(max_loras=0)
    with pytest.raises(RequestError, match="--max-loras is 0"):
        rig.runner.add_lora(LoRARequest("stripes", 1, str(STRIPES)), LoadOptions())
    images, errors = rig.run(request("base", steps=1), request("styled", loras=[LoRAUse(1, 1.0)]))
    assert list(images) == ["base"] and errors["styled"].code == ErrorCode.ADAPTER_NOT_LOADED
