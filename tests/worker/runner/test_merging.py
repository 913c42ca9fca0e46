# SPDX-License-Identifier: Apache-2.0
"""Classes whose calls are merged, which are those that have a record with the installed signature, on the digits model."""

from typing import Any

import msgspec
import torch
from diffusers import SD3Transformer2DModel

from diffusion_worker.messages import ModelMerging
from diffusion_worker.runner.families import model_record
from diffusion_worker.runner.merging import trust_in
from support.runner.records import with_records
from support.runner.rig import RunnerRig, levels_apart, request

CLASS = "SD3Transformer2DModel"
TESTED = model_record(SD3Transformer2DModel)
RENAMED = msgspec.structs.replace(TESTED, signatures={"forward": TESTED.signatures["forward"].replace("pooled_projections", "pooled")})


def told(rig: RunnerRig) -> ModelMerging:
    """Return what the runner reports about merging calls of its transformer."""
    [found] = [item for item in rig.model.merging if item.component == "transformer"]
    return found


def images_of_two(rig: RunnerRig, rows: list[int]) -> dict[str, Any]:
    """Run two requests together, which must make calls of the transformer with these rows; return their images."""
    images, errors = rig.run(request("a", seed=1), request("b", seed=2))
    assert not errors
    assert [call.rows for call in rig.denoiser_calls()] == rows
    return images


def test_calls_of_a_class_without_a_record_run_alone_with_the_same_images_and_a_reason() -> None:
    rig = RunnerRig()
    assert told(rig) == ModelMerging("transformer", CLASS, "forward", True, "tested with diffusers 0.42.1")
    merged = images_of_two(rig, [4] * 3)
    with with_records(without=(CLASS,)):
        rig = RunnerRig()
        assert told(rig) == ModelMerging("transformer", CLASS, "forward", False, f"{CLASS} has no record that its calls may be merged")
        for name, image in images_of_two(rig, [2] * 6).items():
            assert levels_apart(image, merged[name]) <= 1


def test_a_record_with_an_argument_of_another_name_counts_for_nothing() -> None:
    with with_records(RENAMED):
        rig = RunnerRig()
        why = told(rig).why
        assert why.startswith("signature of forward: expected 'hidden_states, encoder_hidden_states=None, pooled=None, ")
        assert f"as in the record of {CLASS}, found 'hidden_states, encoder_hidden_states=None, pooled_projections=None, " in why
        images_of_two(rig, [2] * 6)


def test_a_subclass_has_the_record_of_the_class_it_extends_only_while_it_has_its_method() -> None:
    kept = type("Kept", (SD3Transformer2DModel,), {})
    assert trust_in(kept, "forward").ok
    own = type("Own", (SD3Transformer2DModel,), {"forward": lambda self, hidden_states, **options: None})
    assert trust_in(own, "forward").why == (
        f"signature of forward: expected {TESTED.signatures['forward']!r} as in the record of {CLASS}, found 'hidden_states, **options'"
    )


def test_a_class_of_the_same_name_in_another_library_has_no_use_of_the_record() -> None:
    other = type(CLASS, (torch.nn.Module,), {"forward": SD3Transformer2DModel.forward, "__module__": "mypackage.models"})
    assert trust_in(other, "forward").why == f"the record is for the class {CLASS} of diffusers, found one of mypackage"
