# SPDX-License-Identifier: Apache-2.0
"""What the demo needs of tools/devcluster, and nothing else of it: a cluster with our images, kubectl, and a way to a Service."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from tools.devcluster import cluster, images, programs

from .installation import Images


@dataclass(frozen=True)
class Ground:
    """Everything the demo stands on."""

    provider: str
    kubeconfig: Path
    kubectl: tuple[str, ...]
    helm: Path
    images: Images
    connect: Callable[[str, str], AbstractContextManager[str]]


def prepare() -> Ground:
    """Cluster, programs and images, side by side: one waits for the network or a disk while another computes."""
    with ThreadPoolExecutor(max_workers=3) as pool:
        starting, helm = pool.submit(cluster.up), pool.submit(programs.helm)
        building = pool.submit(lambda: (images.build("operator"), images.build("worker")))
        running = starting.result()
        operator, worker = building.result()
    loaded = Images(operator=running.load_image(operator), worker=running.load_image(worker))
    return Ground(
        provider=running.provider,
        kubeconfig=running.kubeconfig,
        kubectl=running.kubectl,
        helm=helm.result(),
        images=loaded,
        connect=lambda namespace, service: running.connect(service, namespace=namespace),
    )
