# SPDX-License-Identifier: Apache-2.0
"""A deployment deleted with `--cascade=orphan` and made again: its pods serve on, through real reconciles.

Which are adopted and which replaced is in `plan/test_orphans.py`, and on an API server in `process/test_orphans_on_an_apiserver.py`.
"""

from typing import Any

import pytest

from diffusion_operator.api.meta import ObjectMeta
from diffusion_operator.api.names import DEPLOYMENT, POD
from diffusion_operator.api.worker_state import ModelReport
from diffusion_operator.render.control_secret import control_token
from support.operator.fake_cluster import EPOCH
from support.operator.rig import Rig, deployment, serving

MODEL = ModelReport(digest="sha256:m")


async def left_behind(replicas: int = 2, *, seconds: float = 30) -> Rig:
    """Return a rig whose deployment was orphaned and made again; its workers accept the earlier object's token only."""
    rig = await serving(replicas)
    before = rig.cluster.find(DEPLOYMENT, "d")
    assert before is not None
    for worker in rig.workers:
        worker.model, worker.token = MODEL, token_of(before["metadata"]["uid"])
    rig.cluster.remove_alone(DEPLOYMENT, "d")
    await rig.run()
    assert rig.cluster.names(POD) == [f"d-{index}-0" for index in range(replicas)]
    rig.cluster.put(deployment(replicas=replicas))
    await rig.run(seconds)
    return rig


def token_of(uid: str) -> str:
    return control_token(b"k" * 32, ObjectMeta(name="d", namespace="default", uid=uid, creation_timestamp=EPOCH))


def uid(rig: Rig) -> str:
    found = rig.cluster.find(DEPLOYMENT, "d")
    assert found is not None
    return str(found["metadata"]["uid"])


async def test_an_adopted_worker_is_called_with_its_first_token_until_it_has_the_new_one_through_restarts_of_the_operator() -> None:
    rig = await left_behind()
    rig.restart_operator()
    await rig.run(30)
    assert rig.states() == ["Awake", "Awake"]
    for worker in rig.workers:
        worker.token = token_of(uid(rig))  # the kubelet has brought the Secret
    await rig.run(30)
    assert (rig.condition("Ready"), rig.condition("Degraded")) == (("True", "Serving"), ("False", "AsExpected"))


@pytest.mark.parametrize("change", ["labels", "manager", "controller"])
async def test_a_pod_that_is_no_orphan_of_the_operator_is_left_alone(change: str) -> None:
    rig = await serving(1)
    rig.cluster.remove_alone(DEPLOYMENT, "d")
    await rig.run()
    found = rig.cluster.find(POD, "d-0-0")
    assert found is not None
    metadata = found["metadata"]
    if change == "labels":
        metadata["labels"]["app.kubernetes.io/managed-by"] = "a-team"
    elif change == "manager":
        metadata["managedFields"] = [one | {"manager": "kubectl"} for one in metadata["managedFields"]]
    else:
        metadata["ownerReferences"] = [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "theirs", "uid": "r", "controller": True}]
    rig.cluster.put(deployment())
    await rig.run(60)
    assert rig.cluster.names(POD) == ["d-0-0", "d-0-1"]
    assert rig.cluster.find(POD, "d-0-0") == found
    assert not rig.cluster.notes("OrphanReplaced") + rig.cluster.notes("PodAdopted")


async def test_an_orphan_that_somebody_takes_meanwhile_is_not_adopted() -> None:
    rig = await left_behind(1, seconds=0)
    theirs = [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "theirs", "uid": "r", "controller": True}]

    def taken(verb: str, manifest: dict[str, Any]) -> None:
        """Give the pod another owner just before the operator's patch."""
        if verb == "patch" and manifest["kind"] == "Pod":
            manifest["metadata"] |= {"resourceVersion": "999999", "ownerReferences": theirs}

    rig.cluster.refuse = taken  # type: ignore[assignment]
    await rig.run(10)
    found = rig.cluster.find(POD, "d-0-0")
    assert found is not None
    assert found["metadata"]["ownerReferences"] == theirs
    assert not rig.cluster.notes("PodAdopted") + rig.cluster.notes("OrphanReplaced")
    assert rig.cluster.names(POD) == ["d-0-0", "d-0-1"]
