# SPDX-License-Identifier: Apache-2.0
"""Foreign objects under each name of our children, and refusals of each kind of child, against a real API server.

An operator and a fake kubelet work for all cases. Each case has a namespace and a deployment of its own, and all begin at once.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import pytest_asyncio

from diffusion_operator.api.names import (
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    EVENT,
    LABEL_MANAGED_BY,
    NETWORK_POLICY,
    POD,
    SECRET,
    SERVICE,
    Kind,
)
from support.apiserver.admission import POLICY_SAYS, QUOTA_SAYS, WEBHOOK_SAYS, Webhook, refuse_by_policy, refuse_by_quota, refusing_policy
from support.apiserver.rest_client import RestClient, path_of
from support.operator.fake_kubelet import FakeKubelet
from support.operator.sole_operator import deployment, running
from support.soak.operator_obstacles import THEIRS

pytestmark = [pytest.mark.apiserver, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
WITHIN_S = 120.0
CHILDREN = {SECRET: "d-control", CONFIG_MAP: "d-desired", SERVICE: "d", NETWORK_POLICY: "d-control", DISRUPTION_BUDGET: "d"}
NAMES = {**CHILDREN, POD: "d-0-0"}
MOUNTED = (SECRET, CONFIG_MAP)
REFUSALS = {"quota": ("Forbidden", QUOTA_SAYS), "policy": ("Invalid", POLICY_SAYS), "webhook": ("Forbidden", WEBHOOK_SAYS)}
# Each kind is refused by one means.
REFUSED = (
    *(("quota", kind) for kind in (POD, CONFIG_MAP)),
    *(("policy", kind) for kind in (SECRET, NETWORK_POLICY)),
    *(("webhook", kind) for kind in (SERVICE, DISRUPTION_BUDGET)),
)


class Place:
    """A namespace with a deployment."""

    def __init__(self, client: RestClient, namespace: str) -> None:
        self._client = client
        self.namespace = namespace

    async def get(self, kind: Kind, name: str) -> Any:
        status, found = await self._client.send("GET", f"{path_of(kind, self.namespace)}/{name}")
        return found if status == 200 else None

    async def make(self, kind: Kind, name: str, document: dict[str, Any]) -> Any:
        status, found = await self._client.create(kind, self.namespace, {**document, "metadata": {"name": name}})
        assert status == 201, found
        return found

    async def patch(self, kind: Kind, name: str, operations: list[dict[str, Any]]) -> None:
        path = f"{path_of(kind, self.namespace)}/{name}"
        status, found = await self._client.send("PATCH", path, operations, content_type="application/json-patch+json")
        assert status == 200, found

    async def edit(self, **spec: Any) -> None:
        await self._client.patch(DEPLOYMENT, self.namespace, "d", {"spec": spec})

    async def delete(self, kind: Kind, name: str) -> None:
        assert await self._client.delete(kind, self.namespace, name, at_once=kind == POD) == 200

    async def pods(self) -> list[str]:
        return sorted(pod["metadata"]["name"] for pod in await self._client.list(POD, self.namespace))

    async def notes(self, reason: str) -> list[str]:
        return [event["message"] for event in await self._client.list(EVENT, self.namespace) if event["reason"] == reason]

    async def noted(self, reason: str, words: str = "") -> None:
        """Wait for an Event of this reason with these words: Events are written after the status."""

        async def look() -> bool:
            return any(words in note for note in await self.notes(reason))

        await self.eventually(look)

    async def status(self) -> dict[str, Any]:
        return dict((await self.get(DEPLOYMENT, "d")).get("status", {}))

    async def condition(self, type_: str) -> tuple[str, str, str]:
        found = next((one for one in (await self.status()).get("conditions", []) if one["type"] == type_), None)
        return (found["status"], found["reason"], found["message"]) if found is not None else ("", "", "")

    async def until(self, type_: str, status: str, reason: str) -> str:
        """Wait until a condition has this status and reason; return its message."""

        async def look() -> str | None:
            found = await self.condition(type_)
            return found[2] or "-" if found[:2] == (status, reason) else None

        return str(await self.eventually(look))

    async def eventually(self, look: Callable[[], Awaitable[Any]]) -> Any:
        ends = time.monotonic() + WITHIN_S
        while not (found := await look()):
            assert time.monotonic() < ends, json.dumps(await self.status(), indent=1)
            await asyncio.sleep(0.2)
        return found


class Everywhere:
    """A set of namespaces, each with a deployment and a different obstacle to its children.

    They start together, so that their waits overlap; `theirs` holds strangers' objects by namespace.
    """

    def __init__(self, client: RestClient, webhook: Webhook) -> None:
        self.client = client
        self._webhook = webhook
        self.theirs: dict[str, Any] = {}

    async def begin(self, means: str, kind: Kind) -> None:
        place = await self.namespace(f"{means}-{kind.kind.lower()}", webhook=means == "webhook")
        if means == "stranger":
            self.theirs[place.namespace] = await place.make(kind, NAMES[kind], THEIRS[kind])
        else:
            await self.refuse(means, place, kind)
            await place.eventually(lambda: self._refused(place, kind))
        await place.make(DEPLOYMENT, "d", deployment())

    async def refuse(self, means: str, place: Place, kind: Kind | None) -> None:
        """Refuse creates of a kind in a namespace by these means; None lifts the refusal."""
        if means == "webhook":
            self._webhook.refused = {**self._webhook.refused, place.namespace: kind.kind if kind is not None else ""}
        else:
            await (refuse_by_quota if means == "quota" else refuse_by_policy)(self.client, place.namespace, kind)

    async def _refused(self, place: Place, kind: Kind) -> bool:
        """Return whether the API server already refuses an object of this kind."""
        path = f"{path_of(kind, place.namespace)}?dryRun=All"
        status, _ = await self.client.send("POST", path, {**THEIRS[kind], "metadata": {"name": "probe"}})
        return status in (403, 422)

    async def namespace(self, name: str, *, webhook: bool = False) -> Place:
        labels = {"webhook": "yes"} if webhook else {}
        status, found = await self.client.send("POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": labels}})
        assert status == 201, found
        return Place(self.client, name)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def everywhere(kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Everywhere]:
    folder = tmp_path_factory.mktemp("children")
    arguments = ("--all-namespaces", "--operator-namespace=operators", "--operator-label=app=operator")
    async with (
        RestClient(kubeconfig) as client,
        Webhook(client, folder) as webhook,
        refusing_policy(client),
        FakeKubelet(client, Random()) as kubelet,
    ):
        with running(folder / "operator", kubeconfig, control_port=kubelet.port, arguments=arguments):
            made = Everywhere(client, webhook)
            await asyncio.gather(*(made.begin(means, kind) for means, kind in (*(("stranger", kind) for kind in NAMES), *REFUSED)))
            yield made
        for name in (one["metadata"]["name"] for one in (await client.send("GET", "/api/v1/namespaces"))[1]["items"]):
            await client.send("DELETE", path_of(DEPLOYMENT, name))


def ready_without(kind: Kind) -> tuple[str, str]:
    """Return the expected status and reason of Ready for a deployment that lacks only its child of this kind."""
    if kind in MOUNTED:
        return "False", "ChildrenNotReady"
    return {SERVICE: ("False", "NoService"), POD: ("False", "PodsRefused")}.get(kind, ("True", "Serving"))


@pytest.mark.parametrize("kind", CHILDREN, ids=lambda kind: kind.kind)
async def test_a_strangers_object_is_left_alone_and_named_and_taken_up_when_it_goes(everywhere: Everywhere, kind: Kind) -> None:
    place, name = Place(everywhere.client, f"stranger-{kind.kind.lower()}"), NAMES[kind]
    message = await place.until("ChildrenReady", "False", "NameConflict")
    assert f"{kind.kind} {name} is not managed by this DiffusionDeployment and is left alone" in message
    await place.until("Ready", *ready_without(kind))
    assert await place.pods() == ([] if kind in MOUNTED else ["d-0-0"])
    assert await place.get(kind, name) == everywhere.theirs[place.namespace], "not even its version is another one"
    assert ("url" in (await place.status()).get("endpoints", {})) is (kind != SERVICE)
    await place.noted("NameConflict")
    assert len(await place.notes("NameConflict")) == 1
    await place.delete(kind, name)
    await place.edit(replicas=2)  # the operator looks again each minute, and at once after an edit
    await place.until("ChildrenReady", "True", "AllApplied")
    await place.until("Ready", "True", "Serving")
    assert (await place.get(kind, name))["metadata"]["ownerReferences"][0]["name"] == "d"


async def test_a_strangers_pod_is_left_alone_and_the_next_name_taken(everywhere: Everywhere) -> None:
    place = Place(everywhere.client, "stranger-pod")
    await place.until("Ready", "True", "Serving")
    assert await place.pods() == ["d-0-0", "d-0-1"]
    assert (await place.get(POD, "d-0-0"))["metadata"]["uid"] == everywhere.theirs["stranger-pod"]["metadata"]["uid"]
    await place.noted("NameConflict", "pod d-0-0 is not managed by this DiffusionDeployment")
    assert len(await place.notes("NameConflict")) == 1


@pytest.mark.parametrize(("means", "kind"), REFUSED, ids=lambda one: one if isinstance(one, str) else one.kind)
async def test_what_refuses_a_child_is_told_and_the_rest_serves(everywhere: Everywhere, means: str, kind: Kind) -> None:
    place, (reason, said) = Place(everywhere.client, f"{means}-{kind.kind.lower()}"), REFUSALS[means]
    if kind == POD:
        assert said in await place.until("Ready", "False", "PodsRefused")
        assert (await place.condition("ChildrenReady"))[:2] == ("True", "AllApplied")
    else:
        message = await place.until("ChildrenReady", "False", reason)
        assert f"the API server did not accept a write of {kind.kind} {NAMES[kind]}" in message
        assert said in message
        await place.until("Ready", *ready_without(kind))
        await place.noted("ChildRefused")
    assert await place.pods() == ([] if kind in (*MOUNTED, POD) else ["d-0-0"])
    for other, name in CHILDREN.items():
        assert (await place.get(other, name) is None) is (other == kind), other.kind
    await everywhere.refuse(means, place, None)
    await place.eventually(lambda: _admitted(everywhere, place, kind))
    await place.edit(service={"port": 8080})
    await place.until("ChildrenReady", "True", "AllApplied")
    await place.until("Ready", "True", "Serving")


async def _admitted(everywhere: Everywhere, place: Place, kind: Kind) -> bool:
    return not await everywhere._refused(place, kind)


@pytest_asyncio.fixture(loop_scope="module")
async def place(everywhere: Everywhere, request: pytest.FixtureRequest) -> Place:
    """Make a namespace for this test alone, and return it when its deployment is Ready. The Service has two annotations."""
    made = await everywhere.namespace(f"own-{abs(hash(request.node.name)) % 10**8}")
    await made.make(DEPLOYMENT, "d", deployment(service={"annotations": {"example.com/a": "1", "example.com/b": "1"}}))
    await made.until("Ready", "True", "Serving")
    return made


async def _ports(place: Place, *expected: int) -> bool:
    found = await place.get(SERVICE, "d")
    return [port["port"] for port in found["spec"]["ports"]] == list(expected)


async def test_what_a_create_wrote_is_removed_by_later_changes(place: Place) -> None:
    await place.edit(service={"port": 8080, "annotations": {"example.com/b": None}})
    await place.eventually(lambda: _ports(place, 8080))
    found = (await place.get(SERVICE, "d"))["metadata"]
    assert "example.com/b" not in found["annotations"]
    assert found["annotations"]["example.com/a"] == "1"
    ours = {(one["manager"], one["operation"]) for one in found["managedFields"] if one["manager"] == "diffusion-operator"}
    assert ours == {("diffusion-operator", "Apply")}
    await place.edit(service={"port": 81})
    await place.eventually(lambda: _ports(place, 81))


async def test_a_service_whose_port_was_edited_is_put_back_with_its_address(place: Place) -> None:
    before = await place.get(SERVICE, "d")
    port = before["spec"]["ports"][0]["port"]
    await place.patch(SERVICE, "d", [{"op": "replace", "path": "/spec/ports/0/port", "value": 8888}])
    await place.eventually(lambda: _ports(place, port))
    after = await place.get(SERVICE, "d")
    assert (after["metadata"]["uid"], after["spec"]["clusterIP"]) == (before["metadata"]["uid"], before["spec"]["clusterIP"])
    await place.noted("Repaired", "Service d was put back as a whole")
    await place.until("ChildrenReady", "True", "AllApplied")


async def test_a_policy_and_a_service_are_put_back_whole_and_who_fights_is_named(place: Place) -> None:
    name = CHILDREN[NETWORK_POLICY]
    wanted = (await place.get(NETWORK_POLICY, name))["spec"]
    ports = (await place.get(SERVICE, "d"))["spec"]["ports"]

    async def is_back(kind: Kind, child: str, field: str, spec: Any) -> bool:
        return bool((await place.get(kind, child))["spec"].get(field) == spec)

    for path, field in (("ingress/-", "ingress"), ("podSelector/matchLabels/team", "podSelector"), ("policyTypes/-", "policyTypes")):
        added = {"ingress": {}, "podSelector": "a", "policyTypes": "Egress"}[field]
        await place.patch(NETWORK_POLICY, name, [{"op": "add", "path": f"/spec/{path}", "value": added}])
        await place.eventually(partial(is_back, NETWORK_POLICY, name, field, wanted[field]))
    await place.patch(NETWORK_POLICY, name, [{"op": "add", "path": "/spec/ingress/-", "value": {}}])
    assert "spec.ingress" in await place.until("ChildrenReady", "False", "ChildContested")
    assert (await place.condition("ControlSecured"))[0] == "False"
    await place.patch(SERVICE, "d", [{"op": "add", "path": "/spec/ports/-", "value": {"name": "more", "port": 9999}}])
    await place.eventually(partial(is_back, SERVICE, "d", "ports", ports))
    await place.patch(SERVICE, "d", [{"op": "add", "path": "/spec/publishNotReadyAddresses", "value": True}])
    await place.eventually(partial(is_back, SERVICE, "d", "publishNotReadyAddresses", None))
    await place.patch(NETWORK_POLICY, name, [{"op": "replace", "path": "/spec/ingress", "value": wanted["ingress"]}])
    await place.until("ChildrenReady", "True", "AllApplied")


@pytest.mark.parametrize("kind", [SECRET, SERVICE], ids=lambda kind: kind.kind)
async def test_a_child_that_lost_its_owner_is_adopted_again(place: Place, kind: Kind) -> None:
    before = await place.get(kind, CHILDREN[kind])
    await place.patch(kind, CHILDREN[kind], [{"op": "remove", "path": "/metadata/ownerReferences"}])
    if kind == SECRET:  # Secrets are not watched: the operator looks at this one before it makes a pod
        await place.edit(replicas=2)

    async def owned() -> bool:
        return "ownerReferences" in (await place.get(kind, CHILDREN[kind]))["metadata"]

    await place.eventually(owned)
    assert (await place.get(kind, CHILDREN[kind]))["metadata"]["uid"] == before["metadata"]["uid"]


@pytest.mark.parametrize("kind", [SECRET, CONFIG_MAP], ids=lambda kind: kind.kind)
async def test_a_full_quota_does_not_hide_a_child_that_is_there(everywhere: Everywhere, place: Place, kind: Kind) -> None:
    """Check that a deployment serves with a full quota if its child is there.

    The quota refuses a create before names are compared. A watched child also loses its label, which makes it unknown to the operator, and
    gets it back.
    """
    before = await place.get(kind, CHILDREN[kind])
    await everywhere.refuse("quota", place, kind)
    await place.eventually(lambda: everywhere._refused(place, kind))
    if kind != SECRET:
        await place.patch(kind, CHILDREN[kind], [{"op": "remove", "path": f"/metadata/labels/{LABEL_MANAGED_BY.replace('/', '~1')}"}])

    async def labelled() -> bool:
        return LABEL_MANAGED_BY in (await place.get(kind, CHILDREN[kind]))["metadata"]["labels"]

    await place.eventually(labelled)
    await place.delete(POD, "d-0-0")

    async def made_again() -> bool:
        return await place.pods() == ["d-0-1"]

    await place.eventually(made_again)
    await place.until("ChildrenReady", "True", "AllApplied")
    await place.until("Ready", "True", "Serving")
    assert (await place.get(kind, CHILDREN[kind]))["metadata"]["uid"] == before["metadata"]["uid"]


async def test_a_deployment_made_again_waits_for_the_children_of_the_earlier_one_and_serves(place: Place) -> None:
    """Delete a deployment and create it again at once; the fake garbage collector deletes the children a moment later. All children must
    be new."""
    before = {kind: (await place.get(kind, name))["metadata"]["uid"] for kind, name in CHILDREN.items()}
    await place.delete(DEPLOYMENT, "d")
    await place.make(DEPLOYMENT, "d", deployment())
    uid = (await place.get(DEPLOYMENT, "d"))["metadata"]["uid"]

    async def all_new() -> bool:
        found = [await place.get(kind, name) for kind, name in CHILDREN.items()]
        return all(one is not None and one["metadata"]["ownerReferences"][0]["uid"] == uid for one in found)

    await place.eventually(all_new)
    await place.until("ChildrenReady", "True", "AllApplied")
    await place.until("Ready", "True", "Serving")
    after = {kind: (await place.get(kind, name))["metadata"]["uid"] for kind, name in CHILDREN.items()}
    assert not set(after.values()) & set(before.values()), "none of the earlier object's was taken over"
    assert await place.notes("NameConflict") == []


async def test_a_refused_configmap_and_a_deleted_pod_are_not_called_serving(everywhere: Everywhere, place: Place) -> None:
    await everywhere.refuse("policy", place, CONFIG_MAP)
    await place.eventually(lambda: everywhere._refused(place, CONFIG_MAP))
    await place.delete(CONFIG_MAP, "d-desired")
    await place.until("ChildrenReady", "False", "Invalid")
    assert (await place.condition("Ready"))[:2] == ("True", "Serving"), "what runs has mounted it"
    await place.delete(POD, "d-0-0")
    message = await place.until("Ready", "False", "ChildrenNotReady")
    assert POLICY_SAYS in message
    assert await place.pods() == []
    await place.noted("ChildRefused")
    await everywhere.refuse("policy", place, None)
    await place.eventually(lambda: _admitted(everywhere, place, CONFIG_MAP))
    await place.edit(replicas=2)
    await place.until("Ready", "True", "Serving")
