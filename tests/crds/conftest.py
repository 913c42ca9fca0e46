# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator
from pathlib import Path

import pytest

from kind_api import Api
from real_apiserver import kubeconfig_of_apiserver

__all__ = ["kubeconfig_of_apiserver"]


@pytest.fixture(scope="module")
def api(kubeconfig_of_apiserver: Path) -> Iterator[Api]:
    made = Api(kubeconfig_of_apiserver)
    yield made
    made.close()
