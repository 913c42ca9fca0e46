# SPDX-License-Identifier: Apache-2.0
"""An operator whose account lacks its rights: it ends with 1 and one sentence that names the right, and no traceback."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.apiserver.audited_apiserver import AuditedApiserver, audited_apiserver
from support.operator.chart_rendering import NAMESPACE, Chart, the_only
from support.ports import unused_port
from tools.devcluster import programs

pytestmark = pytest.mark.apiserver
TEAM = "team"


@pytest.fixture(scope="module")
def kubeconfig() -> Iterator[Path]:
    """Provide the kubeconfig of the chart's account, to which no role is bound."""
    with audited_apiserver(Chart(programs.helm())) as cluster:
        yield _account(cluster)


def _account(cluster: AuditedApiserver) -> Path:
    for name in (NAMESPACE, TEAM):
        cluster.namespace(name)
    documents = cluster.rendered(watchNamespaces=[TEAM])
    account = the_only(documents, "ServiceAccount")
    cluster.give_rights([account])
    return cluster.kubeconfig_of(account["metadata"]["name"])


@pytest.mark.parametrize("scope", [f"--namespace={TEAM}", "--all-namespaces"])
def test_missing_rights_are_one_sentence_and_exit_code_1(kubeconfig: Path, tmp_path: Path, scope: str) -> None:
    key = tmp_path / "key"
    key.write_text("k" * 32)
    command = [sys.executable, "-m", "diffusion_operator", "run", "--engine-image=worker:1", f"--operator-key-file={key}", scope]
    environment = os.environ | {"KUBECONFIG": str(kubeconfig)}
    ended = subprocess.run(
        [*command, f"--liveness-port={unused_port()}"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("Error: get ")
    assert "is forbidden" in last
    assert "cannot list resource" in last
    assert "Traceback" not in ended.stdout + ended.stderr
