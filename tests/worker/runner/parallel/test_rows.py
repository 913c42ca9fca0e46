# SPDX-License-Identifier: Apache-2.0
"""The rows of a call over two real processes: each computes its part, both get the whole, and both get the error of one."""

import pytest

from support.runner import rank_processes

pytestmark = pytest.mark.slow


def test_rows_are_spread_over_the_ranks_and_gathered_in_order() -> None:
    first, second = rank_processes.run("support.runner.scenarios:spread")
    for rows, (one, other) in enumerate(zip(first, second, strict=True), start=1):
        whole = [[2.0 * (3 * row + column) for column in range(3)] for row in range(rows)]
        assert one["doubled"] == other["doubled"] == whole
        assert one["sums"] == other["sums"] == [sum(values) // 2 for values in whole]
    assert [part["ran"] for part in first] == [[0], [0], [0], [0, 1], [0, 1]]
    # Both compute a single row, because one of them would have to wait otherwise.
    assert [part["ran"] for part in second] == [[0], [1], [1, 2], [2, 3], [2, 3, 4]]


def test_an_error_on_one_rank_is_the_same_error_on_both_and_the_next_call_works() -> None:
    first, second = rank_processes.run("support.runner.scenarios:one_fails")
    assert first == second
    assert first["message"] == "rank 1: RuntimeError: out of memory"
    assert first["after"] == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
