# SPDX-License-Identifier: Apache-2.0
"""Our eleven verbs over the client library, against a real API server: the effect of each, and the error for each failure."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from diffusion_operator import cluster as cluster_module
from diffusion_operator import watch_stream
from diffusion_operator.api.meta import ObjectMeta
from diffusion_operator.api.names import CONFIG_MAP, DEPLOYMENT, LABEL_DEPLOYMENT, LABEL_MANAGED_BY, POD, SECRET, SERVICE, Kind
from diffusion_operator.cluster import KubernetesCluster, connect
from diffusion_operator.election.gated import GatedCluster
from diffusion_operator.election.leadership import Leadership
from diffusion_operator.errors import ClusterConflict, ClusterError, ClusterRefused, ClusterUnavailable, NotLeading
from diffusion_operator.plan.observed.children import REFUSALS
from diffusion_operator.plan.observed.observed import Answer
from diffusion_operator.plan.observed.ownership import (
    adopt_secret,
    as_if_applied,
    replace_whole,
    secret_is_leaving,
    secret_is_ours,
)
from diffusion_operator.plan.replicas.template_trial import answer_of
from support.apiserver.real_apiserver import kubectl

pytestmark = pytest.mark.apiserver
NAMESPACE = "verbs"


@pytest.fixture(scope="module")
def namespace(kubeconfig_of_apiserver: Path) -> str:
    kubectl(kubeconfig_of_apiserver, "create", "namespace", NAMESPACE)
    return NAMESPACE


@pytest.fixture
async def cluster(kubeconfig_of_apiserver: Path, namespace: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubernetesCluster]:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig_of_apiserver))
    async with await connect() as connected:
        yield connected


def config_map(name: str, **data: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": NAMESPACE, "labels": {"app": "verbs"}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def pod(name: str) -> dict[str, Any]:
    spec = {"containers": [{"name": "c", "image": "i"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec}


async def test_what_is_not_there_is_none(cluster: KubernetesCluster) -> None:
    assert await cluster.get(POD, NAMESPACE, "none") is None


async def test_apply_makes_changes_and_takes_away_what_it_no_longer_says(cluster: KubernetesCluster) -> None:
    await cluster.apply(config_map("a", one="1", two="2"))
    await cluster.apply(config_map("a", one="3"))
    found = await cluster.get(CONFIG_MAP, NAMESPACE, "a")
    assert found is not None
    assert found["data"] == {"one": "3"}


async def test_an_apply_that_changes_nothing_leaves_the_version(cluster: KubernetesCluster) -> None:
    versions = []
    for _ in range(2):
        await cluster.apply(config_map("same", one="1"))
        found = await cluster.get(CONFIG_MAP, NAMESPACE, "same")
        assert found is not None
        versions.append(found["metadata"]["resourceVersion"])
    assert versions[0] == versions[1]


async def test_lists_are_read_to_the_end_and_by_label(cluster: KubernetesCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "PAGE", 2)
    for index in range(5):
        await cluster.apply(config_map(f"list-{index}"))
    names = {one["metadata"]["name"] for one in await cluster.list(CONFIG_MAP, NAMESPACE, labels={"app": "verbs"})}
    assert {f"list-{index}" for index in range(5)} <= names
    assert await cluster.list(CONFIG_MAP, NAMESPACE, labels={"app": "other"}) == []


async def test_creating_twice_is_said(cluster: KubernetesCluster) -> None:
    assert await cluster.create(pod("twice")) is True
    assert await cluster.create(pod("twice")) is False


async def test_a_label_is_set_and_taken_off_for_that_uid_only(cluster: KubernetesCluster) -> None:
    await cluster.create(pod("labelled"))
    found = await cluster.get(POD, NAMESPACE, "labelled")
    assert found is not None
    uid = found["metadata"]["uid"]
    await cluster.set_labels(POD, NAMESPACE, "labelled", uid=uid, labels={"x": "true"})
    found = await cluster.get(POD, NAMESPACE, "labelled")
    assert found is not None
    assert found["metadata"]["labels"] == {"x": "true"}
    await cluster.set_labels(POD, NAMESPACE, "labelled", uid=uid, labels={"x": None})
    found = await cluster.get(POD, NAMESPACE, "labelled")
    assert found is not None
    assert "labels" not in found["metadata"]
    for name, other in (("labelled", "other"), ("none", uid)):
        await cluster.set_labels(POD, NAMESPACE, name, uid=other, labels={"x": "true"})
    assert "labels" not in ((await cluster.get(POD, NAMESPACE, "labelled")) or found)["metadata"]


async def test_a_delete_takes_only_the_object_that_was_seen(cluster: KubernetesCluster) -> None:
    await cluster.apply(config_map("deleted"))
    found = await cluster.get(CONFIG_MAP, NAMESPACE, "deleted")
    assert found is not None
    await cluster.delete(CONFIG_MAP, NAMESPACE, "deleted", uid="other")
    assert await cluster.get(CONFIG_MAP, NAMESPACE, "deleted") is not None
    await cluster.delete(CONFIG_MAP, NAMESPACE, "deleted", uid=found["metadata"]["uid"])
    assert await cluster.get(CONFIG_MAP, NAMESPACE, "deleted") is None
    await cluster.delete(CONFIG_MAP, NAMESPACE, "deleted", uid=found["metadata"]["uid"])


async def test_a_status_is_replaced_as_a_whole_and_the_spec_is_not_touched(cluster: KubernetesCluster) -> None:
    spec = {"model": {"source": {"path": "/m"}}}
    metadata = {"name": "stated", "namespace": NAMESPACE}
    await cluster.create({"apiVersion": DEPLOYMENT.api_version, "kind": DEPLOYMENT.kind, "metadata": metadata, "spec": spec})
    before = await cluster.get(DEPLOYMENT, NAMESPACE, "stated")
    assert before is not None
    for status in ({"replicas": 1, "servedName": "a"}, {"replicas": 2}):
        await cluster.apply_status(DEPLOYMENT, NAMESPACE, "stated", status=status, version=await _version(cluster))
    found = await cluster.get(DEPLOYMENT, NAMESPACE, "stated")
    assert found is not None
    assert found["status"] == {"replicas": 2}
    assert found["spec"] == before["spec"]
    assert found["metadata"]["generation"] == before["metadata"]["generation"]
    await cluster.apply_status(DEPLOYMENT, NAMESPACE, "none", status={}, version="1")  # an object that is gone meanwhile is no failure
    with pytest.raises(ClusterError, match="replicas"):
        await cluster.apply_status(DEPLOYMENT, NAMESPACE, "stated", status={"replicas": "many"}, version=await _version(cluster))
    version = await _version(cluster)
    await cluster.set_labels(DEPLOYMENT, NAMESPACE, "stated", uid=found["metadata"]["uid"], labels={"by": "somebody"})
    with pytest.raises(ClusterConflict):
        await cluster.apply_status(DEPLOYMENT, NAMESPACE, "stated", status={"replicas": 3}, version=version)


async def _version(cluster: KubernetesCluster) -> str:
    found = await cluster.get(DEPLOYMENT, NAMESPACE, "stated")
    assert found is not None
    return str(found["metadata"]["resourceVersion"])


async def test_any_character_can_be_applied(cluster: KubernetesCluster) -> None:
    text = "🙂 é \x85 \x00 \ufffe \\ud83d\\ude00"
    metadata = {"name": "text", "namespace": NAMESPACE}
    await cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"text": text}})
    found = await cluster.get(CONFIG_MAP, NAMESPACE, "text")
    assert found is not None
    assert found["data"]["text"] == text


@pytest.mark.parametrize("name", ["\n", "../pods/x", "a/b", "?watch=true"])
async def test_a_name_never_leads_to_another_path(cluster: KubernetesCluster, name: str) -> None:
    assert await cluster.get(DEPLOYMENT, NAMESPACE, name) is None


async def test_a_refusal_carries_the_api_servers_own_sentence(cluster: KubernetesCluster) -> None:
    with pytest.raises(ClusterRefused, match=r"spec\.containers: Required value") as caught:
        await cluster.create({**pod("bad"), "spec": {}})
    assert caught.value.status == 422


def service(name: str, port: int = 80, **annotations: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": NAMESPACE, "annotations": annotations}
    ports = [{"name": "http", "port": port, "targetPort": 8000, "protocol": "TCP"}]
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"selector": {"a": "b"}, "ports": ports}}


def bound(manifest: dict[str, Any], live: dict[str, Any], *names: str) -> dict[str, Any]:
    return manifest | {"metadata": manifest["metadata"] | {name: live["metadata"][name] for name in names}}


async def found(cluster: KubernetesCluster, kind: Kind, name: str) -> dict[str, Any]:
    live = await cluster.look_up(kind, NAMESPACE, name)
    assert live is not None
    return live


async def test_a_look_by_name_finds_it_whole_or_nothing(cluster: KubernetesCluster) -> None:
    assert await cluster.look_up(SERVICE, NAMESPACE, "looked") is None
    await cluster.create(service("looked"))
    live = await found(cluster, SERVICE, "looked")
    assert (live["kind"], live["metadata"]["managedFields"][0]["operation"]) == ("Service", "Update")


async def test_an_edited_port_cannot_be_merged_and_is_replaced_as_a_whole(
    cluster: KubernetesCluster, kubeconfig_of_apiserver: Path
) -> None:
    await cluster.create(service("edited"))
    live = await found(cluster, SERVICE, "edited")
    await cluster.patch(SERVICE, NAMESPACE, "edited", as_if_applied(live))
    change = '[{"op": "replace", "path": "/spec/ports/0/port", "value": 8080}]'
    kubectl(kubeconfig_of_apiserver, "patch", "service", "edited", "-n", NAMESPACE, "--type=json", "-p", change)
    live = await found(cluster, SERVICE, "edited")
    with pytest.raises(ClusterRefused, match="Duplicate value") as refused:
        await cluster.apply(bound(service("edited"), live, "uid"))
    assert (refused.value.status, refused.value.reason) == (422, "Invalid")
    await cluster.patch(SERVICE, NAMESPACE, "edited", replace_whole(live, service("edited")))
    after = await found(cluster, SERVICE, "edited")
    assert [port["port"] for port in after["spec"]["ports"]] == [80]
    assert after["spec"]["clusterIP"] == live["spec"]["clusterIP"]
    with pytest.raises(ClusterConflict):  # the version is not the same any more
        await cluster.patch(SERVICE, NAMESPACE, "edited", replace_whole(live, service("edited")))
    await cluster.patch(SERVICE, NAMESPACE, "edited", as_if_applied(after))
    await cluster.apply(bound(service("edited", 81), after, "uid"))
    assert [port["port"] for port in (await found(cluster, SERVICE, "edited"))["spec"]["ports"]] == [81]


async def test_an_apply_is_bound_to_what_was_seen(cluster: KubernetesCluster) -> None:
    await cluster.create(config_map("bound", one="1"))
    live = await found(cluster, CONFIG_MAP, "bound")
    for name, other in (("uid", "00000000-0000-0000-0000-000000000000"), ("resourceVersion", "1")):
        metadata = live["metadata"] | {name: other}
        with pytest.raises(ClusterConflict):
            await cluster.apply(bound(config_map("bound", one="2"), {"metadata": metadata}, name))
    with pytest.raises(ClusterConflict):
        await cluster.apply(bound(config_map("not-there"), live, "uid"))
    assert await cluster.look_up(CONFIG_MAP, NAMESPACE, "not-there") is None
    await cluster.apply(bound(config_map("bound", one="2"), live, "uid", "resourceVersion"))


OWNER = ObjectMeta(name="d", namespace=NAMESPACE, uid="00000000-0000-0000-0000-000000000001", creation_timestamp=datetime.now(UTC))
REFERENCE = {"apiVersion": DEPLOYMENT.api_version, "kind": DEPLOYMENT.kind, "name": "d", "uid": OWNER.uid, "controller": True}
LIVING = "00000000-0000-0000-0000-000000000002"
OURS = {LABEL_MANAGED_BY: "diffusion-operator", LABEL_DEPLOYMENT: "d"}
SECRETS: list[tuple[str, dict[str, Any], str]] = [
    ("ours", {"ownerReferences": [REFERENCE]}, "ours"),
    ("leaving", {"ownerReferences": [REFERENCE | {"uid": LIVING}]}, "leaving"),
    ("orphan", {"labels": OURS}, "adopted"),
    ("unlabelled", {"labels": {LABEL_DEPLOYMENT: "d"}}, "stranger"),
    ("strange", {}, "stranger"),
    ("owned", {"ownerReferences": [REFERENCE | {"name": "e", "uid": LIVING}], "labels": OURS}, "stranger"),
]


@pytest.mark.parametrize(("name", "more", "expected"), SECRETS, ids=[row[0] for row in SECRETS])
async def test_patches_tell_whose_a_secret_is_and_change_nothing(
    cluster: KubernetesCluster, name: str, more: dict[str, Any], expected: str
) -> None:
    """Run the JSON patches by which the operator, which may not get Secrets, finds out who owns a Secret.

    Only a successful adoption may change the Secret: it adds an owner reference.
    """
    metadata = {"name": f"s-{name}", "namespace": NAMESPACE, **more}
    await cluster.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": {"token": "YQ=="}})

    async def holds(operations: list[dict[str, Any]]) -> dict[str, Any] | None:
        try:
            return await cluster.patch(SECRET, NAMESPACE, f"s-{name}", operations)
        except ClusterRefused as error:
            assert error.status == 422
            return None

    before = await found(cluster, SECRET, f"s-{name}")
    assert bool(await holds(secret_is_ours(OWNER))) is (expected == "ours")
    assert bool(await holds(secret_is_leaving(OWNER))) is (name in ("ours", "leaving"))
    assert await found(cluster, SECRET, f"s-{name}") == before
    adopted = await holds(adopt_secret(OWNER, [REFERENCE]))
    assert bool(adopted) is (expected == "adopted")
    if adopted is not None:
        assert adopted["metadata"]["ownerReferences"] == [REFERENCE]
    else:
        assert await found(cluster, SECRET, f"s-{name}") == before


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
async def test_a_config_map_over_a_mebibyte_is_refused_and_not_unavailable(cluster: KubernetesCluster) -> None:
    """Check that a ConfigMap over 1 MiB raises ClusterRefused with a reason in `REFUSALS`, not ClusterUnavailable."""
    for name, size in (("big", 1_100_000), ("bigger", 4_000_000)):
        with pytest.raises(ClusterRefused) as refused:
            await cluster.create(config_map(name, text="x" * size))
        assert refused.value.reason in REFUSALS


async def test_a_server_that_is_away_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        "{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: k, user: u}}],"
        " clusters: [{name: k, cluster: {server: 'http://127.0.0.1:1'}}], users: [{name: u, user: {token: t}}]}"
    )
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    async with await connect() as connected:
        with pytest.raises(ClusterUnavailable):
            await connected.get(POD, NAMESPACE, "none")


async def test_a_dry_run_makes_nothing_and_is_not_taken_for_an_object(cluster: KubernetesCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    answered: list[str] = []
    monkeypatch.setattr(cluster, "_answered", lambda kind, manifest: answered.append(manifest["metadata"]["name"]))
    await cluster.try_create(pod("tried"))
    assert await cluster.get(POD, NAMESPACE, "tried") is None
    assert answered == []
    assert await cluster.create(pod("tried")) is True
    assert answered == ["tried"]
    await cluster.try_create(pod("tried"))  # the name is taken, and the pod is fine


async def test_a_write_is_not_sent_if_another_may_lead_since_it_was_begun(cluster: KubernetesCluster) -> None:
    leadership = Leadership()

    class StoppedBeforeSending:
        """A stand-in for the cluster's port whose `create` first ends the leadership, as a stop of the process for longer than the Lease
        does."""

        async def create(self, manifest: dict[str, Any]) -> bool:
            leadership._until = 0.0
            return await cluster.create(manifest)

    gated = GatedCluster(StoppedBeforeSending(), leadership)  # type: ignore[arg-type]
    for name in ("on-a-new-connection", "on-a-used-connection"):
        now = asyncio.get_running_loop().time()
        leadership.open(1, renewed_at=now, until=now + 100)
        with pytest.raises(NotLeading):
            await gated.create(config_map(name))
        assert await cluster.get(CONFIG_MAP, NAMESPACE, name) is None
    assert await cluster.create(config_map("without-a-gate")) is True


def greedy(name: str) -> dict[str, Any]:
    """Return a pod that requests more than its limit allows."""
    resources = {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}
    return {**pod(name), "spec": {"containers": [{"name": "c", "image": "i", "resources": resources}]}}


def privileged(name: str) -> dict[str, Any]:
    return {**pod(name), "spec": {"containers": [{"name": "c", "image": "i", "securityContext": {"privileged": True}}]}}


async def answer(cluster: KubernetesCluster, manifest: dict[str, Any], namespace: str) -> tuple[Answer, str]:
    try:
        await cluster.try_create({**manifest, "metadata": {**manifest["metadata"], "namespace": namespace}})
    except ClusterError as error:
        return answer_of(error.status, str(error)), str(error)
    return Answer.FINE, ""


async def test_what_a_pod_cannot_be_and_what_a_policy_refuses_is_said_by_a_dry_run(
    cluster: KubernetesCluster, kubeconfig_of_apiserver: Path
) -> None:
    found, words = await answer(cluster, greedy("greedy"), NAMESPACE)
    assert (found, "422" in words, "must be less than or equal to cpu limit" in words) == (Answer.REFUSED, True, True)
    kubectl(kubeconfig_of_apiserver, "create", "namespace", "guarded")
    kubectl(kubeconfig_of_apiserver, "label", "namespace", "guarded", "pod-security.kubernetes.io/enforce=baseline")
    async with asyncio.timeout(20):
        while (await answer(cluster, privileged("p"), "guarded"))[0] is Answer.FINE:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    found, words = await answer(cluster, privileged("p"), "guarded")
    assert (found, "403" in words, "PodSecurity" in words) == (Answer.REFUSED, True, True)
    limits = {"limits": [{"type": "Container", "max": {"cpu": "1"}}]}
    range_ = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "l", "namespace": "guarded"}, "spec": limits}
    kubectl(kubeconfig_of_apiserver, "create", "-f", "-", stdin=json.dumps(range_))
    large = {**pod("large"), "spec": {"containers": [{"name": "c", "image": "i", "resources": {"limits": {"cpu": "2"}}}]}}
    async with asyncio.timeout(20):
        while (await answer(cluster, large, "guarded"))[0] is Answer.FINE:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    assert "maximum cpu usage per Container is 1" in (await answer(cluster, large, "guarded"))[1]


async def test_a_quota_and_a_webhook_that_is_away_say_nothing_of_a_template(
    cluster: KubernetesCluster, kubeconfig_of_apiserver: Path
) -> None:
    kubectl(kubeconfig_of_apiserver, "create", "namespace", "full")
    kubectl(kubeconfig_of_apiserver, "-n", "full", "create", "quota", "q", "--hard=pods=0")
    status = json.dumps({"status": {"hard": {"pods": "0"}, "used": {"pods": "0"}}})
    kubectl(kubeconfig_of_apiserver, "-n", "full", "patch", "quota", "q", "--subresource=status", "--type=merge", "-p", status)
    async with asyncio.timeout(20):
        while not (told := await answer(cluster, pod("one-more"), "full"))[1]:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    assert (told[0], "exceeded quota: q" in told[1]) == (Answer.FINE, True)
    found, words = await answer(cluster, greedy("greedy"), "full")
    assert (found, "422" in words) == (Answer.REFUSED, True), "a quota is looked at last"
    hook = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": "away"},
        "webhooks": [
            {
                "name": "away.example.com",
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "timeoutSeconds": 1,
                "clientConfig": {"url": "https://127.0.0.1:1/"},
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "hooked"}},
                "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
            }
        ],
    }
    kubectl(kubeconfig_of_apiserver, "create", "namespace", "hooked")
    kubectl(kubeconfig_of_apiserver, "create", "-f", "-", stdin=json.dumps(hook))
    async with asyncio.timeout(20):
        while not (told := await answer(cluster, pod("p"), "hooked"))[1]:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    assert (told[0], "failed calling webhook" in told[1]) == (Answer.UNDECIDED, True)


async def test_a_watch_brings_what_came_changed_and_went_since_a_version_by_label_and_in_lines_of_any_length(
    cluster: KubernetesCluster,
) -> None:
    labels = {"watched": "true"}
    since = [page.version async for page in cluster.pages(CONFIG_MAP, NAMESPACE)][-1]
    large = config_map("watched", text="x" * 900_000)
    large["metadata"]["labels"] = labels
    await cluster.create(config_map("not-watched"))
    await cluster.create(large)
    await cluster.apply(large | {"data": {"text": "y"}})
    uid = (await cluster.list(CONFIG_MAP, NAMESPACE, labels=labels))[0]["metadata"]["uid"]
    await cluster.delete(CONFIG_MAP, NAMESPACE, "watched", uid=uid)
    seen = []
    async with asyncio.timeout(20), cluster.watch(CONFIG_MAP, NAMESPACE, since=since, labels=labels) as events:
        async for event in events:
            seen.append((event.type, event.object["metadata"]["name"]))
            if event.type == "DELETED":
                break
    assert seen == [("ADDED", "watched"), ("MODIFIED", "watched"), ("DELETED", "watched")]


async def test_a_watch_ends_by_itself_without_an_error_and_a_bookmark_tells_of_changes_elsewhere(
    cluster: KubernetesCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_stream, "WATCH_S", 8)
    since = [page.version async for page in cluster.pages(CONFIG_MAP, NAMESPACE)][-1]
    async with asyncio.timeout(30), cluster.watch(CONFIG_MAP, NAMESPACE, since=since, labels={"watched": "true"}) as events:
        await cluster.create(config_map("elsewhere"))
        found = [event async for event in events]
    assert {event.type for event in found} == {"BOOKMARK"}
    assert int(found[-1].object["metadata"]["resourceVersion"]) > int(since)


async def test_a_watch_of_a_version_that_no_api_server_knows_is_an_error(cluster: KubernetesCluster) -> None:
    async def opened(since: str) -> None:
        async with asyncio.timeout(20), cluster.watch(CONFIG_MAP, NAMESPACE, since=since) as events:
            async for _ in events:
                pass

    with pytest.raises(ClusterError, match="nonsense"):
        await opened("nonsense")
