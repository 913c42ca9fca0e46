# SPDX-License-Identifier: Apache-2.0
"""The operator in a namespace of its own on the development cluster, for tests and measurements; gone afterwards."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tools.devcluster import cluster

from .cluster import prepare
from .installation import RELEASE, Images, helm_install
from .kubectl import Kubectl
from .story import Story

INSTALL_S = 180
REMOVAL_S = 120.0


@dataclass(frozen=True)
class Stage:
    kubectl: Kubectl
    images: Images


@contextmanager
def stage(namespace: str) -> Iterator[Stage]:
    """Install the operator in an empty namespace of the development cluster, and yield it; delete the namespace afterwards.

    The cluster is started if it does not run, and then ended too.

    Raises:
        DemoFailed, DevclusterError: there is no cluster to be had, or the chart cannot be installed.
    """
    where = cluster.provider()
    was_running = where.running()
    ground = prepare(Story(out=sys.stderr))
    kubectl = Kubectl(ground.kubectl, namespace)
    _clear(kubectl)
    helm_install(ground.helm, ground.kubeconfig, namespace=namespace, images=ground.images, deadline_s=INSTALL_S)
    try:
        yield Stage(kubectl, ground.images)
    finally:
        _clear(kubectl)
        if not was_running:
            where.down(purge=False)


def _clear(kubectl: Kubectl) -> None:
    kubectl.text("delete", "namespace", kubectl.namespace, "--ignore-not-found", deadline_s=REMOVAL_S)
    # Cluster-wide leftovers of the release that the namespace does not take with it.
    kubectl.text("delete", "clusterrole", "-l", f"app.kubernetes.io/instance={RELEASE}", "--ignore-not-found")
