# SPDX-License-Identifier: Apache-2.0
"""Operators of this version and of the one before, as programs, and the kinds of each.

Real: the programs and the kinds. Not real: what counts and wraps the programs' ports, see `support.operator.process`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.apiserver.real_apiserver import CRDS, kubectl
from support.operator.sole_operator import running
from support.release.earlier import EarlierVersion
from support.soak.operator_process import OperatorProcess

OWN_PODS = ("--operator-namespace=operators", "--operator-label=app.kubernetes.io/name=diffusion-operator")
ELECTION = ("--lease-namespace=default", "--lease-name=diffusion-operator", "--identity=this")


def define(kubeconfig: Path, crds: Sequence[Path] = CRDS) -> None:
    """Apply the kinds' CRDs, over other owners' fields too, and wait up to 30 s until all of the cluster are established."""
    for path in crds:
        kubectl(kubeconfig, "apply", "--server-side", "--force-conflicts", "-f", str(path))
    kubectl(kubeconfig, "wait", "--for=condition=Established", "--timeout=30s", "crd", "--all")


@contextmanager
def operator(
    folder: Path, kubeconfig: Path, *, control_port: int, earlier: EarlierVersion | None = None, image: str = "worker:1"
) -> Iterator[OperatorProcess]:
    """Run an operator over all namespaces as a process until the block ends: of this version, or `earlier` if it is given.

    `image` is the workers' default image. Only an operator of this version takes part in an election, by a Lease in namespace `default`.
    """
    options: dict[str, Any] = {"arguments": ("--all-namespaces", *OWN_PODS, *ELECTION), "control_port": control_port, "image": image}
    if earlier is not None:
        sources = (earlier.operator_sources, earlier.support)
        options |= {"program": earlier.operator_program, "sources": sources, "arguments": ("--all-namespaces", *OWN_PODS)}
    with running(folder, kubeconfig, **options) as process:
        yield process


def actions(process: OperatorProcess) -> dict[str, int]:
    """Return the number of actions that an operator began, by the action and the kind of object; those on Leases are left out."""
    return {
        name.partition('what="')[2].partition('"')[0]: int(value)
        for name, value in process.metrics().items()
        if name.startswith("under_test_actions") and "Lease" not in name
    }
