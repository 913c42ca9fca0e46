# SPDX-License-Identifier: Apache-2.0
"""Every family's calls with their rows spread over ranks: each rank's result is its part of the whole.

The ranks' processes and their messages are tested elsewhere; here each slice of a call is computed in turn, in the test's own process.
"""

from diffusion_worker.runner.model_call.call import group_key, merge, slice_rows, split
from support.families.rig.all import some_families
from support.families.rig.checks import first_calls
from support.families.rig.family import Family, as_tensor
from support.families.rig.family_rig import Asked, FamilyRig, apart


@some_families
def test_rows_on_ranks_of_their_own_equal_the_call_of_all_rows(family: Family) -> None:
    rig = FamilyRig(family, family.compared_in)
    others = first_calls(rig, Asked(2, 2, 3.0))
    for component, call in first_calls(rig, Asked(1, 2, 5.0)).items():
        key = group_key(call)
        together = merge([call, others[component]]) if key is not None and key == group_key(others[component]) else call
        if together.rows == 1:
            continue  # a single row stays on one rank
        try:
            whole = split(rig.execute(together), [1] * together.rows)
        except TypeError:  # it returns a cache for one request, so such calls are never merged
            assert family.reason, f"{component} returns what cannot be split"
            continue
        for row, expected in enumerate(whole):
            part = rig.execute(slice_rows(together, row, row + 1))
            assert apart(as_tensor(part), as_tensor(expected)) <= family.tolerance, f"{component}: row {row} of {together.rows}"
