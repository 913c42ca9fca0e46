# SPDX-License-Identifier: Apache-2.0
"""The writes that P12 counts, on a real API server with its audit log: every request of the measured account, and no other request."""

from pathlib import Path

import pytest

from benchmarks.operators.audit import Account, kubectl
from benchmarks.operators.run import MALLOC
from support.apiserver.real_apiserver import own_apiserver

pytestmark = pytest.mark.apiserver
CONFIG_MAP = ("configmap", "found", "--namespace=default")


def test_each_request_to_write_is_counted_also_one_that_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    with own_apiserver(audited=True) as administrator:
        account, measured = Account(administrator, "default", "measured"), tmp_path / "kubeconfig"
        account.write_kubeconfig(measured)
        kubectl(administrator, "create", "configmap", "anothers", "--namespace=default")
        kubectl(measured, "get", "configmaps", "--namespace=default")
        assert account.writes() == {}
        kubectl(measured, "create", *CONFIG_MAP)
        with pytest.raises(RuntimeError, match="already exists"):
            kubectl(measured, "create", *CONFIG_MAP)
        kubectl(measured, "label", "--overwrite", *CONFIG_MAP, "a=b")
        kubectl(measured, "label", "--overwrite", *CONFIG_MAP, "a=c", "--dry-run=server")
        assert account.writes() == {"create configmaps": 2, "patch configmaps": 2}


def test_the_measured_operator_has_the_images_settings_of_malloc() -> None:
    image = (Path(__file__).parents[2] / "Dockerfile.operator").read_text().split()
    assert {f"{name}={value}" for name, value in MALLOC.items()} <= set(image)
