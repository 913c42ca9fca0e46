# SPDX-License-Identifier: Apache-2.0
"""A kind cluster, where a Docker engine answers. Kept small: kind does the work."""

from __future__ import annotations

import shutil
from pathlib import Path

from .. import checks, programs
from ..cache import cached, content_hash, locked
from ..errors import NotOfThisMachine, NotRunning
from ..own_nodes import OwnNodes
from ..paths import cache_dir, log_dir
from ..progress import run_logged, run_quiet, say

CLUSTER = "diffusion-operator"
# kind's node, both container images and what Docker's builder keeps.
DISK_FREE_GB = 25


class KindProvider:
    """A cluster that the tool kind makes in a Docker engine of this machine. Both its name and its kubeconfig are apart from the user's."""

    name = "kind"

    def check(self) -> None:
        """Raise PrerequisiteMissing if kind or Helm has to be built and Go is missing, or if a new cluster has too little room."""
        for program in ("kind", "helm"):
            if shutil.which(program) is None:
                checks.go()
        if not self.running():
            checks.disk_free(cache_dir(), needed_gb=DISK_FREE_GB, what="A kind cluster with our images")

    def prepare(self) -> None:
        """Find kind and helm in PATH, or build them with Go, in up to two minutes, once."""
        programs.kind()
        programs.helm()

    def up(self) -> None:
        """Create the cluster and wait until its node is Ready, or find it running. Half a cluster of a killed run is deleted first."""
        self.check()
        self.prepare()
        with locked("kind"):
            if self.running():
                say("the kind cluster is running")
                return
            cache_dir().mkdir(parents=True, exist_ok=True)
            run_quiet(self._delete_command(), deadline_s=120)  # half a cluster of a killed run; nothing if there is none
            run_logged(create_command(programs.kind(), _kubeconfig()), what="kind cluster", log=log_dir() / "kind.log", deadline_s=900)

    def down(self, *, purge: bool) -> None:
        """Delete the cluster if it runs; with `purge` remove the cache too."""
        if self.running():
            run_logged(self._delete_command(), what="kind cluster's end", log=log_dir() / "kind-delete.log", deadline_s=300)
        _kubeconfig().unlink(missing_ok=True)
        if purge:
            shutil.rmtree(cache_dir(), ignore_errors=True)

    def running(self) -> bool:
        """Return whether `kind get clusters` lists ours and its kubeconfig exists; the API server is not asked."""
        return _kubeconfig().exists() and CLUSTER in run_quiet([programs.kind(), "get", "clusters"]).split()

    def kubeconfig(self) -> Path:
        """Return the file in the cache that kind wrote at `up`; raise NotRunning if it is not there."""
        if not _kubeconfig().exists():
            raise NotRunning("the kind cluster is not running: `python -m tools.devcluster up` starts it")
        return _kubeconfig()

    def kubectl(self) -> Path:
        """Return the machine's kubectl, or a copy of the static one in kind's node image."""
        found = shutil.which("kubectl")
        if found:
            return Path(found)

        def copy(draft: Path) -> None:
            run_quiet(["docker", "cp", f"{CLUSTER}-control-plane:/usr/bin/kubectl", draft / "kubectl"])

        return cached("kubectl", content_hash([programs.KIND], relative_to=cache_dir()), copy) / "kubectl"

    def own_nodes(self) -> OwnNodes:
        """Raise NotOfThisMachine: nothing here can reach beneath these nodes."""
        raise NotOfThisMachine("this needs nodes on this machine: set DEVCLUSTER_PROVIDER=node, or leave out the cluster that was given")

    def load_image(self, reference: str) -> str:
        """Load a Docker image into the containerd of kind's node, within half an hour; pods can then use the returned reference."""
        run_logged(load_command(programs.kind(), reference), what=f"load {reference}", log=log_dir() / "kind-load.log", deadline_s=1800)
        return reference

    def _delete_command(self) -> list[str]:
        return [str(programs.kind()), "delete", "cluster", "--name", CLUSTER, "--kubeconfig", str(_kubeconfig())]


def create_command(kind: Path, kubeconfig: Path) -> list[str]:
    """Build the command line of `kind create cluster`, which waits at most five minutes until the node is Ready."""
    return [str(kind), "create", "cluster", "--name", CLUSTER, "--kubeconfig", str(kubeconfig), "--wait", "300s"]


def load_command(kind: Path, reference: str) -> list[str]:
    """Return the words of `kind load`, which brings an image of the Docker engine to the cluster's node."""
    return [str(kind), "load", "docker-image", reference, "--name", CLUSTER]


def _kubeconfig() -> Path:
    return cache_dir() / "kind.kubeconfig"
