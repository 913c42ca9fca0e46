# SPDX-License-Identifier: Apache-2.0
"""A model of a hub on a real cluster: its commit is pinned, and the repository goes away. The token is in a Secret, and two
pods share a cache on a claim.

The hub is a fake in a pod, with a certificate of its own authority; the cache lies in a folder of the node's /tmp.
"""

from collections.abc import Iterator

import pytest

from support.cluster.rig import SERVING, ClusterRig
from support.cluster.store import ACCESS_KEY, STORE, TRUST, apply, claim_on_the_node, remove_store, secret, start_store, worker_environment
from support.sources import servers
from tools.demo.kubectl import Wanted

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

NAME, TOKEN, SCRATCH, CACHE = "fetched", "hub-token", "scratch", "model-cache"
DD = f"dd/{NAME}"
FOLDER = "diffusion-operator-model-cache"
SOURCE = {"huggingFace": {"repo": "org/digits", "tokenSecretRef": {"name": TOKEN}}}


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


def test_the_commit_is_pinned_and_the_next_replica_has_it_from_the_shared_cache_though_the_repository_is_gone(fetched: ClusterRig) -> None:
    rig = fetched
    rig.wait(DD, Wanted("ModelResolved", "True", ["Resolved"]), deadline_s=30)
    model = rig.kubectl.get(DD)["status"]["model"]
    assert (model["revision"], model["source"]) == (servers.COMMIT, "hf://org/digits@main")
    [told] = rig.events(NAME, "ModelResolved")
    assert told.startswith(f"hf://org/digits@main has the version {servers.COMMIT}")
    assert servers.COMMIT in rig.kubectl.text("get", DD, "-o", "wide")

    rig.kubectl.text("exec", STORE, "--", "sh", "-c", f"echo > {servers.MAIN}")  # so the hub has no repository any more
    rig.kubectl.patch(DD, {"spec": {"replicas": 2}})
    rig.eventually("two serve", lambda: rig.kubectl.get(DD)["status"].get("availableReplicas") == 2, deadline_s=120)
    assert [rig.state_of(pod["metadata"]["name"])["model"]["revision"] for pod in rig.pods(NAME)] == [servers.COMMIT] * 2
    rig.wait(DD, Wanted("ModelResolved", "True", ["Resolved"]), deadline_s=30)
    assert rig.image(NAME).png
