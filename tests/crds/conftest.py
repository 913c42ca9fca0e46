# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of CRDs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes import config

from support.apiserver.kind_api import Api


@pytest.fixture(scope="module")
def api(kubeconfig_of_apiserver: Path) -> Iterator[Api]:
    with config.new_client_from_config(config_file=str(kubeconfig_of_apiserver)) as connection:
        yield Api(connection)
