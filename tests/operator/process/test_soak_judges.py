# SPDX-License-Identifier: Apache-2.0
"""The judges of the operator's soaks find a second writer, a touched object, a status that claims too much, and a refusal
without a fault.
"""

from typing import Any

import pytest

from diffusion_operator.api import names
from diffusion_operator.api.names import CONFIG_MAP, DEPLOYMENT, POD, SERVICE
from support.apiserver.rest_client import RestClient
from support.operator.fake_kubelet import FakeKubelet
from support.operator.rig import deployment
from support.soak.node import met
from support.soak.operator_lives import account_of
from support.soak.operator_obstacles import MARK, THEIRS, Obstacles, Strangers
from support.soak.operator_truth import is_changed, overclaimed
from support.soak.writers import foreign_writes


def entry(second: float, account: str, resource: str, *, verb: str = "patch", code: int = 200, query: str = "") -> dict[str, Any]:
    return {
        "requestReceivedTimestamp": f"2026-01-01T00:00:{second:09.6f}Z",
        "verb": verb,
        "requestURI": f"/api/v1/{resource}{query}",
        "user": {"username": f"system:serviceaccount:operators:{account}"},
        "objectRef": {"resource": resource, "namespace": "n", "name": "d"},
        "responseStatus": {"code": code},
    }


TAKE_OVER = [entry(0, "one", "leases", verb="create"), entry(1, "one", "pods"), entry(5, "two", "leases")]


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ([entry(6, "two", "pods")], ""),
        ([entry(6, "one", "pods")], "one writes (patch pods n/d), and two wrote the Lease last"),
        ([entry(21, "two", "pods")], "two writes (patch pods n/d), and two wrote the Lease last"),
        ([entry(6, "one", "pods", code=409)], ""),
        ([entry(6, "one", "pods", query="?dryRun=All")], ""),
        ([entry(6, "one", "pods", verb="get")], ""),
        ([entry(6, "one", "leases"), entry(7, "one", "pods")], ""),
        ([entry(6, "somebody", "pods")], ""),
    ],
    ids=["leader", "former leader", "expired", "refused", "dry run", "look", "leader again", "no operator"],
)
def test_of_two_operators_the_one_that_wrote_the_lease_last_may_write(more: list[dict[str, Any]], found: str) -> None:
    judged = foreign_writes([*more, *TAKE_OVER], account_of)
    assert [found in one for one in judged.foreign] == [True] * bool(found)
    assert judged.lead_changes >= 2


@pytest.mark.parametrize(
    ("when", "excused"), [((0.0, 1.0), False), ((5.0, 10.5), True), ((15.0, 15.5), True), ((21.0, 22.0), True), ((22.5, 23.0), False)]
)
def test_a_refusal_is_excused_by_a_fault_that_the_request_met(when: tuple[float, float], excused: bool) -> None:
    assert met(when, [(10.0, 20.0)]) is excused


@pytest.mark.parametrize(
    ("changes", "changed"),
    [
        ({}, False),
        ({"spec": {"selector": {"drifted": "yes"}}}, True),
        ({"metadata": {"labels": {}}}, True),
        ({"metadata": {"labels": {"app.kubernetes.io/managed-by": "diffusion-operator", "team": "a"}}}, False),
    ],
)
def test_a_child_that_another_client_changed_is_seen(changes: dict[str, Any], changed: bool) -> None:
    child = {"metadata": {"labels": {"app.kubernetes.io/managed-by": "diffusion-operator"}}, "spec": {"selector": {"app": "a"}}}
    assert is_changed(child | changes) is changed


@pytest.mark.apiserver
@pytest.mark.slow
async def test_a_stranger_that_was_touched_is_named(client: RestClient) -> None:
    await client.make_namespace("touched")
    strangers = Strangers(client, "touched")
    for name in ("changed", "gone", "same"):
        assert await strangers.make(SERVICE, name)
    assert not await strangers.make(SERVICE, "same"), "the name is taken"
    await client.patch(SERVICE, "touched", "changed", {"metadata": {"labels": {"a": "b"}}})
    await client.delete(SERVICE, "touched", "gone")
    await strangers.leave_all()
    assert [what.split(" of ")[0] for what in strangers.touched] == ["Service changed", "Service gone"]
    assert [one["metadata"]["name"] for one in await client.list(SERVICE, "touched")] == ["changed"]


@pytest.mark.apiserver
@pytest.mark.slow
async def test_a_child_without_owner_and_without_our_mark_goes_with_the_obstacles(client: RestClient, kubelet: FakeKubelet) -> None:
    await client.make_namespace("disowned")
    for kind, name, mark in ((CONFIG_MAP, "d-desired", MARK), (SERVICE, "d", names.FIELD_MANAGER)):
        await client.create(kind, "disowned", {**THEIRS[kind], "metadata": {"name": name, "labels": {names.LABEL_MANAGED_BY: mark}}})
    assert await Obstacles(client, kubelet, None, "disowned").all_go() == []  # type: ignore[arg-type]
    left = [one["metadata"]["name"] for kind in (CONFIG_MAP, SERVICE) for one in await client.list(kind, "disowned")]
    assert left == ["d"]


@pytest.mark.apiserver
@pytest.mark.slow
async def test_a_status_that_claims_what_is_not_there_is_found(client: RestClient, kubelet: FakeKubelet) -> None:
    """Write a false status, and check that `overclaimed` finds each of its false claims. No operator runs."""
    await client.make_namespace("claimed")
    await client.create(DEPLOYMENT, "claimed", deployment())
    assert await overclaimed(client, kubelet, "claimed", ()) == ["the deployment is not observed"]
    since = {"lastTransitionTime": "2026-01-01T00:00:00Z", "message": "", "observedGeneration": 1}
    conditions = [{"type": "Ready", "status": "True", "reason": "Serving", **since}]
    conditions += [{"type": "ChildrenReady", "status": "True", "reason": "AllApplied", **since}]
    group = {"index": 0, "state": "Awake", "leaderPod": "d-0-0"}
    status = {"observedGeneration": 1, "replicas": 1, "conditions": conditions, "replicaStates": [group]}
    code, answer = await client.patch(DEPLOYMENT, "claimed", "d", {"status": status}, subresource="/status")
    assert code == 200, answer
    found = await overclaimed(client, kubelet, "claimed", [(SERVICE, "d"), (POD, "d-0-0")])
    assert "status.replicas is 1, and there are 0 pods" in found
    assert "Ready is Serving with 0 of 1 pods" in found
    assert "Ready is Serving without a Service of its own" in found
    assert "{'d-0-0'} are said to serve" in found
    assert any("does not tell of Service d" in what for what in found)


@pytest.mark.apiserver
@pytest.mark.slow
async def test_a_pod_that_an_earlier_object_left_counts_as_a_replica_and_a_copied_name_does_not(
    client: RestClient, kubelet: FakeKubelet
) -> None:
    await client.make_namespace("left")
    await client.create(DEPLOYMENT, "left", deployment())
    spec = {"containers": [{"name": "c", "image": "i"}]}
    ours = {names.LABEL_DEPLOYMENT: "d", names.LABEL_MANAGED_BY: names.FIELD_MANAGER}
    for name, labels in (("d-0-0", ours), ("d-1-0", {})):
        await client.create(POD, "left", {"metadata": {"name": name, "labels": labels}, "spec": spec})
    status = {"observedGeneration": 1, "replicas": 1, "conditions": []}
    code, answer = await client.patch(DEPLOYMENT, "left", "d", {"status": status}, subresource="/status")
    assert code == 200, answer
    assert not any("status.replicas" in what for what in await overclaimed(client, kubelet, "left", ()))
