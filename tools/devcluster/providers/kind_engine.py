# SPDX-License-Identifier: Apache-2.0
"""kind where no Docker engine answers: `DEVCLUSTER_PROVIDER=kind` on Linux, as root, brings an engine of its own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from .. import checks, images, programs
from ..cache import locked, locked_if_free
from ..errors import CommandFailed, NotRunning
from ..kind import engine, machine, node_image, nodes
from ..own_nodes import OwnNodes
from ..paths import KIND_STATE, cache_dir
from ..progress import run_quiet, say
from .node import disk_needed_gb as node_disk_needed_gb

_READY = KIND_STATE / "ready"
LOCKS = Path("/run/diffusion-operator")
"""The folder of the engine's lock, which is the machine's as the engine is, whatever cache a command has."""
# Docker's data: the image of kind's nodes with the operator's image, and with the worker's.
_SMALL_GB, _WITH_IMAGES_GB = 2.0, 14.0


class KindEngineProvider:
    """A kind cluster on a Docker engine of our own, as root on Linux; `down` restores the machine and leaves the cache."""

    name = "kind"

    def check(self) -> None:
        """Raise PrerequisiteMissing if the machine lacks something for the cluster with all our images on its nodes; change nothing."""
        self._check(_WITH_IMAGES_GB)

    def check_small(self) -> None:
        """Raise PrerequisiteMissing as `check` does, but ask for less room: for a cluster without the worker's image."""
        self._check(_SMALL_GB)

    def _check(self, docker_gb: float) -> None:
        checks.linux_root()
        checks.go()
        needed_gb = disk_needed_gb(cache_dir(), docker_gb)
        checks.disk_free(cache_dir(), needed_gb=needed_gb, what="Parts not in the cache yet (programs, images, kind)")
        if not engine.alive():
            checks.memory_free(needed_gb=checks.MEMORY_GB)
            checks.networks_free(list(engine.NETWORKS), own_link=machine.LINK)

    def prepare(self) -> None:
        """Install missing Debian packages, and make every program and the parts of the node's image that need no engine."""
        programs.install_debian_packages(engine.NEEDED)
        for make in (programs.docker, programs.kind, programs.helm, programs.debian):
            make()
        node_image.prepare()

    def up(self) -> None:
        """Start the engine and the cluster, or find them running; what a killed run left is put back first."""
        self.check_small()
        self.prepare()
        with locked("kind", directory=LOCKS):
            if self.running():
                say("the kind cluster is running")
                return
            engine.end()
            engine.up()
            try:
                nodes.create()
                _READY.touch()
            except BaseException:
                engine.end()
                raise

    def down(self, *, purge: bool) -> None:
        """End the cluster and the engine, and restore the machine; with `purge` remove the cache too, with Docker's data."""
        with locked("kind", directory=LOCKS):
            engine.end()
        if purge:
            shutil.rmtree(cache_dir(), ignore_errors=True)

    def running(self) -> bool:
        """Return whether `up` came to its end, the engine lives and the API server says that it is ready."""
        if not _READY.exists() or not engine.alive():
            return False
        ready: list[str | Path] = [self.kubectl(), "--kubeconfig", nodes.KUBECONFIG, "--request-timeout=5s", "get", "--raw", "/readyz"]
        try:
            return run_quiet(ready).strip() == "ok"
        except CommandFailed:
            return False

    def kubeconfig(self) -> Path:
        """Return the kubeconfig that kind wrote, whose address answers from this machine; raise NotRunning if there is none."""
        if not nodes.KUBECONFIG.exists():
            raise NotRunning("the kind cluster is not running: `python -m tools.devcluster up` starts it")
        return nodes.KUBECONFIG

    def kubectl(self) -> Path:
        """Return the path of a kubectl that matches the Kubernetes version of the nodes. Unless cached, it is built first."""
        return programs.kube() / "kubectl"

    def own_nodes(self) -> OwnNodes:
        """Return the means to break kind's nodes and look beneath them."""
        return nodes.Nodes()

    def load_image(self, reference: str) -> str:
        """Push the layers that the registry lacks, have the nodes unpack the image, and return the same reference."""
        self.kubeconfig()
        images.push(reference, f"docker://{engine.REGISTRY}/{reference.removeprefix('localhost/')}", tls=False)
        nodes.pull(reference)
        return reference


def restore_left() -> None:
    """Put back what a killed run left, unless a cluster runs on it or another command is at work on it."""
    if os.geteuid() == 0 and machine.RECORD.exists():
        with locked_if_free("kind", directory=LOCKS) as alone:
            if alone and machine.RECORD.exists() and not (_READY.exists() and engine.alive()):
                engine.end()


def disk_needed_gb(cache: Path, docker_gb: float) -> float:
    """Return the gigabytes still needed for parts that `cache` lacks: those of our own node, and kind's programs and Docker's data."""
    missing = {"docker": docker_gb, "kind-root-*": 2.0}
    return node_disk_needed_gb(cache) + sum(size for pattern, size in missing.items() if not any(cache.glob(pattern)))
