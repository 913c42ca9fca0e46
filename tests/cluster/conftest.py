# SPDX-License-Identifier: Apache-2.0
"""A cluster with our images and our chart in it, once a session; ended afterwards if it was not running before."""

from collections.abc import Iterator

import pytest

from cluster_rig import ClusterRig
from tools.demo.cluster import Ground, prepare
from tools.demo.installation import RELEASE, helm_install
from tools.demo.kubectl import Kubectl
from tools.demo.story import Story
from tools.devcluster import cluster

NAMESPACE = "diffusion-tests"


@pytest.fixture(scope="session")
def ground() -> Iterator[Ground]:
    was_running = cluster.provider().running()
    yield prepare(Story())
    if not was_running:
        cluster.provider().down(purge=False)


@pytest.fixture(scope="session")
def rig(ground: Ground, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterRig]:
    """The operator in a namespace of its own, and an empty namespace to begin with."""
    kubectl = Kubectl(ground.kubectl, NAMESPACE)
    kubectl.text("delete", "namespace", NAMESPACE, "--ignore-not-found", deadline_s=120)
    helm_install(ground.helm, ground.kubeconfig, namespace=NAMESPACE, images=ground.images, deadline_s=180)
    kubectl.text("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
    yield ClusterRig(kubectl, ground.images.worker)
    kubectl.text("delete", "namespace", NAMESPACE, deadline_s=120)
    # Cluster-wide leftovers of the release that the namespace does not take with it.
    kubectl.text("delete", "clusterrole", "-l", f"app.kubernetes.io/instance={RELEASE}", "--ignore-not-found")
