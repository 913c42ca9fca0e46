# SPDX-License-Identifier: Apache-2.0
"""Every family through the engine: alone bit for bit equal to diffusers, in company equal up to rounding.

In float64 the rounding of another batch size is far below the effect of any mistake, so one bound fits all.
"""

import diffusers
import pytest
import torch

from support.families.rig.all import FAMILIES, ONE_OF_EACH, for_each, some_families
from support.families.rig.checks import check_trio
from support.families.rig.family import Family
from support.families.rig.family_rig import Asked, FamilyRig, apart
from support.sample import sample

pytestmark = pytest.mark.slow

OTHER = Asked(seed=2, steps=3, guidance=3.0)
ONE = Asked(seed=1, steps=2)

PROMISED = {
    *("AuraFlow", "Chroma", "CogVideoX", "Flux", "Flux 2", "Flux 2 Klein", "Flux Kontext", "HiDream", "HunyuanVideo", "Kolors", "LTX"),
    *("Lumina 2", "Mochi", "PixArt", "Qwen-Image", "Qwen-Image-Edit", "SD 1.5", "SD 3", "SDXL", "Sana", "Wan 2.1", "Wan 2.2", "Z-Image"),
}
OTHERS = [family for family in ONE_OF_EACH if family.family not in PROMISED]
IN_COMPANY = [family for family in ONE_OF_EACH if family.family in PROMISED] + sample(OTHERS, 10)


def assert_equal(one: torch.Tensor, other: torch.Tensor) -> None:
    assert one.shape == other.shape
    assert int((one != other).sum()) == 0, f"{apart(one, other):.1e} apart"


@for_each([family for family in OTHERS if family not in IN_COMPANY])
def test_a_request_alone_is_bit_equal_to_diffusers(family: Family) -> None:
    rig = FamilyRig(family)
    (served,) = rig.together(ONE)
    assert_equal(served, rig.alone(ONE))


@some_families
def test_an_exact_request_in_company_is_bit_equal_to_diffusers(family: Family) -> None:
    rig = FamilyRig(family)
    served, _ = rig.together(Asked(ONE.seed, ONE.steps, exact=True), OTHER)
    assert_equal(served, rig.alone(ONE))


@for_each(IN_COMPANY)
def test_three_requests_that_join_at_different_times_equal_the_three_alone(family: Family) -> None:
    check_trio(family, FamilyRig(family, family.compared_in))


def test_the_families_are_at_least_thirty_classes_of_twenty_families_and_all_that_are_promised() -> None:
    assert len({class_name(family) for family in FAMILIES}) >= 30
    assert {family.family for family in FAMILIES} >= PROMISED
    assert len(PROMISED) >= 20
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_every_family_is_a_pipeline_of_diffusers() -> None:
    for family in FAMILIES:
        assert hasattr(diffusers, class_name(family)), family.name


def class_name(family: Family) -> str:
    return family.name.partition(" (")[0]
