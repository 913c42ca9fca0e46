# SPDX-License-Identifier: Apache-2.0
"""An API server with our CRDs for one turn of P12, and what a bare client does there."""

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.operators.audit import Account, kubectl
from benchmarks.operators.children import AT_ONCE, CHILD_KINDS, children, deployment, first_status, with_identity
from benchmarks.operators.kube_changes import KubeChanges
from benchmarks.operators.run import KUBECONFIG, ROOT
from diffusion_operator.api.names import DEPLOYMENT, Kind
from diffusion_operator.cluster import KubernetesCluster, connect
from tools.devcluster.apiserver import apiserver

# The operator has the one, the bare client the other.
NAMESPACE, BARE = "scale", "bare"
# Something is broken when nothing changes for so long.
STALLED_S = 60.0

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """An API server with our CRDs for one turn of a measurement, a client of it, and a folder for programs."""

    cluster: KubernetesCluster
    kubeconfig: Path
    folder: Path
    account: Account
    """The programs that are measured have it; its kubeconfig is in the folder."""
    made: dict[tuple[str, str], dict[str, Any]]
    """The deployments as they were answered, by namespace and name."""

    def changes(self, namespace: str = NAMESPACE) -> KubeChanges:
        """Return a counter of the changes in a namespace, which counts from when its block is entered."""
        return KubeChanges(self.kubeconfig, namespace)

    async def make(self, manifests: Iterable[dict[str, Any]]) -> None:
        """Create one object after the other; raises RuntimeError where one was there before."""
        for manifest in manifests:
            if not await self.cluster.create(manifest):
                raise RuntimeError(f"{manifest['kind']} {manifest['metadata']['name']} was there before")

    async def apply_all(self, changes: KubeChanges, numbers: Iterable[int]) -> float:
        """Create deployments of these numbers, some at once, and return the seconds until all are served by the operator that runs.

        Served means a child of each kind and a status. Events are only counted: a change to a deployment counts as a status.
        """
        manifests = [deployment(f"d{number}", NAMESPACE) for number in numbers]
        wanted = changes.added(DEPLOYMENT) + len(manifests)
        statuses = changes.changed(DEPLOYMENT) + len(manifests)
        begun = time.monotonic()
        await _at_once(lambda manifest: self.make([manifest]), manifests)
        await changes.until(
            lambda seen: seen.changed(DEPLOYMENT) >= statuses and all(seen.added(kind) >= wanted for kind in CHILD_KINDS),
            stalled_s=STALLED_S,
        )
        return time.monotonic() - begun

    async def least(self, changes: KubeChanges, numbers: Iterable[int]) -> float:
        """Write by a bare client the least that any operator writes: each deployment, its children and one status; return the seconds."""
        manifests = [deployment(f"d{number}", BARE) for number in numbers]
        status = first_status(with_identity(deployment("d", BARE), 0))
        statuses = changes.changed(DEPLOYMENT) + len(manifests)

        async def one(owner: dict[str, Any]) -> None:
            name = owner["metadata"]["name"]
            await self.make([owner])
            made = self.made[BARE, name]
            await self.make(children(made))
            version = made["metadata"]["resourceVersion"]
            await self.cluster.apply_status(DEPLOYMENT, BARE, name, status=status, version=version)

        begun = time.monotonic()
        await _at_once(one, manifests)
        await changes.until(lambda seen: seen.changed(DEPLOYMENT) >= statuses, stalled_s=STALLED_S)
        return time.monotonic() - begun


def take(turn: Callable[[Place], Awaitable[T]], *, quiet_s: float) -> T:
    """Start an API server with our CRDs, run one turn on it, and return the turn's result; the server ends afterwards.

    Each turn has a server of its own, because one that keeps much is slower. It waits twice `quiet_s` before the turn.
    """
    with apiserver(audited=True) as kubeconfig, tempfile.TemporaryDirectory() as folder, _as_ours(kubeconfig):
        kubectl(kubeconfig, "apply", "--server-side", *(f"--filename={path}" for path in sorted((ROOT / "crds").glob("*.yaml"))))
        kubectl(kubeconfig, "wait", "--for=condition=Established", "--timeout=30s", "crd", "--all")
        for namespace in (NAMESPACE, BARE):
            kubectl(kubeconfig, "create", "namespace", namespace)
        account = Account(kubeconfig, BARE, "operator")
        account.write_kubeconfig(Path(folder) / KUBECONFIG)
        time.sleep(2 * quiet_s)  # it compiles what it publishes of the CRDs
        return asyncio.run(_connected(turn, kubeconfig, Path(folder), account))


@contextlib.contextmanager
def _as_ours(kubeconfig: Path) -> Iterator[None]:
    """Set KUBECONFIG for this process and the programs that it starts, and put it back at the end of the block."""
    before = os.environ.get("KUBECONFIG")
    os.environ["KUBECONFIG"] = str(kubeconfig)
    try:
        yield
    finally:
        os.environ.pop("KUBECONFIG")
        if before is not None:
            os.environ["KUBECONFIG"] = before


async def _connected(turn: Callable[[Place], Awaitable[T]], kubeconfig: Path, folder: Path, account: Account) -> T:
    made: dict[tuple[str, str], dict[str, Any]] = {}

    def answered(kind: Kind, manifest: dict[str, Any]) -> None:
        if kind == DEPLOYMENT:
            made[manifest["metadata"]["namespace"], manifest["metadata"]["name"]] = manifest

    async with await connect(answered) as cluster:
        return await turn(Place(cluster, kubeconfig, folder, account, made))


async def _at_once(each: Callable[[dict[str, Any]], Awaitable[None]], items: Iterable[dict[str, Any]]) -> None:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(item: dict[str, Any]) -> None:
        async with gate:
            await each(item)

    await asyncio.gather(*(one(item) for item in items))
