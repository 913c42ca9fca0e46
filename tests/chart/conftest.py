# SPDX-License-Identifier: Apache-2.0
"""The chart, rendered by a real helm."""

import pytest

from support.operator.chart_rendering import Chart
from tools.devcluster import programs


@pytest.fixture(scope="session")
def chart() -> Chart:
    return Chart(programs.helm())
