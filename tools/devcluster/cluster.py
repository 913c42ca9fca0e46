# SPDX-License-Identifier: Apache-2.0
"""The one interface to the cluster, for the command line, the demo and the tests: one that the user gave, or one that kind makes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from . import images, programs
from .kind import own_engine
from .kind.engine import kubeconfig
from .kind.machines_engine import MachinesEngine
from .kind.nodes import Nodes
from .kind.own_engine import OwnEngine
from .progress import run_quiet
from .providers.given import GivenProvider
from .providers.kind import KindProvider


class Provider(Protocol):
    """A way to a Kubernetes cluster: one given by the user, or one by kind."""

    name: str

    def check(self) -> None:
        """Raise PrerequisiteMissing if the machine lacks something; change nothing."""

    def prepare(self) -> None:
        """Find, build or download every program ahead of `up`, which would otherwise spend its time on that."""

    def up(self) -> None:
        """Start the cluster, or find it running; check the machine and prepare the programs first."""

    def down(self, *, purge: bool) -> None:
        """End the cluster, if there is one; a cluster that the user gave stays. With `purge` remove the cache too."""

    def running(self) -> bool:
        """Return whether the cluster runs, so that `up` has nothing to start; each provider finds that out in its own way."""
        ...

    def kubeconfig(self) -> Path:
        """Return the path of the cluster's kubeconfig; raise NotRunning if our own cluster does not run. A given one is not asked."""
        ...

    def kubectl(self) -> Path:
        """Return the path of a kubectl for this cluster; the first call may have to build or copy it."""
        ...

    def own_nodes(self) -> Nodes:
        """Return the means to break its nodes and look beneath them; raise NotOfThisMachine if they run elsewhere."""
        ...

    def load_image(self, reference: str) -> str:
        """Make a locally built image available to the cluster, and return the reference under which its pods can run it."""
        ...


def is_given(environment: Mapping[str, str]) -> bool:
    """Return whether the environment names a cluster of the user's: by CLUSTER, or by a KUBECONFIG that is not kind's own."""
    ours = {str(kubeconfig(engine)) for engine in (OwnEngine(), MachinesEngine())}
    return bool(environment.get("CLUSTER")) or environment.get("KUBECONFIG", "") not in {"", *ours}


def provider() -> Provider:
    """Return the provider that suits this machine and environment. First put back what a killed run of our engine left."""
    own_engine.restore_left()
    if is_given(os.environ):
        return GivenProvider()
    return KindProvider(MachinesEngine() if images.docker_answers() else OwnEngine())


def prepare(names: tuple[str, ...] = ()) -> None:
    """Check the machine, and make the cluster's programs and beside them the named images. Nothing is made again that the cache has."""
    where = provider()
    where.check()
    with ThreadPoolExecutor(max_workers=2) as pool:
        cluster_programs = pool.submit(where.prepare)
        for name in names:
            images.build(name)
        cluster_programs.result()


def environment() -> dict[str, str]:
    """Return this process's environment with KUBECONFIG set, and with the folders of kubectl and helm first in PATH.

    Clients reach the API server from this machine in any case.
    Services and pods answer too, where the nodes are on this machine and we are root.
    """
    where = provider()
    folders = [str(where.kubectl().parent), str(programs.helm().parent)]
    path = os.pathsep.join([*folders, os.environ.get("PATH", os.defpath)])
    return {**os.environ, "KUBECONFIG": str(where.kubeconfig()), "PATH": path}


def status() -> dict[str, str | bool]:
    """Return the provider's name and if its cluster runs; a running one adds the paths of its kubeconfig, of kubectl and of helm."""
    where = provider()
    running = where.running()
    known: dict[str, str | bool] = {"provider": where.name, "running": running}
    if running:
        known |= {"kubeconfig": str(where.kubeconfig()), "kubectl": str(where.kubectl()), "helm": str(programs.helm())}
    return known


def kubectl(*words: str, stdin: str | None = None, deadline_s: float = 60.0) -> str:
    """Run kubectl on the cluster with these words and return its output; raise CommandFailed if it fails or is not done in time."""
    where = provider()
    return run_quiet([where.kubectl(), "--kubeconfig", where.kubeconfig(), *words], stdin=stdin, deadline_s=deadline_s)


def patch_node_resource(name: str, count: int) -> None:
    """Patch an extended resource such as `nvidia.com/gpu` into the status of each node, as a device plugin would report it.

    The scheduler then counts on `count` of them a node, or on none after a patch with 0.
    """
    where = provider()
    patch = json.dumps({"status": {"capacity": {name: str(count)}, "allocatable": {name: str(count)}}})
    base = [str(where.kubectl()), "--kubeconfig", str(where.kubeconfig())]
    for node in run_quiet([*base, "get", "nodes", "--output", "name"]).split():
        run_quiet([*base, "patch", node, "--subresource=status", "--type=merge", "--patch", patch])
