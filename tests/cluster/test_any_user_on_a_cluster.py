# SPDX-License-Identifier: Apache-2.0
"""The operator and a worker under user ids that their container images do not know, since OpenShift gives each namespace a range of its
own."""

from collections.abc import Iterator

import pytest

from support.cluster.faults import operator_pods
from support.cluster.rig import ADAPTER_READY, SERVING, ClusterRig, HelmRig
from tools.demo.images import mean_difference
from tools.demo.installation import Images

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

NAME = "any-user"
USER = 1_000_700_000
IDENTITY = {"runAsUser": USER, "runAsGroup": USER, "fsGroup": USER}


@pytest.fixture
def helm(rig: ClusterRig) -> Iterator[HelmRig]:
    """Provide helm on the release that other tests use, and restore that release afterwards."""
    (container,) = operator_pods(rig.kubectl)[0]["spec"]["containers"]
    own = HelmRig(rig.kubectl.namespace, Images(operator=container["image"], worker=rig.worker_image))
    yield own
    own.upgrade()


def test_a_worker_and_the_operator_run_under_any_user(rig: ClusterRig, helm: HelmRig) -> None:
    helm.upgrade(**{f"podSecurityContext_{name}": str(value) for name, value in IDENTITY.items()})
    operators = operator_pods(rig.kubectl)
    assert operators and all(one["spec"]["securityContext"].items() > IDENTITY.items() for one in operators)
    rig.serve(NAME, ranks=2, securityContext=IDENTITY)
    rig.adapt("frame", NAME, "/models/loras/frame")
    rig.wait("lora/frame", ADAPTER_READY)
    (pod,) = rig.pods(NAME)
    assert rig.kubectl.text("exec", pod["metadata"]["name"], "--", "id", "-u").strip() == str(USER)
    assert mean_difference(rig.image(NAME), rig.image(NAME, "frame")) > 5
    rig.kubectl.text("delete", f"dd/{NAME}", "lora/frame", deadline_s=60)


def test_the_container_image_compiles_under_any_user(rig: ClusterRig) -> None:
    # The fewest versions of the code: for one row, with guidance and without, and no adapter.
    rig.deploy(NAME, securityContext=IDENTITY, engine={"compile": "Default", "maxBatchSize": 1}, lora={"enabled": False})
    rig.wait(f"dd/{NAME}", SERVING, deadline_s=540)
    assert rig.state(NAME)["features"]["compile"].startswith("default (regional")
    rig.kubectl.text("delete", f"dd/{NAME}", deadline_s=60)
