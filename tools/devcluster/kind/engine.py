# SPDX-License-Identifier: Apache-2.0
"""What kind needs of a Docker engine. The machine's engine and ours each have a class that provides it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ..progress import run_quiet

CLUSTER = "diffusion-operator"
FIRST, SECOND = f"{CLUSTER}-control-plane", f"{CLUSTER}-worker"
"""The two nodes, and the containers that they are."""
# From the block that is set apart for tests between machines: what people commonly have (10/8, 172.16/12) stays theirs.
LINK_NETWORK, SERVICE_NETWORK, POD_NETWORK = "198.18.2.0/24", "198.18.128.0/18", "198.19.128.0/17"
# To end a container took more than a minute on a machine whose tests kept both cores busy.
DOCKER_S = 180.0


class Engine(Protocol):
    """A Docker engine on which kind makes the cluster's nodes."""

    @property
    def state(self) -> Path:
        """The folder of kind's configuration and kubeconfig, and of the audit log's policy; gone after `end`."""
        ...

    @property
    def locks(self) -> Path | None:
        """The folder of the lock `kind`; None is that of all other locks."""
        ...

    @property
    def networking(self) -> Mapping[str, object]:
        """Settings of kind about the API server's address."""
        ...

    def check(self) -> None:
        """Raise PrerequisiteMissing if the machine lacks something for a cluster with all our images; change nothing."""

    def prepare(self) -> None:
        """Find, build or download every program ahead of `up`."""

    def alive(self) -> bool:
        """Return whether the engine runs."""
        ...

    def up(self) -> None:
        """Make sure that the engine runs."""

    def end(self) -> None:
        """End the cluster, and put back what it changed on the machine; do nothing if all is done already."""

    def environment(self) -> dict[str, str]:
        """Return the environment in which `docker` and `kind` use this engine."""
        ...

    def node_image(self) -> str | None:
        """Return the image of kind's nodes, which the engine has; None is kind's own, which it pulls."""
        ...

    def kept_images(self, image: str) -> Path | None:
        """Return a folder for the containerd of the first node, whose image is given. Unpacked images outlast the cluster there.

        None keeps them on the node.
        """
        ...

    def lead_to(self, node_ip: str) -> None:
        """Lead this machine's packets for Services and pods to the node with this address on Docker's network, where that can be done."""

    def kubectl(self) -> Path:
        """Return the path of a kubectl; the first call may have to build or copy it."""
        ...

    def load(self, reference: str, nodes: Sequence[str]) -> None:
        """Bring one of our images to these nodes."""


def ready(engine: Engine) -> Path:
    """Return the file that says that the cluster's start came to its end."""
    return engine.state / "ready"


def kubeconfig(engine: Engine) -> Path:
    """Return the file in which kind writes the administrator's kubeconfig."""
    return engine.state / "kubeconfig"


def docker(engine: Engine, *words: str | Path, stdin: str | None = None, deadline_s: float = DOCKER_S) -> str:
    """Run a short `docker` command on an engine and return its output; raise CommandFailed if it fails or is not done in time."""
    return run_quiet(["docker", *words], env=engine.environment(), stdin=stdin, deadline_s=deadline_s)


def address(engine: Engine, node: str) -> str:
    """Return a node's address on Docker's network."""
    return docker(engine, "inspect", "--format", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", node).strip()
