# SPDX-License-Identifier: Apache-2.0
"""Children that are refused or that fail, and a status that stays true, in virtual time.

Strangers' objects and refusals of a real API server are in `apiserver/test_foreign_children_on_real_apiserver.py`.
"""

import copy
from itertools import pairwise
from typing import Any

import pytest

from diffusion_operator.api.names import (
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    LABEL_DEPLOYMENT,
    LABEL_MANAGED_BY,
    NETWORK_POLICY,
    POD,
    SECRET,
    SERVICE,
    Kind,
)
from diffusion_operator.errors import ClusterError, ClusterRefused, ClusterUnavailable
from support.operator.rig import Rig, deployment, serving

NAMES = {SECRET: "d-control", CONFIG_MAP: "d-desired", SERVICE: "d", NETWORK_POLICY: "d-control", DISRUPTION_BUDGET: "d"}
MOUNTED = (SECRET, CONFIG_MAP)
LABELS = {LABEL_MANAGED_BY: "diffusion-operator", LABEL_DEPLOYMENT: "d"}
ALL = pytest.mark.parametrize("kind", NAMES, ids=lambda kind: kind.kind)


def put(rig: Rig, kind: Kind, name: str, **metadata: Any) -> dict[str, Any]:
    """Put an object of another owner, with this name and metadata, into the cluster, and return a copy of it."""
    body = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": {"name": name, "namespace": "default", **metadata}}
    rig.cluster.put(body | {"spec": {"theirs": True}})
    return copy.deepcopy(rig.cluster.find(kind, name) or {})


async def begun(rig: Rig) -> Rig:
    rig.cluster.put(deployment())
    await rig.run()
    rig.start_all()
    await rig.run(20)
    return rig


@ALL
async def test_a_strangers_object_is_not_deleted_with_the_deployment(kind: Kind) -> None:
    rig = Rig()
    theirs = put(rig, kind, NAMES[kind])
    await begun(rig)
    rig.cluster.remove(DEPLOYMENT, "d")
    await rig.run(60)
    assert rig.cluster.find(kind, NAMES[kind]) == theirs


@ALL
async def test_a_child_of_an_earlier_object_is_waited_for_without_a_word_for_a_minute(kind: Kind) -> None:
    rig = Rig()
    owner = {"apiVersion": DEPLOYMENT.api_version, "kind": DEPLOYMENT.kind, "name": "d", "uid": "then", "controller": True}
    theirs = put(rig, kind, NAMES[kind], labels=LABELS, ownerReferences=[owner])
    await begun(rig)
    assert rig.cluster.find(kind, NAMES[kind]) == theirs
    assert rig.condition("ChildrenReady") == ("Unknown", "EarlierObjectLeaving")
    assert rig.cluster.notes("ChildRefused") == rig.cluster.notes("NameConflict") == []
    await rig.run(60)
    assert rig.condition("ChildrenReady") == ("False", "EarlierObjectLeaving")
    rig.cluster.remove(kind, NAMES[kind])
    await rig.run(61 if kind == SECRET else 2)
    assert rig.condition("ChildrenReady") == ("True", "AllApplied")


def refusal(kind: Kind) -> ClusterRefused:
    return ClusterRefused(
        f"post {kind.plural}: 403 exceeded quota", status=403, reason="Forbidden", said="exceeded quota: no more of these"
    )


@pytest.mark.parametrize("strategy", [{}, {"maxUnavailable": 0, "maxSurge": 1}, {"type": "Recreate"}], ids=["default", "surge", "recreate"])
@pytest.mark.parametrize("kind", MOUNTED, ids=lambda kind: kind.kind)
async def test_no_replica_goes_for_a_new_template_while_no_pod_can_be_made_of_it(kind: Kind, strategy: dict[str, Any]) -> None:
    rig = await serving(1, rollout=strategy)
    rig.cluster.refuse = lambda verb, manifest: refusal(kind) if manifest["kind"] == kind.kind else None
    rig.cluster.remove(kind, NAMES[kind])
    await rig.run(10)
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(engine={"maxBatchSize": 2}))
    await rig.run(120)
    assert (rig.cluster.names(POD), rig.routable()) == (["d-0-0"], ["d-0-0"])
    assert rig.condition("Ready")[0] == "True"
    assert rig.condition("Degraded") == ("True", "ChildrenNotReady")
    assert f"no pod is made: the API server did not accept a write of {kind.kind} {NAMES[kind]}" in rig.message("Progressing")
    rig.cluster.refuse = lambda verb, manifest: None
    await rig.run(90)
    rig.start_all()
    await rig.run(30)
    assert rig.cluster.names(POD) != ["d-0-0"]
    assert rig.condition("Progressing") == ("True", "RolloutComplete")
    assert rig.condition("Ready") == ("True", "Serving")


async def test_a_secret_that_may_not_be_changed_is_named_with_the_servers_words() -> None:
    rig = Rig()
    theirs = put(rig, SECRET, NAMES[SECRET], labels=LABELS)
    rig.cluster.refuse = lambda verb, manifest: refusal(SECRET) if (verb, manifest["kind"]) == ("patch", "Secret") else None
    await begun(rig)
    assert rig.cluster.find(SECRET, NAMES[SECRET]) == theirs
    assert rig.condition("ChildrenReady")[0] == "False"
    assert (
        rig.message("ChildrenReady") == f"the API server did not accept a write of Secret {NAMES[SECRET]}: exceeded quota: no more of these"
    )


async def test_a_configmap_whose_change_is_refused_keeps_no_pod_from_being_made() -> None:
    rig = await serving()
    rig.cluster.refuse = lambda verb, manifest: refusal(CONFIG_MAP) if manifest["kind"] == CONFIG_MAP.kind else None
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(sleep={"policy": "OnIdle"}))
    rig.cluster.remove(POD, "d-0-0")
    await rig.run(10)
    assert rig.cluster.names(POD) == ["d-0-1"]
    assert rig.condition("ChildrenReady") == ("False", "Forbidden")
    rig.start_all()
    await rig.run(10)
    assert rig.condition("Ready") == ("True", "Serving")


async def test_a_refused_child_is_tried_after_1_2_4_and_up_to_60_seconds() -> None:
    rig, tries = Rig(), []

    def refuse(verb: str, manifest: dict[str, Any]) -> ClusterError | None:
        if manifest["kind"] != SERVICE.kind:
            return None
        tries.append((rig.now - start).total_seconds())
        return refusal(SERVICE)

    start, rig.cluster.refuse = rig.now, refuse
    await begun(rig)
    await rig.run(600)
    gaps = [after - before for before, after in pairwise(tries)]
    assert gaps[:3] == pytest.approx([1, 2, 4], abs=1)
    assert len(tries) < 20
    assert max(gaps) <= 75


ODD = [ClusterUnavailable("odd", status=500, reason="InternalError", said="failed calling webhook"), KeyError("odd")]


@ALL
@pytest.mark.parametrize("error", ODD, ids=lambda error: type(error).__name__)
async def test_a_child_that_fails_in_a_way_nobody_expected_keeps_no_other_from_being_made(
    kind: Kind, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, failures = Rig(), [3]
    rig.survives = Exception
    create = rig.cluster.create

    async def fail(manifest: dict[str, Any]) -> bool:
        if manifest["kind"] == kind.kind and failures[0]:
            failures[0] -= 1
            raise error
        return await create(manifest)

    monkeypatch.setattr(rig.cluster, "create", fail)
    rig.cluster.put(deployment())
    await rig.run(0.5)
    assert all(rig.cluster.names(other) == [name] for other, name in NAMES.items() if other != kind)
    await rig.run(30)
    assert len(rig.errors) == 3, "each pass failed, and was tried again"
    assert rig.condition("ChildrenReady") == ("True", "AllApplied")


async def test_a_pod_that_cannot_be_deleted_keeps_the_others_and_the_status_from_nothing() -> None:
    rig = await serving(2)
    delete = rig.cluster.delete

    async def refuse(kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        if name == "d-0-0":
            raise ClusterRefused("delete pods: 403 a webhook says no", status=403)
        await delete(kind, namespace, name, uid=uid)

    rig.cluster.delete = refuse  # type: ignore[method-assign]
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(replicas=0))
    await rig.run(20)
    assert rig.cluster.names(POD) == ["d-0-0"]
    assert rig.condition("Ready") == ("False", "NoReplicas")
    assert any("a webhook says no" in error for error in rig.errors)


async def test_a_pass_that_cannot_plan_claims_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = await serving()

    def fail(*_: Any, **_named: Any) -> None:
        raise ClusterRefused("odd")

    monkeypatch.setattr("diffusion_operator.reconcile.deployment.plan_in_slices", fail)
    rig.restart_operator()
    await rig.run(20)
    assert rig.condition("Ready") == ("Unknown", "PassFailed")
    assert "odd" in rig.message("Ready")
    monkeypatch.undo()
    await rig.run(20)
    assert rig.condition("Ready") == ("True", "Serving")


async def test_a_pod_of_ours_that_lost_its_labels_unseen_is_taken_up_again() -> None:
    """Take the label from a pod while no operator runs. The next operator must take the pod up again, and make no other."""
    rig = await serving()
    pod = rig.cluster.find(POD, "d-0-0") or {}
    pod["metadata"]["labels"].pop(LABEL_DEPLOYMENT)
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(servedName="d"))
    status = (rig.cluster.find(DEPLOYMENT, "d") or {}).pop("status")
    assert status["replicaStates"][0]["incarnation"] == 0
    rig.restart_operator()
    await rig.run(10)
    assert rig.cluster.names(POD) == ["d-0-0"]
    assert pod["metadata"]["uid"] == (rig.cluster.find(POD, "d-0-0") or {})["metadata"]["uid"]
    assert rig.condition("Ready") == ("True", "Serving")
