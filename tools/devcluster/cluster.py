# SPDX-License-Identifier: Apache-2.0
"""The one interface to the three providers, for the command line, the demo and the tests.

Choice of the provider: DEVCLUSTER_PROVIDER if set; a cluster given by KUBECONFIG or CLUSTER; kind if a Docker engine answers; our own node.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from . import images, programs
from .errors import DevclusterError
from .node import config as node_config
from .own_nodes import OwnNodes
from .progress import run_quiet
from .providers.given import GivenProvider
from .providers.kind import KindProvider
from .providers.kind_engine import KindEngineProvider, restore_left
from .providers.node import NodeProvider


class Provider(Protocol):
    """A way to a Kubernetes cluster: one given by the user, one by kind, or a real node on this machine."""

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

    def own_nodes(self) -> OwnNodes:
        """Return the means to break its nodes and look beneath them; raise NotOfThisMachine if they run elsewhere."""
        ...

    def load_image(self, reference: str) -> str:
        """Make a locally built image available to the cluster, and return the reference under which its pods can run it."""
        ...


def provider_name(environment: Mapping[str, str], *, docker: bool) -> str:
    """Return DEVCLUSTER_PROVIDER if it is set, unchecked; otherwise `given`, `kind` or `node`.

    CLUSTER, or a KUBECONFIG that is not the node's own, means `given`. Without either `docker` decides, except that the node's own
    KUBECONFIG means `node`. Nothing outside the arguments is read.
    """
    forced = environment.get("DEVCLUSTER_PROVIDER")
    if forced:
        return forced
    ours = {str(node_config.KUBECONFIG)}
    if environment.get("CLUSTER") or environment.get("KUBECONFIG", "") not in {"", *ours}:
        return "given"
    return "kind" if docker and environment.get("KUBECONFIG", "") not in ours else "node"


def provider() -> Provider:
    """Return the provider that suits this machine and environment. First put back what a killed run of kind's engine left.

    Raises:
        DevclusterError: DEVCLUSTER_PROVIDER is none of the three names.
    """
    restore_left()
    docker = images.docker_answers()
    name = provider_name(os.environ, docker=docker)
    if name == "given":
        return GivenProvider()
    if name == "kind":
        return KindProvider() if docker else KindEngineProvider()
    if name == "node":
        return NodeProvider()
    raise DevclusterError(f"DEVCLUSTER_PROVIDER is {name!r}; it must be given, kind or node")


def end_others() -> None:
    """End the clusters of our own node and of kind's engine, unless it is the chosen one: they use the same cache.

    Do nothing without root on Linux, where neither can run.
    """
    chosen = provider().name
    if sys.platform == "linux" and os.geteuid() == 0:
        for other in (NodeProvider(), KindEngineProvider()):
            if other.name != chosen:
                other.down(purge=False)


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
    Services and pods answer only if our own node has them, or kind on our own engine.
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
