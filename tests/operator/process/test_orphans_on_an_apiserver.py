# SPDX-License-Identifier: Apache-2.0
"""A deployment that was deleted with `--cascade=orphan` and made again, on a real API server with the operator's program (fault 51).

Not real: the kubelet, its workers, and the garbage collector.
"""

from pathlib import Path

import pytest

from diffusion_operator.api.meta import ObjectMeta
from diffusion_operator.api.names import CONFIG_MAP, DEPLOYMENT, EVENT, NETWORK_POLICY, POD, SECRET, SERVICE
from diffusion_operator.api.worker_state import ModelReport
from diffusion_operator.render.control_secret import control_token
from support.apiserver.rest_client import RestClient, path_of
from support.operator.fake_cluster import EPOCH
from support.operator.fake_kubelet import FakeKubelet
from support.operator.sole_operator import complaints, deployment, eventually_nothing, running

pytestmark = [pytest.mark.apiserver, pytest.mark.slow]
SPACE = "orphans"
MODEL = ModelReport(digest="sha256:m")


class There:
    """The namespace with its deployment."""

    def __init__(self, client: RestClient, kubelet: FakeKubelet) -> None:
        self._client = client
        self._kubelet = kubelet

    async def uid(self) -> str:
        _, found = await self._client.send("GET", f"{path_of(DEPLOYMENT, SPACE)}/d")
        return str(found["metadata"]["uid"])

    async def unsettled(self, pods: dict[str, str]) -> list[str]:
        """Return the differences from these pods: names to UIDs, or to "" for any UID. All must be owned, routed and serving."""
        uid, wrong = await self.uid(), []
        found = {one["metadata"]["name"]: one["metadata"] for one in await self._client.list(POD, SPACE)}
        wrong += [f"pods are {sorted(found)}"] if found.keys() != pods.keys() else []
        for name, expected in pods.items():
            metadata = found.get(name, {"labels": {}})
            wrong += [f"{name} is another pod"] if expected and metadata.get("uid") != expected else []
            wrong += [f"{name} is not owned"] if [one["uid"] for one in metadata.get("ownerReferences", ())] != [uid] else []
            wrong += [f"{name} is not routed"] if metadata["labels"].get("diffusion-operator.dev/routable") != "true" else []
        _, document = await self._client.send("GET", f"{path_of(DEPLOYMENT, SPACE)}/d")
        ready = [one for one in document.get("status", {}).get("conditions", ()) if one["type"] == "Ready"]
        return wrong + [f"Ready is {one}" for one in ready if one["reason"] != "Serving"]

    async def notes(self, reason: str) -> list[str]:
        return sorted(one["message"] for one in await self._client.list(EVENT, SPACE) if one["reason"] == reason)

    async def unnoted(self, reason: str, *beginnings: str) -> list[str]:
        """Return an empty list if the sorted Events of a reason begin as given, one for each. Otherwise return all of them, or a line
        that there is none."""
        notes = await self.notes(reason)
        as_expected = len(notes) == len(beginnings) and all(map(str.startswith, notes, beginnings))
        return [] if as_expected else notes or [f"no Event {reason}"]

    async def uids(self) -> dict[str, str]:
        return {one["metadata"]["name"]: one["metadata"]["uid"] for one in await self._client.list(POD, SPACE)}

    async def owners(self) -> set[str]:
        """Return the UIDs of the owners of all children other than pods."""
        kinds = (SECRET, CONFIG_MAP, SERVICE, NETWORK_POLICY)
        children = [one for kind in kinds for one in await self._client.list(kind, SPACE)]
        return {owner["uid"] for one in children for owner in one["metadata"].get("ownerReferences", ())}


def speak(kubelet: FakeKubelet, token: str) -> None:
    for container in kubelet.containers.values():
        container.worker.model, container.token = MODEL, token


async def test_pods_that_an_earlier_object_left_are_adopted_or_replaced_one_by_one(
    kubeconfig: Path, tmp_path: Path, client: RestClient, kubelet: FakeKubelet
) -> None:
    there = There(client, kubelet)
    await client.make_namespace(SPACE)
    with running(tmp_path, kubeconfig, control_port=kubelet.port) as operator:
        await client.create(DEPLOYMENT, SPACE, deployment(replicas=2))
        await eventually_nothing(lambda: there.unsettled({"d-0-0": "", "d-1-0": ""}))
        before, first_uid = await there.uids(), await there.uid()
        speak(kubelet, _token(first_uid))

        await kubelet.controllers.delete_alone(SPACE, "d")
        assert await there.uids() == before, "they serve on without an owner"
        await client.create(DEPLOYMENT, SPACE, deployment(replicas=2))
        await eventually_nothing(lambda: there.unsettled(before))
        await eventually_nothing(lambda: there.unnoted("PodAdopted", "pod d-0-0,", "pod d-1-0,"))
        assert await there.owners() == {await there.uid()}
        assert kubelet.refused, "a worker refuses the new object's token"

        speak(kubelet, "")
        await kubelet.controllers.delete_alone(SPACE, "d")
        await client.create(DEPLOYMENT, SPACE, deployment(replicas=2, engine={"maxBatchSize": 2}))
        await eventually_nothing(lambda: there.unsettled({"d-0-1": "", "d-1-1": ""}))
        await eventually_nothing(lambda: there.unnoted("OrphanReplaced", "pod d-0-0 is deleted", "pod d-1-0 is deleted"))
        assert all("it was made of another template" in note for note in await there.notes("OrphanReplaced"))
        assert complaints(operator) == []
    assert kubelet.wrong == []


def _token(uid: str) -> str:
    return control_token(b"k" * 32, ObjectMeta(name="d", namespace=SPACE, uid=uid, creation_timestamp=EPOCH))
