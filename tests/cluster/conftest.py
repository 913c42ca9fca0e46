# SPDX-License-Identifier: Apache-2.0
"""A cluster with our images and our chart in it, once a session; ended afterwards if it was not running before."""

from collections.abc import Iterator

import pytest

from cluster_rig import ClusterRig
from tools.demo.stage import stage

NAMESPACE = "diffusion-tests"


@pytest.fixture(scope="session")
def rig() -> Iterator[ClusterRig]:
    """The operator in a namespace of its own."""
    with stage(NAMESPACE) as set_up:
        set_up.kubectl.text("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
        yield ClusterRig(set_up.kubectl, set_up.images.worker)
