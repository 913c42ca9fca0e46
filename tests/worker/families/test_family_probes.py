# SPDX-License-Identifier: Apache-2.0
"""Whether the code takes every argument of every family's denoiser for what it is: a row, or something all rows share.

Calls are recorded from real requests. By size: what doubles when a request makes two images has rows. By following: when
one request's argument changes, its own rows follow and the others' do not, or the calls no longer go together; an argument
that the model reads from row 0 only would fail this.
"""

import pytest

from support.families.rig.all import every_family
from support.families.rig.checks import check_following, check_sizes
from support.families.rig.family import Family
from support.families.rig.family_rig import Asked, FamilyRig


@every_family
def test_what_doubles_with_the_number_of_images_is_taken_for_rows(family: Family) -> None:
    if family.doubled is None or not family.shares:
        pytest.skip("no argument makes two images" if family.shares else family.reason)
    rig = FamilyRig(family)
    for guidance in (1.0, 5.0):
        check_sizes(rig, Asked(steps=2, guidance=guidance))


@every_family
def test_every_argument_acts_on_its_own_rows_or_keeps_calls_apart(family: Family) -> None:
    if not family.shares:
        pytest.skip(family.reason)
    rig = FamilyRig(family, family.compared_in)
    for guidance in (1.0, 5.0):
        check_following(rig, Asked(1, 2, guidance), Asked(2, 2, guidance))
