# SPDX-License-Identifier: Apache-2.0
"""The chart, rendered by a real helm."""

import pytest
from chart_rendering import Chart
from tools.devcluster.helm import helm_binary


@pytest.fixture(scope="session")
def chart() -> Chart:
    return Chart(helm_binary())
