# SPDX-License-Identifier: Apache-2.0
"""The take-over of P17, run tiny. Even so the figure is meaningful, since most of it is the duration of a Lease."""

import pytest

from benchmarks.operators.takeover import take_over

pytestmark = [pytest.mark.apiserver, pytest.mark.slow]


@pytest.mark.filterwarnings("default")
def test_a_take_over_is_timed_from_the_leaders_death_to_the_next_pod() -> None:
    figures = take_over(tiny=True)
    assert figures.keys() == {"takeover_s", "takeover_median_s"}
    assert 10 < figures["takeover_median_s"] <= figures["takeover_s"] <= 20
