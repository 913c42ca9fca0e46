# SPDX-License-Identifier: Apache-2.0
"""An operator that is newer than the kinds in its cluster. Real: the API server, the kinds and the operator's process."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from support.apiserver.real_apiserver import CRDS, kubectl
from support.operator.sole_operator import eventually_nothing
from support.soak.operator_process import OperatorProcess
from tools.devcluster.apiserver import apiserver

pytestmark = [pytest.mark.apiserver, pytest.mark.slow]


def define(kubeconfig: Path, crds: Sequence[Path]) -> None:
    """Apply the kinds' CRDs, and wait until they are established."""
    for path in crds:
        kubectl(kubeconfig, "apply", "--server-side", "-f", str(path))
    kubectl(kubeconfig, "wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")


def older(crds: Sequence[Path], folder: Path) -> list[Path]:
    """Write the CRDs without `status.replicaStates` into a folder, as an earlier version would have them."""
    folder.mkdir()
    for path in crds:
        document = yaml.safe_load(path.read_text())
        document["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"].pop("replicaStates", None)
        (folder / path.name).write_text(yaml.safe_dump(document))
    return sorted(folder.iterdir())


async def test_an_operator_that_is_newer_than_the_kinds_ends_and_names_what_they_lack(tmp_path: Path) -> None:
    """Start the operator with older kinds, as with `crds.enabled` false. With its own kinds it starts."""
    with apiserver() as kubeconfig:
        define(kubeconfig, older(CRDS, tmp_path / "older"))
        process = OperatorProcess(tmp_path, kubeconfig)
        process.start()
        await eventually_nothing(lambda: asyncio.to_thread(process.is_alive))
        said = process.log.read_text()
        assert "are older than this operator" in said and "diffusiondeployments: status.replicaStates" in said
        define(kubeconfig, CRDS)
        process.start()
        try:
            await asyncio.to_thread(process.wait_ready)
        finally:
            await asyncio.to_thread(process.stop)
