# SPDX-License-Identifier: Apache-2.0
"""Each check of the families finds its mistake: it runs on an engine or a model with this one mistake."""

import dataclasses
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel

from diffusion_worker.runner.pipelines.view import view_of
from diffusion_worker.runner.stepping import batch_runner
from support.families.rig import family_rig
from support.families.rig.all import FAMILIES
from support.families.rig.checks import check_following, check_sizes, check_trio
from support.families.rig.family import Family
from support.families.rig.family_rig import JOINING, TRIO, Asked, FamilyRig, apart

pytestmark = pytest.mark.slow

SIMPLE = next(family for family in FAMILIES if family.name == "StableDiffusionPipeline")


class FakeUNetThatReadsRowZero(UNet2DConditionModel):
    """A UNet with a planted fault: each row is denoised with the prompt of row zero, so merged requests differ from lone ones."""

    def forward(self, sample: Any, timestep: Any, encoder_hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return super().forward(sample, timestep, encoder_hidden_states[:1].expand_as(encoder_hidden_states), *args, **kwargs)


def reading_row_zero() -> Family:
    def build() -> Any:
        pipeline = SIMPLE.build()
        pipeline.unet.__class__ = FakeUNetThatReadsRowZero
        return pipeline

    return dataclasses.replace(SIMPLE, build=build)


def test_an_argument_that_is_read_from_row_zero_is_found_by_following() -> None:
    with pytest.raises(AssertionError, match="row 1 does not follow its"):
        check_following(FamilyRig(reading_row_zero(), torch.float64), Asked(1, 2, 1.0), Asked(2, 2, 1.0))


def test_an_argument_that_is_read_from_row_zero_is_found_by_three_requests() -> None:
    family = reading_row_zero()
    with pytest.raises(AssertionError):
        check_trio(family, FamilyRig(family, torch.float64))


def test_an_argument_with_one_line_that_is_no_row_is_found_by_size() -> None:
    family = dataclasses.replace(
        SIMPLE, request=lambda *asked: SIMPLE.request(*asked) | {"cross_attention_kwargs": {"fake_table": torch.ones(1, 3)}}
    )
    with pytest.raises(AssertionError, match="fake_table"):
        check_sizes(FamilyRig(family), Asked(steps=2, guidance=1.0))


def test_a_scheduler_that_requests_share_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    schedulers: dict[int, Any] = {}

    def view_with_one_scheduler(pipeline: StableDiffusionPipeline) -> Any:
        view = view_of(pipeline)
        view.__dict__["scheduler"] = schedulers.setdefault(id(pipeline), view.scheduler)
        return view

    monkeypatch.setattr(family_rig, "view_of", view_with_one_scheduler)
    rig = FamilyRig(SIMPLE, torch.float64)
    results, errors = rig.outcome(*TRIO, joining=JOINING)
    wrong = [name for name, result in results.items() if apart(result, rig.alone(TRIO[int(name)])) > SIMPLE.tolerance]
    assert errors or wrong
    with pytest.raises(AssertionError):
        check_trio(SIMPLE, rig)


def test_an_output_that_is_given_out_whole_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "split", lambda output, rows: [output] * len(rows))
    with pytest.raises(AssertionError):
        check_trio(SIMPLE, FamilyRig(SIMPLE, torch.float64))
