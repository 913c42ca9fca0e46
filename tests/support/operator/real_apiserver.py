# SPDX-License-Identifier: Apache-2.0
"""A real kube-apiserver with our CRDs, one for the whole test session.

Real: the API server, etcd and kubectl. Not real: there is no scheduler, kubelet or controller.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CRDS = sorted((ROOT / "crds").glob("*.yaml"))


@pytest.fixture(scope="session")
def kubeconfig_of_apiserver() -> Iterator[Path]:
    from tools.devcluster.apiserver import apiserver

    with apiserver() as kubeconfig:
        install_crds(kubeconfig)
        yield kubeconfig


def install_crds(kubeconfig: Path) -> None:
    """Apply our CRDs, and wait until they count."""
    for path in CRDS:
        kubectl(kubeconfig, "apply", "--server-side", "-f", str(path))
    kubectl(kubeconfig, "wait", "--for=condition=Established", "--timeout=30s", "crd", "--all")


def kubectl(kubeconfig: Path, *arguments: str, stdin: str | None = None) -> str:
    """Its output; a failure raises with what it said."""
    from tools.devcluster import programs

    # A cache of its own: the one at home is kept by port, and another server may have had this one.
    own = ("--kubeconfig", str(kubeconfig), f"--cache-dir={kubeconfig.parent}/kubectl-cache")
    command = [str(programs.kube() / "kubectl"), *own, *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(arguments)}: {done.stderr or done.stdout}")
    return done.stdout
