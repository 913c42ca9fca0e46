# SPDX-License-Identifier: Apache-2.0
"""Step caches over two real processes: a request's memory is on every rank, wherever its rows are computed next."""

import pytest

from support.runner import rank_processes

pytestmark = pytest.mark.slow


def test_ranks_skip_the_same_and_make_what_one_rank_makes() -> None:
    first, second = rank_processes.run("support.runner.parallel_scenarios:step_caches")
    assert first == second
    for name, (apart, alike, skipped) in first.items():
        assert apart < 1e-9, name
        assert alike, f"{name}: other rows were skipped than on one rank"
        assert 0.1 < skipped < 0.9, f"{name}: {skipped:.0%} skipped"
