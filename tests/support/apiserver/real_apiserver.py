# SPDX-License-Identifier: Apache-2.0
"""A real kube-apiserver with our CRDs: one for the whole test session, and separate ones for tests that need one alone.

Real: the API server, etcd and kubectl. Not real: there is no scheduler, kubelet or controller.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
CRDS = sorted((ROOT / "crds").glob("*.yaml"))


@pytest.fixture(scope="session")
def kubeconfig_of_apiserver() -> Iterator[Path]:
    with own_apiserver() as kubeconfig:
        yield kubeconfig


@contextmanager
def own_apiserver(**options: Any) -> Iterator[Path]:
    """Run an API server with our CRDs and no other objects, and yield its kubeconfig. `options` are those of tools/devcluster."""
    from tools.devcluster.apiserver import apiserver

    with apiserver(**options) as kubeconfig:
        for path in CRDS:
            kubectl(kubeconfig, "apply", "--server-side", "-f", str(path))
        kubectl(kubeconfig, "wait", "--for=condition=Established", "--timeout=30s", "crd", "--all")
        yield kubeconfig


def kubectl(kubeconfig: Path, *arguments: str, stdin: str | None = None) -> str:
    """Run kubectl and return its output.

    Raises:
        AssertionError: kubectl failed; the message has its output.
    """
    from tools.devcluster import programs

    # A separate cache: the one in the home directory is keyed by port, and another server may have used this port.
    own = ("--kubeconfig", str(kubeconfig), f"--cache-dir={kubeconfig.parent}/kubectl-cache")
    command = [str(programs.kube() / "kubectl"), *own, *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(arguments)}: {done.stderr or done.stdout}")
    return done.stdout
