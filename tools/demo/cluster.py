# SPDX-License-Identifier: Apache-2.0
"""The demo's view of tools/devcluster: a cluster with our images, kubectl, and a way to a Service."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from tools.devcluster import cluster, images, programs
from tools.devcluster.connect import connect

from .installation import Images
from .story import Story

SERVICE_PORT = "http"


@dataclass(frozen=True)
class Ground:
    """A running cluster for the demo: the name of its provider, its kubeconfig, the kubectl and Helm to use, and the images it has."""

    provider: str
    kubeconfig: Path
    kubectl: tuple[str, ...]
    helm: Path
    images: Images


def prepare(story: Story) -> Ground:
    """Build our images, start the cluster or find it, load the images into it, and return both; each part is a step of the story.

    Parts that exist are not made again. The progress of the devcluster goes to stderr.

    Raises:
        DevclusterError: the machine lacks something, or a part cannot be made.
    """
    provider = cluster.provider()
    with story.step("Build the container images and the cluster's programs") as step:
        cluster.prepare(("operator", "worker"))
        operator, worker = images.build("operator"), images.build("worker")
        step.result = f"{operator}, {worker}"
    with story.step("A cluster") as step:
        provider.up()
        step.result = f"provider {provider.name!r}"
    with story.step("Load the container images into the cluster"):
        loaded = Images(operator=provider.load_image(operator), worker=provider.load_image(worker))
    kubeconfig = provider.kubeconfig()
    kubectl = (str(provider.kubectl()), "--kubeconfig", str(kubeconfig))
    return Ground(provider.name, kubeconfig, kubectl, programs.helm(), loaded)


def address_of(namespace: str, service: str) -> AbstractContextManager[str]:
    """Return a context manager that yields a local URL of the Service's HTTP port; the URL leads there during the block."""
    return connect(namespace, service, SERVICE_PORT)
