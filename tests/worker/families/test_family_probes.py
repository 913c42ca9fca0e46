# SPDX-License-Identifier: Apache-2.0
"""Each argument of each family's denoiser is classified rightly: as rows of requests, or as shared by all rows.

Calls are recorded from real requests. The check by size finds rows: they double when a request makes two images. The check by following
changes an argument of one request: its own rows change and no others, or the calls no longer merge. A model that reads an argument from row
0 only would fail it.
"""

import functools

import pytest

from support.families.rig.all import ONE_OF_EACH, some_families
from support.families.rig.checks import check_following, check_sizes
from support.families.rig.family import Family
from support.families.rig.family_rig import Asked, FamilyRig


@functools.cache
def rig_of(name: str) -> FamilyRig:
    (family,) = [family for family in ONE_OF_EACH if family.name == name]
    return FamilyRig(family, family.compared_in)


@some_families
def test_what_doubles_with_the_number_of_images_is_taken_for_rows(family: Family) -> None:
    if family.doubled is None or not family.shares:
        pytest.skip("no argument makes two images" if family.shares else family.reason)
    for guidance in (1.0, 5.0):
        check_sizes(rig_of(family.name), Asked(steps=1, guidance=guidance))


@some_families
def test_every_argument_acts_on_its_own_rows_or_keeps_calls_apart(family: Family) -> None:
    if not family.shares:
        pytest.skip(family.reason)
    for guidance in (1.0, 5.0):
        check_following(rig_of(family.name), Asked(1, 2, guidance), Asked(2, 2, guidance))
