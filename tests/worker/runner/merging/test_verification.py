# SPDX-License-Identifier: Apache-2.0
"""Classes whose calls may be merged: by a record with the installed signature, or after this worker's own check, on the digits model."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from diffusers import SD3Transformer2DModel

from diffusion_worker.config import VerifyMerging
from diffusion_worker.messages import MergeBasis, MergeVerdict, ModelMerging
from diffusion_worker.runner.families import ModelRecord, model_record
from diffusion_worker.runner.loading.pipeline import load_pipeline
from diffusion_worker.runner.merging.trust import trust_in
from diffusion_worker.runner.model_call.call import ModelCall
from support.runner.records import with_records
from support.runner.rig import RunnerRig, levels_apart, request

CLASS = "SD3Transformer2DModel"
TESTED = model_record(SD3Transformer2DModel)
RENAMED = msgspec.structs.replace(TESTED, signatures={"forward": TESTED.signatures["forward"].replace("pooled_projections", "pooled")})
# A step of the verification is a step of its request, or a call of the model. The longest encodes the prompt, guided or not.
MOST_CALLS = 10


class Mixing(SD3Transformer2DModel):  # type: ignore[misc]
    """A transformer that must not be merged: each row of its output gets the mean of all rows added."""

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> Any:
        (made,) = super().forward(hidden_states, **options | {"return_dict": False})
        return (made + made.mean(dim=0, keepdim=True),)


MIXING = ModelRecord("Mixing", signatures={"forward": "hidden_states, **options"})


class MergingRig(RunnerRig):
    """A runner of the digits model with helpers to verify the merging of its calls; `kind` replaces the class of the transformer."""

    def __init__(self, kind: Any = None, **config: Any) -> None:
        super().__init__(**config)
        if kind is not None:
            pipeline = load_pipeline(self.config, torch.float32)
            pipeline.transformer.__class__ = kind
            self.model = self.runner.adopt(pipeline, torch.float32, lambda done, total: None)

    def told(self) -> ModelMerging:
        """Return what the runner reports about merging calls of its transformer."""
        [told] = [item for item in self.runner.use_merging([]) if item.component == "transformer"]
        return told

    def verify(self) -> list[MergeVerdict]:
        """Run the verification to its end, let the runner use the verdicts, and return them; a turn of too many calls fails the test."""
        self.parallel.calls.clear()
        while (verdicts := self.runner.verify_merging(more=True)) is None:
            assert len(self.parallel.calls) <= MOST_CALLS
            self.parallel.calls.clear()
        self.runner.use_merging(verdicts)
        return verdicts

    def rows_of_two(self) -> list[int]:
        """Run two requests together, which must succeed; keep their images, and return the rows of each call of the transformer."""
        self.images, errors = self.run(request("a", seed=1), request("b", seed=2))
        assert not errors
        return [call.rows for call in self.denoiser_calls()]


@pytest.fixture
def _no_record() -> Iterator[None]:
    with with_records(without=(CLASS,)):
        yield


@pytest.mark.usefixtures("_no_record")
def test_a_class_without_a_record_is_alone_until_the_worker_has_verified_it_and_its_images_stay_the_same() -> None:
    rig = MergingRig()
    assert rig.told() == ModelMerging(
        "transformer", CLASS, "forward", MergeBasis.ALONE, f"{CLASS} has no record that its calls may be merged; not verified yet", True
    )
    assert rig.rows_of_two() == [2] * 6
    alone = rig.images
    [verdict] = rig.verify()
    assert verdict.problem == "" and verdict.apart <= verdict.allowed < 1e-3
    assert any("pooled_projections: float[2]" in kinds for kinds in verdict.arguments)
    assert rig.told().basis is MergeBasis.VERIFIED and not rig.told().to_verify
    assert rig.rows_of_two() == [4] * 3
    for name, image in rig.images.items():
        assert levels_apart(image, alone[name]) <= 1


@pytest.mark.usefixtures("_no_record")
def test_a_step_of_a_request_comes_between_any_two_steps_of_a_verification_which_neither_notices() -> None:
    rig = MergingRig()
    alone, _ = rig.run(request("a"))
    found: list[MergeVerdict] | None = None
    while found is None:
        _, errors = rig.run(request("a", steps=1))
        assert not errors
        rig.parallel.calls.clear()
        found = rig.runner.verify_merging(more=True)
        assert len(rig.parallel.calls) <= MOST_CALLS
    assert [verdict.problem for verdict in found] == [""]
    again, _ = rig.run(request("a"))
    assert levels_apart(again["a"], alone["a"]) == 0


@pytest.mark.usefixtures("_no_record")
def test_a_verification_that_is_ended_leaves_the_class_alone_and_says_so() -> None:
    rig = MergingRig()
    assert rig.runner.verify_merging(more=True) is None
    verdicts = rig.runner.verify_merging(more=False)
    assert verdicts is not None
    rig.runner.use_merging(verdicts)
    assert rig.told().basis is MergeBasis.ALONE
    assert "no request for its verification called it" in rig.told().why


@pytest.mark.usefixtures("_no_record")
def test_never_leaves_a_class_without_a_record_alone() -> None:
    rig = MergingRig(verify_merging=VerifyMerging.NEVER)
    assert rig.verify() == []
    assert rig.told().why == f"{CLASS} has no record that its calls may be merged; not verified, because of --verify-merging never"
    assert rig.rows_of_two() == [2] * 6


@pytest.mark.usefixtures("_no_record")
def test_a_verdict_covers_only_the_names_and_kinds_of_arguments_that_it_saw() -> None:
    rig = MergingRig()
    rows, times = torch.ones(1, 4, 8, 8), torch.ones(1)
    seen = {"hidden_states": rows, "timestep": times, "skip_layers": None}
    [subject] = rig.runner._merging.to_verify()
    kinds = "hidden_states: float[4], skip_layers: NoneType, timestep: float[1]"
    rig.runner.use_merging([subject.verdict(arguments=[kinds])])
    for other, merged in (({}, True), ({"skip_layers": [1]}, False), ({"timestep": times.long()}, False), ({"more": 1}, False)):
        call = ModelCall("transformer", "forward", seen | other, module=rig.runner.pipeline.transformer)
        assert rig.runner._merging.allows(call) is merged, other


@pytest.mark.parametrize("changes", [{"source": "other"}, {"signature": "other"}, {"model": "Other"}])
@pytest.mark.usefixtures("_no_record")
def test_a_verdict_about_another_class_signature_or_source_is_ignored(changes: dict[str, str]) -> None:
    rig = MergingRig()
    [subject] = rig.runner._merging.to_verify()
    rig.runner.use_merging([msgspec.structs.replace(subject.verdict(), **changes)])
    assert rig.told().to_verify


def test_a_record_with_an_argument_of_another_name_counts_for_nothing_and_the_class_is_verified() -> None:
    with with_records(RENAMED):
        rig = MergingRig()
        told = rig.told()
        assert told.basis is MergeBasis.ALONE
        assert told.why.startswith("signature of forward: expected 'hidden_states, encoder_hidden_states=None, pooled=None, ")
        assert f"as in the record of {CLASS}, found 'hidden_states, encoder_hidden_states=None, pooled_projections=None, " in told.why
        assert rig.rows_of_two() == [2] * 6
        rig.verify()
        assert rig.told().basis is MergeBasis.VERIFIED
        assert rig.rows_of_two() == [4] * 3


@pytest.mark.parametrize("recorded", [True, False])
def test_a_class_whose_rows_see_each_other_is_found_out_with_or_without_a_record(recorded: bool) -> None:
    with with_records(*[MIXING] if recorded else []):
        rig = MergingRig(Mixing, verify_merging=VerifyMerging.ALWAYS if recorded else VerifyMerging.AUTO)
        assert rig.told().basis is (MergeBasis.RECORD if recorded else MergeBasis.ALONE)
        verdicts = rig.verify()
        [problem] = [verdict.problem for verdict in verdicts if verdict.component == "transformer"]
        assert problem.startswith("merged or split calls differ by ") and "from the same calls alone, at most " in problem
        assert rig.told().basis is MergeBasis.ALONE and problem in rig.told().why
        assert rig.rows_of_two() == [2] * 6


def test_always_verifies_classes_with_a_record_too_and_leaves_those_that_no_request_called_to_their_record() -> None:
    rig = MergingRig(verify_merging=VerifyMerging.ALWAYS)
    assert {verdict.component for verdict in rig.verify()} >= {"transformer", "text_encoder", "text_encoder_2"}
    bases = {(item.component, item.method): item.basis for item in rig.runner.use_merging([])}
    assert bases["transformer", "forward"] is MergeBasis.VERIFIED
    assert MergeBasis.ALONE not in bases.values()
    assert rig.rows_of_two() == [4] * 3


def test_a_subclass_has_the_record_of_the_class_it_extends_only_while_it_has_its_method() -> None:
    kept = type("Kept", (SD3Transformer2DModel,), {})
    assert trust_in(kept, "forward").ok
    own = type("Own", (SD3Transformer2DModel,), {"forward": lambda self, hidden_states: None})
    assert not trust_in(own, "forward").ok
    assert trust_in(Mixing, "forward").why == f"signature of forward: expected {TESTED.signatures['forward']!r} as in the record of " + (
        f"{CLASS}, found 'hidden_states, **options'"
    )


def test_a_class_of_the_same_name_in_another_library_has_no_use_of_the_record() -> None:
    other = type(CLASS, (torch.nn.Module,), {"forward": SD3Transformer2DModel.forward, "__module__": "mypackage.models"})
    assert trust_in(other, "forward").why == f"the record is for the class {CLASS} of diffusers, found one of mypackage"
