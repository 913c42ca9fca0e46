# SPDX-License-Identifier: Apache-2.0
"""A check that every benchmark's outcome passes with any figures."""

import math

from benchmarks.result import Measured


def assert_whole(measured: Measured) -> None:
    """Assert that a benchmark has targets and samples, a result per target and no other, only finite values, and used pairs in each
    comparison."""
    assert measured.results.keys() == measured.targets.keys()
    assert measured.targets and measured.samples
    values = [*measured.figures.values(), *(value for sample in measured.samples for value in sample.values())]
    assert all(math.isfinite(value) for value in values), values
    assert all(pairs.used for pairs in measured.pairs)
