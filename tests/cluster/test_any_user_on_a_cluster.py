# SPDX-License-Identifier: Apache-2.0
"""The operator and a worker under user ids that their container images do not know, since OpenShift gives each namespace a range of its
own. Adapters under such an id are loaded in the file of their sources."""

from collections.abc import Iterator

import pytest

from support.cluster.faults import operator_pods
from support.cluster.rig import ANY_USER, SERVING, ClusterRig, HelmRig
from tools.demo.installation import Images

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

NAME = "any-user"
IDENTITY = {"runAsUser": ANY_USER, "runAsGroup": ANY_USER, "fsGroup": ANY_USER}


@pytest.fixture
def helm(rig: ClusterRig) -> Iterator[HelmRig]:
    """Provide helm on the release that other tests use, and restore that release afterwards."""
    (container,) = operator_pods(rig.kubectl)[0]["spec"]["containers"]
    own = HelmRig(rig.kubectl.namespace, Images(operator=container["image"], worker=rig.worker_image))
    yield own
    own.upgrade()


def test_the_operator_runs_and_a_worker_compiles_under_any_user(rig: ClusterRig, helm: HelmRig) -> None:
    helm.upgrade(**{f"podSecurityContext_{name}": str(value) for name, value in IDENTITY.items()})
    operators = operator_pods(rig.kubectl)
    assert operators and all(one["spec"]["securityContext"].items() > IDENTITY.items() for one in operators)
    # The fewest versions of the code: for one row, with guidance and without, and no adapter.
    rig.deploy(NAME, securityContext=IDENTITY, engine={"compile": "Default", "maxBatchSize": 1}, lora={"enabled": False})
    rig.wait(f"dd/{NAME}", SERVING, deadline_s=540)
    assert rig.state(NAME)["features"]["compile"].startswith("default (regional")
    assert rig.kubectl.text("exec", rig.pod(NAME), "--", "id", "-u").strip() == str(ANY_USER)
    assert rig.image(NAME).png
    rig.kubectl.text("delete", f"dd/{NAME}", deadline_s=60)
