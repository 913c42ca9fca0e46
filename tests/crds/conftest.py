# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.operator.kind_api import Api


@pytest.fixture(scope="module")
def api(kubeconfig_of_apiserver: Path) -> Iterator[Api]:
    made = Api(kubeconfig_of_apiserver)
    yield made
    made.close()
