# SPDX-License-Identifier: Apache-2.0
"""A model of a hub on a real cluster: its commit is pinned, pods restart, and the repository goes away. The token is in a Secret, and two
pods share a cache on a claim.

The hub is a fake in a pod, with a certificate of its own authority; the cache lies in a folder of the node's /tmp.
"""

from collections.abc import Iterator

import pytest

from support.cluster.rig import SERVING, ClusterRig
from support.cluster.store import ACCESS_KEY, STORE, TRUST, apply, claim_on_the_node, remove_store, secret, start_store, worker_environment
from support.sources import servers
from tools.demo.kubectl import Document, Wanted

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

NAME, TOKEN, SCRATCH, CACHE = "fetched", "hub-token", "scratch", "model-cache"
DD = f"dd/{NAME}"
FOLDER = "diffusion-operator-model-cache"
SOURCE = {"huggingFace": {"repo": "org/digits", "tokenSecretRef": {"name": TOKEN}}}


def move_branch(rig: ClusterRig, commit: str) -> None:
    """Move the hub's branch to a commit; with an empty commit the hub has no repository any more."""
    rig.kubectl.text("exec", STORE, "--", "sh", "-c", f"echo {commit} > {servers.MAIN}")


def model_of(rig: ClusterRig, pod: str) -> Document:
    return dict(rig.state_of(pod)["model"])


@pytest.fixture(scope="module")
def fetched(rig: ClusterRig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterRig]:
    """Start a replica that serves a model from the hub, and provide the rig. All that was made is removed in the end."""
    namespace = rig.kubectl.namespace
    apply(
        rig,
        *claim_on_the_node(namespace, SCRATCH),
        *claim_on_the_node(namespace, CACHE, f"/tmp/{FOLDER}"),
        secret(TOKEN, token=ACCESS_KEY.encode()),
    )
    empty = f"rm -rf /claim/{FOLDER} && mkdir /claim/{FOLDER}"
    start_store(rig, tmp_path_factory.mktemp("store"), served="/models", claim=SCRATCH, first=empty)
    rig.deploy(
        NAME,
        model={"source": SOURCE, "cache": {"claim": {"claimName": CACHE}}},
        engine={"env": worker_environment(rig)},
        lora={"secrets": [TRUST]},
    )
    rig.wait(DD, SERVING)
    yield rig
    rig.kubectl.text("delete", DD, "--ignore-not-found", deadline_s=60)
    rig.eventually("no pod has the claim", lambda: not rig.pods(NAME))
    rig.kubectl.text("exec", STORE, "--", "rm", "-rf", f"/claim/{FOLDER}")
    remove_store(rig)
    rig.kubectl.text("delete", f"secret/{TOKEN}", "--ignore-not-found", deadline_s=30)
    rig.kubectl.text("delete", *(f"{kind}/{name}" for kind in ("pvc", "pv") for name in (SCRATCH, CACHE)), deadline_s=60)


def test_the_commit_is_pinned_and_the_second_replica_has_it_though_the_branch_moved(fetched: ClusterRig) -> None:
    rig = fetched
    rig.wait(DD, Wanted("ModelResolved", "True", ["Resolved"]), deadline_s=30)
    model = rig.kubectl.get(DD)["status"]["model"]
    assert (model["revision"], model["source"]) == (servers.COMMIT, "hf://org/digits@main")
    [told] = rig.events(NAME, "ModelResolved")
    assert told.startswith(f"hf://org/digits@main has the version {servers.COMMIT}")
    assert servers.COMMIT in rig.kubectl.text("get", DD, "-o", "wide")

    move_branch(rig, "d" * 40)
    rig.kubectl.patch(DD, {"spec": {"replicas": 2}})
    rig.eventually("two serve", lambda: rig.kubectl.get(DD)["status"].get("availableReplicas") == 2, deadline_s=120)
    assert {model_of(rig, pod["metadata"]["name"])["revision"] for pod in rig.pods(NAME)} == {servers.COMMIT}
    rig.wait(DD, Wanted("ModelResolved", "True", ["Resolved"]), deadline_s=30)


def test_a_pod_is_made_anew_from_the_shared_cache_though_the_repository_is_gone(fetched: ClusterRig) -> None:
    """Delete the pod as another client, after the hub lost the model; another pod must serve the model from the cache."""
    rig = fetched
    rig.kubectl.patch(DD, {"spec": {"replicas": 1}})
    rig.eventually("one is left", lambda: len(rig.pods(NAME)) == 1)
    move_branch(rig, "")
    (before,) = rig.pods(NAME)
    rig.kubectl.text("delete", "pod", before["metadata"]["name"], "--wait=false", deadline_s=60)
    rig.eventually("another pod", lambda: [pod for pod in rig.pods(NAME) if pod["metadata"]["uid"] != before["metadata"]["uid"]])
    rig.wait(DD, SERVING)
    assert model_of(rig, rig.pod(NAME))["revision"] == servers.COMMIT
    assert f"pod {before['metadata']['name']} was deleted by another client; the operator repairs it" in rig.events(NAME, "Repaired")
    assert rig.image(NAME).png
