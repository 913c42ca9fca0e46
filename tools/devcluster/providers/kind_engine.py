# SPDX-License-Identifier: Apache-2.0
"""kind where no Docker engine answers: `DEVCLUSTER_PROVIDER=kind` on Linux, as root, brings an engine of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

from .. import checks, images, programs
from ..cache import locked
from ..errors import CommandFailed, NotRunning
from ..kind import engine, machine, node_image, nodes
from ..own_nodes import OwnNodes
from ..paths import KIND_STATE, cache_dir
from ..progress import run_quiet, say
from .node import disk_needed_gb as node_disk_needed_gb

_READY = KIND_STATE / "ready"


class KindEngineProvider:
    """The engine and kind's nodes; `down` leaves the cache and the machine as it was."""

    name = "kind"

    def check(self) -> None:
        """Refuse before anything is changed."""
        checks.linux_root()
        checks.go()
        checks.disk_free(cache_dir(), needed_gb=disk_needed_gb(cache_dir()), what="Parts not in the cache yet (programs, images, kind)")
        if not engine.alive():
            checks.networks_free(list(engine.NETWORKS), own_link=machine.LINK)

    def prepare(self) -> None:
        """Make every program, and what of the node's image needs no engine."""
        programs.install_debian_packages(engine.NEEDED)
        for make in (programs.docker, programs.kind, programs.helm, programs.debian):
            make()
        node_image.prepare()

    def up(self) -> None:
        """Start the engine and the cluster, or find them running; what a killed run left is put back first."""
        self.check()
        self.prepare()
        with locked("kind"):
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
        """End all of it and restore the machine; with `purge` the cache goes too, Docker's data with it."""
        with locked("kind"):
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
        """Return the kubeconfig that kind wrote; the address in it answers from the machine."""
        if not nodes.KUBECONFIG.exists():
            raise NotRunning("the kind cluster is not running: `python -m tools.devcluster up` starts it")
        return nodes.KUBECONFIG

    def kubectl(self) -> Path:
        """Return kubectl of the nodes' version."""
        return programs.kube() / "kubectl"

    def own_nodes(self) -> OwnNodes:
        """Return the ways into kind's nodes."""
        return nodes.Nodes()

    def load_image(self, reference: str) -> str:
        """Push the layers that the registry lacks and have the nodes unpack them; the reference stays the same."""
        self.kubeconfig()
        images.push(reference, f"docker://{engine.REGISTRY}/{reference.removeprefix('localhost/')}", tls=False)
        nodes.pull(reference)
        return reference


def restore_left() -> None:
    """Put back what a killed run left, if there is any and no other command is at work on it."""
    if machine.RECORD.exists() and not (engine.alive() and _READY.exists()):
        with locked("kind"):
            if not (engine.alive() and _READY.exists()):
                engine.end()


def disk_needed_gb(cache: Path) -> float:
    """Return the room for what is not there yet: what our own node needs but for its unpacked images, and Docker's data with them."""
    missing = {"docker": 14.0, "kind-root-*": 1.0}
    return node_disk_needed_gb(cache) + sum(size for pattern, size in missing.items() if not any(cache.glob(pattern)))
