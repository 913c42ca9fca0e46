# SPDX-License-Identifier: Apache-2.0
"""A deployment deleted with `--cascade=orphan` and made again: its pods serve on or are replaced, through real reconciles."""

from typing import Any

import pytest

from diffusion_operator.api.meta import ObjectMeta
from diffusion_operator.api.names import ANNOTATION_OWNER_UID, CONFIG_MAP, DEPLOYMENT, POD, SECRET, SERVICE
from diffusion_operator.api.worker_state import ModelReport
from diffusion_operator.render.control_secret import control_token
from support.operator.fake_cluster import EPOCH
from support.operator.rig import Rig, deployment, serving

MODEL = ModelReport(digest="sha256:m")
ANOTHER = ModelReport(digest="sha256:x")


async def left_behind(replicas: int = 2, *, seconds: float = 30, models: tuple[ModelReport, ...] = (), **spec: Any) -> Rig:
    """Return a rig whose deployment was orphaned and made again; its workers accept the earlier object's token only."""
    rig = await serving(replicas)
    before = rig.cluster.find(DEPLOYMENT, "d")
    assert before is not None
    for index, worker in enumerate(rig.workers):
        worker.model, worker.token = (models or (MODEL,) * replicas)[index], token_of(before["metadata"]["uid"])
    rig.cluster.remove_alone(DEPLOYMENT, "d")
    await rig.run()
    assert rig.cluster.names(POD) == [f"d-{index}-0" for index in range(replicas)]
    rig.cluster.put(deployment(replicas=replicas, **spec))
    await rig.run(seconds)
    return rig


def token_of(uid: str) -> str:
    return control_token(b"k" * 32, ObjectMeta(name="d", namespace="default", uid=uid, creation_timestamp=EPOCH))


def owner_of(rig: Rig, kind: Any, name: str) -> str:
    found = rig.cluster.find(kind, name)
    assert found is not None
    return str(found["metadata"]["ownerReferences"][0]["uid"])


def uid(rig: Rig) -> str:
    found = rig.cluster.find(DEPLOYMENT, "d")
    assert found is not None
    return str(found["metadata"]["uid"])


async def test_pods_of_the_same_template_and_model_are_adopted_and_serve_on() -> None:
    rig = await left_behind()
    assert rig.cluster.names(POD) == ["d-0-0", "d-1-0"], "no pod is replaced"
    assert rig.routable() == ["d-0-0", "d-1-0"]
    assert {owner_of(rig, POD, name) for name in rig.cluster.names(POD)} == {uid(rig)}
    assert {owner_of(rig, kind, name) for kind, name in ((SECRET, "d-control"), (CONFIG_MAP, "d-desired"), (SERVICE, "d"))} == {uid(rig)}
    assert (rig.condition("Ready"), rig.states()) == (("True", "Serving"), ["Awake", "Awake"])
    assert sorted(rig.cluster.notes("PodAdopted"))[0].startswith(
        "pod d-0-0, which an earlier DiffusionDeployment of this name left, has the same"
    )
    assert len(rig.cluster.notes("PodAdopted")) == 2


async def test_an_adopted_worker_is_called_with_its_first_token_until_it_has_the_new_one_through_restarts_of_the_operator() -> None:
    rig = await left_behind()
    rig.restart_operator()
    await rig.run(30)
    assert rig.states() == ["Awake", "Awake"]
    for worker in rig.workers:
        worker.token = token_of(uid(rig))  # the kubelet has brought the Secret
    await rig.run(30)
    assert (rig.condition("Ready"), rig.condition("Degraded")) == (("True", "Serving"), ("False", "AsExpected"))


async def test_pods_of_another_template_are_replaced_one_after_the_other_and_told() -> None:
    rig = await left_behind(seconds=5, engine={"maxBatchSize": 2})
    assert rig.routable() == ["d-1-0"] or rig.routable() == ["d-0-0"], "one is unrouted before its successor serves"
    for _ in range(4):
        rig.start_all(model=MODEL)
        await rig.run(10)
    assert rig.cluster.names(POD) == ["d-0-1", "d-1-1"]
    assert (rig.condition("Ready"), rig.routable()) == (("True", "Serving"), ["d-0-1", "d-1-1"])
    notes = rig.cluster.notes("OrphanReplaced")
    assert len(notes) == 2
    assert all("it was made of another template" in note for note in notes)
    assert not rig.cluster.notes("PodAdopted")


async def test_a_pod_with_another_model_is_replaced_and_the_other_one_adopted() -> None:
    rig = await left_behind(models=(MODEL, ANOTHER))
    rig.start_all(model=MODEL)
    await rig.run(20)
    assert rig.cluster.names(POD) == ["d-0-0", "d-1-1"]
    (note,) = rig.cluster.notes("OrphanReplaced")
    assert "has a model with the digest sha256:x, expected sha256:m" in note


async def test_pods_of_the_first_version_have_no_annotation_and_are_replaced_while_the_others_serve() -> None:
    rig = await serving(2)
    for name in rig.cluster.names(POD):
        found = rig.cluster.find(POD, name)
        assert found is not None
        del found["metadata"]["annotations"][ANNOTATION_OWNER_UID]
    for worker in rig.workers:
        worker.model, worker.token = MODEL, "unknown"
    rig.cluster.remove_alone(DEPLOYMENT, "d")
    await rig.run()
    rig.cluster.put(deployment(replicas=2))
    served = []
    for _ in range(60):
        await rig.run(1)
        served.append(len(rig.routable()))
        rig.start_all(model=MODEL)
    assert min(served) >= 1
    assert rig.cluster.names(POD) == ["d-0-1", "d-1-1"]
    assert all("it does not name the DiffusionDeployment that it was made for" in note for note in rig.cluster.notes("OrphanReplaced"))


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
