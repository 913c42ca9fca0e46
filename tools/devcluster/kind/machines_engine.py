# SPDX-License-Identifier: Apache-2.0
"""The machine's own Docker engine. It stays as it is: we add a kind cluster, and two routes where we are root."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .. import checks, images, programs
from ..cache import cached, content_hash
from ..errors import CommandFailed
from ..paths import cache_dir, log_dir
from ..progress import run_logged, run_quiet
from .engine import CLUSTER, FIRST, POD_NETWORK, SERVICE_NETWORK, docker, kubeconfig

# kind's node, both container images and what Docker's builder keeps.
DISK_FREE_GB = 25


class MachinesEngine:
    """The Docker engine that answers on this machine. `NODE_IMAGE` names another image for kind's nodes than kind's own."""

    locks = None
    networking: Mapping[str, object] = {}

    @property
    def state(self) -> Path:
        return cache_dir() / "kind-cluster"

    def check(self) -> None:
        """Raise PrerequisiteMissing if kind or Helm has to be built and Go is missing, or if a new cluster has too little room."""
        for program in ("kind", "helm"):
            if shutil.which(program) is None:
                checks.go()
        if not self.state.exists():
            checks.disk_free(cache_dir(), needed_gb=DISK_FREE_GB, what="A kind cluster with our images")

    def prepare(self) -> None:
        """Find kind in PATH, or build it with Go, in up to two minutes, once."""
        programs.kind()

    def alive(self) -> bool:
        """Return whether the engine answers."""
        return images.docker_answers()

    def up(self) -> None:
        """Do nothing: the engine is the machine's."""

    def end(self) -> None:
        """Delete the cluster and the routes, if there are any; the engine runs on."""
        if self.state.exists():
            delete: list[str | Path] = [programs.kind(), "delete", "cluster", "--name", CLUSTER, "--kubeconfig", kubeconfig(self)]
            run_logged(delete, what="kind cluster's end", log=log_dir() / "kind-delete.log", deadline_s=300)
        if _routes():
            for network in (SERVICE_NETWORK, POD_NETWORK):
                with contextlib.suppress(CommandFailed):  # there is none
                    run_quiet(["ip", "route", "delete", network])
        shutil.rmtree(self.state, ignore_errors=True)

    def environment(self) -> dict[str, str]:
        """Return this process's environment: `docker` and `kind` find the engine as the user does."""
        return dict(os.environ)

    def node_image(self) -> str | None:
        """Return the variable NODE_IMAGE, for an engine that cannot pull kind's own image; None if it is not set."""
        return os.environ.get("NODE_IMAGE")

    def kept_images(self, image: str) -> None:
        """Keep images on the node alone: files of root's in the user's cache could not be removed by the user."""

    def lead_to(self, node_ip: str) -> None:
        """Add routes for Services and pods by the node, where we are root on Linux; do nothing elsewhere."""
        if _routes():
            for network in (SERVICE_NETWORK, POD_NETWORK):
                run_quiet(["ip", "route", "replace", network, "via", node_ip])

    def kubectl(self) -> Path:
        """Return the machine's kubectl, or a copy of the static one on kind's node."""
        found = shutil.which("kubectl")
        if found:
            return Path(found)

        def copy(draft: Path) -> None:
            docker(self, "cp", f"{FIRST}:/usr/bin/kubectl", draft / "kubectl")

        return cached("kubectl", content_hash([programs.KIND], relative_to=cache_dir()), copy) / "kubectl"

    def load(self, reference: str, nodes: Sequence[str]) -> None:
        """Load an image of the engine into the nodes, within half an hour."""
        words: list[str | Path] = [programs.kind(), "load", "docker-image", reference, "--name", CLUSTER, "--nodes", ",".join(nodes)]
        run_logged(words, what=f"load {reference}", log=log_dir() / "kind-load.log", deadline_s=1800)


def _routes() -> bool:
    return sys.platform == "linux" and os.geteuid() == 0 and shutil.which("ip") is not None
