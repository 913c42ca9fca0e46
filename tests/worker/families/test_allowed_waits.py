# SPDX-License-Identifier: Apache-2.0
"""The list of allowed waits has no stale entry: each one is still needed by the variant of a family that is named beside it."""

import pytest

from support.families.rig.all import FAMILIES
from support.families.rig.family import Family
from support.rehearsal.allowed import ALLOWED, needed_by
from support.rehearsal.family_trial import BEYOND, METER, waiting

pytestmark = pytest.mark.slow
NEEDING = [family for family in FAMILIES if family.name not in BEYOND and needed_by(family.name)]


@pytest.mark.parametrize("family", [pytest.param(family, id=family.name) for family in NEEDING])
def test_a_variant_needs_each_wait_that_is_allowed_for_it(family: Family) -> None:
    entries = needed_by(family.name)
    assert sorted(entries - waiting(family, entries)) == [], "these entries are stale: take them off the list, or name another variant"


def test_each_entry_belongs_to_one_variant() -> None:
    entries = [entry for family in NEEDING for entry in needed_by(family.name)]
    assert sorted([*entries, METER]) == sorted(ALLOWED)


def test_an_entry_that_its_variant_does_not_need_is_found() -> None:
    (family,) = (family for family in NEEDING if family.name == "AuraFlowPipeline")
    assert waiting(family, {"AuraFlowPipeline.__call__", "Model.forward"}) == {"AuraFlowPipeline.__call__", METER}
