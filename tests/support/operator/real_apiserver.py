# SPDX-License-Identifier: Apache-2.0
"""A real kube-apiserver with our CRDs, one for the whole test session, shared by every folder that imports the fixture.

from support.operator.real_apiserver import kubeconfig_of_apiserver  # in a conftest.py
"""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CRDS = sorted((ROOT / "crds").glob("*.yaml"))

_stack = ExitStack()
_users = 0
_kubeconfig: Path | None = None


@pytest.fixture(scope="session")
def kubeconfig_of_apiserver() -> Iterator[Path]:
    global _users, _kubeconfig
    if _kubeconfig is None:
        _kubeconfig = _start()
    _users += 1
    yield _kubeconfig
    _users -= 1
    if _users == 0:
        _kubeconfig = None
        _stack.close()


def _start() -> Path:
    from tools.devcluster.apiserver import apiserver

    kubeconfig = _stack.enter_context(apiserver())
    for path in CRDS:
        kubectl(kubeconfig, "apply", "--server-side", "-f", str(path))
    kubectl(kubeconfig, "wait", "--for=condition=Established", "--timeout=30s", "crd", "--all")
    return kubeconfig


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
