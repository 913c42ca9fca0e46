# SPDX-License-Identifier: Apache-2.0
"""One adapter merged into the weights: only while all traffic uses it and it is faster, and without a trace afterwards."""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from diffusion_worker.config import Compile, Offload, Quantization, WorkerConfig
from diffusion_worker.errors import ConfigError
from diffusion_worker.lora.model_manager import DiffusionLoRAManager
from diffusion_worker.lora.request import LoRARequest
from diffusion_worker.memory.weights import ModelWeights
from diffusion_worker.messages import LoRAUse, RequestSpec, Tick
from diffusion_worker.runner.adapter_merging import AdapterMerging, why_no_merging
from diffusion_worker.runner.faults import RankFault
from diffusion_worker.runner.merge_policy import FIRST_TRIAL_CALLS, TRIAL_CALLS, MergePolicy
from diffusion_worker.runner.weight_loading import read_weights
from peft_adapters import write_adapter
from runner_rig import RunnerRig, levels_apart, request
from worker_process import DIGITS

STRIPES, FRAME = [LoRAUse(1, 1.0)], [LoRAUse(2, 0.5)]

# --- the policy -----------------------------------------------------------------------------------------------------------


def decisions(policy: MergePolicy, adapters: Iterable[str | None], *, beside: float = 1.0, merged: float = 1.0) -> list[str | None]:
    """What it decides for calls of one shape that take these seconds."""
    made = []
    for adapter in adapters:
        made.append(found := policy.decide(adapter, "shape"))
        policy.took(beside if found is None else merged)
    return made


def test_an_adapter_is_tried_after_a_run_of_calls_and_stays_merged_where_that_is_faster() -> None:
    made = decisions(MergePolicy(), ["a"] * (FIRST_TRIAL_CALLS + 50), merged=0.8)
    assert made == [None] * FIRST_TRIAL_CALLS + ["a"] * 50


def test_where_merging_gains_nothing_the_trial_ends_and_is_not_made_again() -> None:
    made = decisions(MergePolicy(), ["a"] * (FIRST_TRIAL_CALLS + 50), merged=0.99)
    assert made == [None] * FIRST_TRIAL_CALLS + ["a"] * TRIAL_CALLS + [None] * (50 - TRIAL_CALLS)


@pytest.mark.parametrize("other", [None, "b"])
def test_mixed_traffic_never_has_anything_merged_and_starts_the_run_again(other: str | None) -> None:
    policy = MergePolicy()
    assert decisions(policy, ["a", other] * 200, merged=0.5) == [None] * 400
    made = decisions(policy, ["a"] * (FIRST_TRIAL_CALLS + 1) + [other])
    assert made == [None] * FIRST_TRIAL_CALLS + ["a", None]


def test_a_known_gain_is_taken_when_what_was_lost_is_what_merging_costs() -> None:
    policy = MergePolicy()
    decisions(policy, ["a"] * (FIRST_TRIAL_CALLS + TRIAL_CALLS), beside=1.0, merged=0.5)
    policy.merging_took(3.0)
    policy.restoring_took(1.0)
    made = decisions(policy, [None, *["a"] * 12], beside=1.0, merged=0.5)
    assert made == [None] + [None] * 8 + ["a"] * 4  # 8 calls of half a second each
    # And again after each interruption.
    assert decisions(policy, [None, *["a"] * 9], beside=1.0, merged=0.5) == [None] * 9 + ["a"]


def test_each_shape_of_calls_is_measured_for_itself_and_they_do_not_make_each_other_merge_in_turn() -> None:
    policy = MergePolicy()
    made = []
    for number in range(600):
        shape = "gains" if number % 2 else "loses"
        made.append(found := policy.decide("a", shape))
        policy.took(1.0 if found is None else 0.5 if shape == "gains" else 2.0)
        if found is not None and made[-2] is None:
            policy.merging_took(20.0)
    changes = sum(one != other for one, other in itertools.pairwise(made))
    assert "a" in made
    assert changes <= 600 * 0.5 / 20 * 2 + 4  # a merge each time it has been paid for


def test_what_was_measured_is_known_after_the_weights_were_given_back() -> None:
    policy = MergePolicy()
    decisions(policy, ["a"] * (FIRST_TRIAL_CALLS + TRIAL_CALLS), merged=0.5)
    policy.merging_took(0.5)
    policy.forget_merged()
    assert decisions(policy, ["a"] * 3, merged=0.5) == [None, "a", "a"]


# --- on a model -----------------------------------------------------------------------------------------------------------


class FakePolicyThatAlwaysMerges(MergePolicy):
    """Merges whatever can be merged, from the first call on."""

    def decide(self, adapter: str | None, shape: object) -> str | None:
        return adapter


class Merging(RunnerRig):
    """The digits model with adapters, which are merged whenever that is allowed. `seen` has what was merged in each denoiser call."""

    def __init__(self, policy: MergePolicy | None = None) -> None:
        super().__init__(lora_merge=True)
        assert self.runner.loras is not None and self.runner._merging is not None
        for number, name in enumerate(["stripes", "frame"], start=1):
            self.runner.loras.add_adapter(LoRARequest(name, number, str(DIGITS / "loras" / name)))
        self.merging: AdapterMerging = self.runner._merging
        self.merging._policy = FakePolicyThatAlwaysMerges() if policy is None else policy
        self.transformer = self.runner.pipeline.transformer
        self.seen: list[str | None] = []
        self.transformer.register_forward_pre_hook(lambda module, inputs: self.seen.append(self.merging.merged))
        self.base = self.weights()

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights as they are now, by the names that a checkpoint has for them."""
        return {name.replace(".base.", "."): tensor.clone() for name, tensor in self.transformer.state_dict().items()}

    def changed(self) -> int:
        """Weights that are not bit by bit those of the base."""
        return sum(not torch.equal(tensor, self.base[name]) for name, tensor in self.weights().items())

    def styled(self, loras: list[LoRAUse], **fields: Any) -> Any:
        images, errors = self.run(request("styled", loras=loras, **fields))
        assert not errors
        return images["styled"]


@pytest.fixture(scope="module")
def beside() -> RunnerRig:
    """The same without merging."""
    rig = RunnerRig()
    assert rig.runner.loras is not None
    for number, name in enumerate(["stripes", "frame"], start=1):
        rig.runner.loras.add_adapter(LoRARequest(name, number, str(DIGITS / "loras" / name)))
    return rig


@pytest.fixture(scope="module")
def shared() -> Merging:
    return Merging()


@pytest.fixture
def rig(shared: Merging) -> Merging:
    """With nothing merged."""
    shared.merging.restore()
    shared.seen.clear()
    assert shared.changed() == 0
    return shared


def image(rig: RunnerRig, spec: RequestSpec) -> Any:
    return rig.run(spec)[0][spec.request_id]


def test_merged_and_beside_the_weights_an_adapter_makes_the_same_image(rig: Merging, beside: RunnerRig) -> None:
    for loras in (STRIPES, FRAME, STRIPES):
        spec = request("styled", loras=loras)
        assert levels_apart(rig.styled(loras), image(beside, spec)) <= 1
        assert rig.changed() >= 30
    assert len(rig.seen) == 9 and None not in rig.seen and len(set(rig.seen)) == 2


def test_before_an_image_of_the_base_the_weights_are_bit_by_bit_their_own(rig: Merging, beside: RunnerRig) -> None:
    rig.styled(STRIPES)
    assert rig.changed() > 0
    base = image(rig, request("base"))
    assert rig.changed() == 0
    np.testing.assert_array_equal(base, image(beside, request("base")))


MIXED: list[Any] = [
    [request("one", loras=STRIPES), request("none")],
    *(
        pytest.param(specs, marks=pytest.mark.slow)
        for specs in (
            [request("one", loras=STRIPES), request("other", loras=FRAME)],
            [request("one", loras=STRIPES), request("weaker", loras=[LoRAUse(1, 0.5)])],
            [request("both", loras=STRIPES + FRAME)],
            [request("exact", loras=STRIPES, exact=True)],
        )
    ),
]


@pytest.mark.parametrize("specs", MIXED, ids=lambda specs: " and ".join(spec.request_id for spec in specs))
def test_nothing_is_merged_where_rows_differ_or_have_several_or_are_exact(
    rig: Merging, beside: RunnerRig, specs: list[RequestSpec]
) -> None:
    rig.styled(STRIPES)
    rig.seen.clear()
    images, _ = rig.run(*specs)
    assert set(rig.seen) == {None}
    for name, expected in beside.run(*specs)[0].items():
        np.testing.assert_array_equal(images[name], expected)


@pytest.mark.slow
def test_a_request_that_joins_with_another_adapter_ends_the_merge_within_its_tick(rig: Merging, beside: RunnerRig) -> None:
    specs = [request("first", loras=STRIPES, steps=4), request("second", loras=FRAME, steps=2)]
    images, _ = rig.run(*specs, joining=[0, 1])
    assert [merged is not None for merged in rig.seen] == [True, False, False, True]
    expected, _ = beside.run(*specs, joining=[0, 1])
    assert all(levels_apart(images[name], expected[name]) <= 1 for name in expected)


@pytest.mark.slow
def test_a_model_that_fell_asleep_with_an_adapter_merged_wakes_with_its_own_weights(rig: Merging, beside: RunnerRig) -> None:
    rig.styled(STRIPES)
    rig.runner.release()
    rig.runner.restore()
    assert rig.changed() == 0
    assert rig.merging.merged is None
    np.testing.assert_array_equal(image(rig, request("base")), image(beside, request("base")))
    assert levels_apart(rig.styled(STRIPES), image(beside, request("styled", loras=STRIPES))) <= 1


@pytest.mark.slow
def test_weights_that_are_replaced_while_an_adapter_is_merged_are_what_was_given(tmp_path: Path) -> None:
    rig = Merging()
    rig.styled(STRIPES)
    names = ["transformer_blocks.0.attn.to_q.weight", "proj_out.bias"]
    given = {f"transformer.{name}": rig.base[name] * 1.5 for name in names}
    save_file(given, tmp_path / "new.safetensors")
    rig.runner.load_weights(read_weights(tmp_path / "new.safetensors"))
    rig.styled(STRIPES)
    rig.merging.restore()
    now = rig.weights()
    assert all(torch.equal(now[name], given[f"transformer.{name}"]) for name in names)
    assert rig.changed() == len(names)


@pytest.mark.slow
def test_an_adapter_that_is_removed_while_it_is_merged_is_missed_by_its_requests_and_gone_from_the_weights() -> None:
    rig = Merging()
    rig.runner.execute_stepwise(Tick(1, [request("styled", loras=STRIPES)]))
    assert rig.merging.merged is not None and rig.runner.loras is not None
    assert rig.runner.loras.remove_adapter(1)
    output = rig.runner.execute_stepwise(Tick(2))
    assert output.errors["styled"].code == "AdapterNotLoaded"
    rig.run(request("base", steps=1))
    assert rig.changed() == 0


@pytest.mark.slow
def test_weights_that_cannot_be_read_again_end_the_rank(rig: Merging, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.styled(STRIPES)

    def changed(tensors: Iterable[torch.Tensor]) -> None:
        raise ConfigError("model was written to")

    with monkeypatch.context() as patch:
        patch.setattr(rig.runner.weights, "refill", changed)
        with pytest.raises(RankFault, match="cannot be read again: model was written to"):
            rig.merging.restore()


@pytest.mark.slow
def test_a_merge_that_fails_half_way_is_undone_and_ends_its_request_only(
    rig: Merging, beside: RunnerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any, **keywords: Any) -> Any:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("diffusion_worker.runner.adapter_merging.forget_copies", fails)
        _, errors = rig.run(request("styled", loras=STRIPES, steps=1))
    assert "no room" in errors["styled"].message
    assert rig.changed() >= 30
    np.testing.assert_array_equal(image(rig, request("base")), image(beside, request("base")))
    assert rig.changed() == 0


class FakeClock:
    """Calls take one second beside the weights and `merged` when merged."""

    def __init__(self, rig: Merging, merged: float) -> None:
        self._rig = rig
        self._merged = merged
        self._now = 0.0

    def __call__(self) -> float:
        self._now += 1.0 if self._rig.merging.merged is None else self._merged
        return self._now


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "stays"), [(0.5, True), (2.0, False)])
def test_by_measurement_an_adapter_is_merged_where_that_is_faster_and_taken_out_where_it_is_not(seconds: float, stays: bool) -> None:
    rig = Merging(MergePolicy())
    rig.merging._clock = FakeClock(rig, seconds)
    steps = FIRST_TRIAL_CALLS + TRIAL_CALLS + 4
    rig.styled(STRIPES, steps=steps)
    merged = [found is not None for found in rig.seen]
    assert merged == [False] * FIRST_TRIAL_CALLS + [True] * TRIAL_CALLS + [stays] * 4
    rig.run(request("base", steps=1))
    assert rig.changed() == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ranks": 2}, "more ranks than one"),
        ({"quantization": Quantization.INT8}, "--quantization int8"),
        ({"offload": Offload.MODEL}, "--offload model"),
        ({"compile": Compile.DEFAULT}, "--compile default"),
    ],
)
def test_where_nothing_is_merged_it_is_said_why(options: dict[str, Any], says: str) -> None:
    config = WorkerConfig(model="m", served_name="m", **options)
    assert says in (why_no_merging(config, torch.device("cpu"), torch.float32) or "")
    assert "bfloat16" in (why_no_merging(WorkerConfig(model="m", served_name="m"), torch.device("cpu"), torch.bfloat16) or "")
    assert "cuda" in (why_no_merging(WorkerConfig(model="m", served_name="m"), torch.device("cuda"), torch.float32) or "")


@pytest.mark.slow
def test_what_became_of_the_option_is_a_feature_of_the_model(shared: Merging) -> None:
    assert shared.model.features["lora_merge"] == "by measurement"
    assert "lora_merge" not in RunnerRig().model.features
    halved = RunnerRig(lora_merge=True, dtype="bfloat16")
    assert halved.model.features["lora_merge"] == "none: weights of bfloat16, in which a merge is not exact"


class TwoExperts:
    """A pair of denoisers, of which an adapter changes the first, as Wan 2.2 has them."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.modules = {"transformer": nn.Sequential(nn.Linear(6, 6)), "transformer_2": nn.Sequential(nn.Linear(6, 6))}
        weights = ModelWeights(torch.device("cpu"))
        for module in self.modules.values():
            module.requires_grad_(False)
            weights.place(module, folder / "no checkpoint")
        loras = DiffusionLoRAManager(self.modules, denoiser="transformer", slots=1, cached=1, max_rank=4, device=torch.device("cpu"))
        write_adapter(folder, {"0": self.modules["transformer"][0]})
        loras.add_adapter(LoRARequest("adapter", 1, str(folder)))
        loras.activate(STRIPES)
        self.policy = MergePolicy()
        self.merging = AdapterMerging(loras, weights, self.modules, policy=self.policy, clock=lambda: self.now)
        self.now = 0.0

    def call(self, component: str, uses: list[LoRAUse]) -> str | None:
        """What was merged in a call, which takes half as long when something is."""
        with torch.inference_mode(), self.merging.rows(component, [uses, uses], (2, 6), plain=False):
            self.modules[component](torch.ones(2, 6))
            self.now += 1.0 if self.merging.merged is None else 0.5
            return self.merging.merged


def test_calls_of_a_denoiser_that_the_adapter_does_not_change_neither_merge_nor_restore_nor_count(tmp_path: Path) -> None:
    experts = TwoExperts(tmp_path)
    assert [experts.call("transformer_2", STRIPES) for _ in range(2 * FIRST_TRIAL_CALLS)] == [None] * 2 * FIRST_TRIAL_CALLS
    first = [experts.call("transformer", STRIPES) for _ in range(FIRST_TRIAL_CALLS + 1)]
    assert [merged is not None for merged in first] == [False] * FIRST_TRIAL_CALLS + [True]
    assert experts.call("transformer_2", STRIPES) == first[-1]
    assert experts.call("transformer_2", []) is None
