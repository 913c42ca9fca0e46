# SPDX-License-Identifier: Apache-2.0
"""The operator's store of objects: the newest version wins from watch and listing alike, and a deleted object stays deleted."""

from typing import Any

import pytest

from diffusion_operator.api.names import ADAPTER, DEPLOYMENT, LABEL_DEPLOYMENT, POD, SERVICE, Kind
from diffusion_operator.reconcile.store.object_store import ObjectStore
from diffusion_operator.reconcile.store.watched_cluster import WatchedCluster
from support.operator.fake_cluster import FakeCluster


class Changes:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, kind: Kind, manifest: dict[str, Any]) -> None:
        self.seen.append(manifest["metadata"]["name"])


@pytest.fixture
def changes() -> Changes:
    return Changes()


@pytest.fixture
def store(changes: Changes) -> ObjectStore:
    return ObjectStore(changes)


def made(name: str = "p", version: int = 1, *, uid: str = "", namespace: str = "n", of: str = "d", **more: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace, "uid": uid or f"uid-{name}", "resourceVersion": str(version)}
    return {"metadata": metadata | {"labels": {LABEL_DEPLOYMENT: of}}, **more}


def adapter(version: int, deployment: str) -> dict[str, Any]:
    return made("a", version, spec={"deploymentRef": {"name": deployment}})


def test_the_echo_of_an_own_write_is_no_news(store: ObjectStore, changes: Changes) -> None:
    store.put(POD, made(version=1))
    store.learn(POD, made(version=2, status={"phase": "Running"}))
    store.put(POD, made(version=2, status={"phase": "Running"}))
    assert changes.seen == ["p"]
    store.put(POD, made(version=3))
    assert changes.seen == ["p", "p"]


def test_an_answer_without_a_version_tells_nothing(store: ObjectStore) -> None:
    """Check that the store ignores an object without a version. An API server answers so to a deletion that another client made just
    before."""
    known = made(version=1)
    store.put(POD, known)
    gone = made(version=2, status={"phase": "Failed"})
    del gone["metadata"]["resourceVersion"]
    store.learn(POD, gone)
    assert store.get(POD, "n", "p") == known | {"apiVersion": POD.api_version, "kind": POD.kind, "spec": {"nodeName": "", "containers": []}}


def test_an_older_version_never_wins(store: ObjectStore) -> None:
    store.learn(SERVICE, made(version=10, spec={"type": "NodePort"}))
    store.put(SERVICE, made(version=9, spec={"type": "ClusterIP"}))
    found = store.get(SERVICE, "n", "p")
    assert found is not None
    assert found["spec"] == {"type": "NodePort"}


def test_an_answer_that_is_late_brings_nothing_back(store: ObjectStore, changes: Changes) -> None:
    store.put(DEPLOYMENT, made(version=1))
    store.remove(DEPLOYMENT, made(version=3))
    store.learn(DEPLOYMENT, made(version=2))
    assert store.get(DEPLOYMENT, "n", "p") is None
    assert changes.seen == ["p", "p"]
    store.put(DEPLOYMENT, made(version=4, uid="another"))
    assert store.get(DEPLOYMENT, "n", "p") is not None


def test_what_was_out_of_sight_for_a_while_is_seen_again(store: ObjectStore) -> None:
    """Check that an object is known again after a removal. A watch by labels reports so an object that loses its labels and gets them
    back."""
    store.put(POD, made(version=1))
    store.remove(POD, made(version=2))
    store.put(POD, made(version=3))
    assert store.get(POD, "n", "p") is not None


def test_the_end_of_one_object_is_not_that_of_its_successor(store: ObjectStore) -> None:
    store.put(POD, made(version=5, uid="new"))
    store.remove(POD, made(version=4, uid="old"))
    assert store.get(POD, "n", "p") is not None


def test_a_listing_forgets_what_went_unheard_and_nothing_that_came_since(store: ObjectStore, changes: Changes) -> None:
    store.put(POD, made("gone", 1))
    store.put(POD, made("stays", 1))
    before = store.places(POD, "n")
    store.learn(POD, made("new", 2))
    store.keep_only(POD, before, {"uid-stays"}, version="3")
    assert sorted(name for _, name in store.places(POD, "")) == ["new", "stays"]
    assert changes.seen[-1] == "gone"
    assert [pod["metadata"]["name"] for pod in store.of_deployment(POD, "n", "d")] == ["new", "stays"]


def test_an_adapter_that_turns_to_another_deployment_is_found_there_alone(store: ObjectStore) -> None:
    store.put(ADAPTER, adapter(1, "one"))
    store.put(ADAPTER, adapter(2, "two"))
    assert store.of_deployment(ADAPTER, "n", "one") == []
    assert [found["metadata"]["name"] for found in store.of_deployment(ADAPTER, "n", "two")] == ["a"]


def test_a_child_that_loses_its_label_is_its_deployments_no_more(store: ObjectStore) -> None:
    store.put(SERVICE, made(version=1, of="d"))
    store.put(SERVICE, made(version=2, of="other"))
    assert store.of_deployment(SERVICE, "n", "d") == []
    assert len(store.of_deployment(SERVICE, "n", "other")) == 1


async def test_looks_ask_nobody_and_give_only_what_was_asked_for() -> None:
    store = ObjectStore(lambda kind, manifest: None)
    cluster = WatchedCluster(FakeCluster(), store)
    for name, namespace, of in (("a", "n", "d"), ("b", "n", "e"), ("c", "m", "d")):
        store.put(POD, made(name, namespace=namespace, of=of))
    assert [pod["metadata"]["name"] for pod in await cluster.list(POD, "n", labels={LABEL_DEPLOYMENT: "d"})] == ["a"]
    assert [pod["metadata"]["name"] for pod in await cluster.list(POD, "n")] == ["a", "b"]
    assert (await cluster.get(POD, "m", "c") or {})["kind"] == "Pod"
    assert await cluster.get(POD, "n", "c") is None
