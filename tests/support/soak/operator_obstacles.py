# SPDX-License-Identifier: Apache-2.0
"""Obstacles in one namespace that come and go: other owners' objects under our names, refusals, drift, and a node that rejects pods.

Real: the API server, its quotas, its policies, its webhook calls, and the obstacles. Not real: the node, which is FakeKubelet's, and the
people.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from diffusion_operator.api import names
from diffusion_operator.api.names import CONFIG_MAP, DISRUPTION_BUDGET, NETWORK_POLICY, POD, SECRET, SERVICE, Kind
from support.apiserver.admission import Webhook, refuse_by_policy, refuse_by_quota
from support.apiserver.rest_client import RestClient, path_of
from support.operator.fake_kubelet import FakeKubelet

WATCHED_CHILDREN = (SERVICE, CONFIG_MAP, NETWORK_POLICY, DISRUPTION_BUDGET)
MEANS = ("quota", "policy", "webhook", "broken webhook")
THEIRS: dict[Kind, dict[str, Any]] = {
    SECRET: {"data": {"token": "dGhlaXJz"}},
    CONFIG_MAP: {"data": {"theirs": "yes"}},
    SERVICE: {"spec": {"selector": {"app": "theirs"}, "ports": [{"port": 9000}]}},
    NETWORK_POLICY: {"spec": {"podSelector": {"matchLabels": {"app": "theirs"}}}},
    DISRUPTION_BUDGET: {"spec": {"maxUnavailable": 3, "selector": {"matchLabels": {"app": "theirs"}}}},
    POD: {"spec": {"containers": [{"name": "theirs", "image": "theirs"}]}},
}
MARK = "drifted"
# Changes of children by another client, as merge patches. Each leaves a mark, or a port, that must not stay.
DRIFTS: dict[Kind, Sequence[dict[str, Any]]] = {
    SERVICE: (
        {"spec": {"selector": {MARK: "yes"}}},
        {"spec": {"selector": {names.LABEL_ROUTABLE: MARK}}},
        {"spec": {"ports": [{"name": MARK, "port": 9999}]}},
        {"metadata": {"labels": {names.LABEL_DEPLOYMENT: MARK}}},
    ),
    CONFIG_MAP: (
        {"data": {names.DESIRED_KEY: f'{{"adapters": [], "{MARK}": 1}}'}},
        {"metadata": {"labels": {names.LABEL_MANAGED_BY: MARK}}},
    ),
    NETWORK_POLICY: ({"spec": {"ingress": [{"from": [{"podSelector": {"matchLabels": {MARK: "yes"}}}]}]}},),
    DISRUPTION_BUDGET: ({"spec": {"selector": {"matchLabels": {MARK: "yes"}}}},),
}
POD_DRIFTS = ({names.LABEL_ROUTABLE: MARK}, {names.LABEL_DEPLOYMENT: MARK}, {names.LABEL_MANAGED_BY: None})
# After three repairs of a child within ten minutes the operator slows down.
MOST_DRIFTS = 2


def child_names(deployment: str) -> dict[Kind, str]:
    """Return the name of each child other than pods, by kind."""
    control = names.control_secret_name(deployment)
    policy, desired = names.control_policy_name(deployment), names.desired_config_name(deployment)
    return {SECRET: control, CONFIG_MAP: desired, SERVICE: deployment, NETWORK_POLICY: policy, DISRUPTION_BUDGET: deployment}


@dataclass
class Strangers:
    """Other owners' objects in a namespace, as they were made."""

    client: RestClient
    namespace: str
    made: dict[tuple[Kind, str], Any] = field(default_factory=dict)
    touched: list[str] = field(default_factory=list)
    """Descriptions of the objects that were changed or missing when they were to be deleted."""

    async def make(self, kind: Kind, name: str, *, with_our_labels: str = "") -> bool:
        """Create another owner's object; return False if the API server refuses it, as it does a name that is taken. `with_our_labels`
        names the deployment whose labels the object gets, as in a copied manifest."""
        labels = {names.LABEL_MANAGED_BY: names.FIELD_MANAGER, names.LABEL_DEPLOYMENT: with_our_labels} if with_our_labels else {}
        status, found = await self.client.create(kind, self.namespace, {**THEIRS[kind], "metadata": {"name": name, "labels": labels}})
        if status == 201:
            self.made[kind, name] = found
        return status == 201

    async def leave(self, kind: Kind, name: str) -> None:
        """Delete an object if it is still as it was made; if it was changed or is missing, record it in `touched` instead."""
        metadata = self.made.pop((kind, name))["metadata"]
        unchanged = {part: metadata[part] for part in ("uid", "resourceVersion")}
        options = {"preconditions": unchanged, "gracePeriodSeconds": 0}
        status, found = await self.client.send("DELETE", f"{path_of(kind, self.namespace)}/{name}", options)
        self.touched += [] if status == 200 else [f"{kind.kind} {name} of somebody else was touched: {status} {found['message']}"]

    async def leave_all(self) -> None:
        """Delete each object that is still as it was made, and keep the changed ones.

        Every changed or missing one is in `touched` afterwards.
        """
        for kind, name in list(self.made):
            await self.leave(kind, name)


class Refusals:
    """Refusals of new objects in a namespace, by each of several means."""

    def __init__(self, client: RestClient, webhook: Webhook, namespace: str) -> None:
        self._client, self._webhook, self._namespace = client, webhook, namespace
        self.there: set[str] = set()
        """The means that refuse something now."""

    async def begin(self, means: str, kind: Kind) -> None:
        """Refuse new objects of the kind; a broken webhook refuses objects of every kind. Do nothing if these means refuse something
        already."""
        if means not in self.there:
            self.there.add(means)
            await self._set(means, kind)

    async def end(self, *means: str) -> None:
        """End these refusals, as far as they are active."""
        for one in self.there.intersection(means):
            self.there.discard(one)
            await self._set(one, None)

    async def _set(self, means: str, kind: Kind | None) -> None:
        if means == "webhook":
            self._webhook.refused[self._namespace] = kind.kind if kind is not None else ""
        elif means == "broken webhook":
            (self._webhook.broken.discard if kind is None else self._webhook.broken.add)(self._namespace)
        else:
            await (refuse_by_quota if means == "quota" else refuse_by_policy)(self._client, self._namespace, kind)


class Obstacles:
    """All obstacles to the operator in one namespace."""

    def __init__(self, client: RestClient, kubelet: FakeKubelet, webhook: Webhook, namespace: str) -> None:
        self._client, self._kubelet, self._namespace = client, kubelet, namespace
        self.strangers, self._refusals = Strangers(client, namespace), Refusals(client, webhook, namespace)
        self._drifts: dict[Kind, int] = {}

    @property
    def there(self) -> bool:
        """Return whether any obstacle is there."""
        return bool(self.strangers.made or self._refusals.there or self._namespace in self._kubelet.rejecting)

    async def put_stranger(self, rng: Random) -> None:
        """Take the name of a random child if it is free. If a watched child of the operator has it, delete that child first, unless this
        was done too often."""
        kind, name = rng.choice([*child_names("d").items()])
        # The operator cannot read Secrets, so it takes a Secret with our labels and no owner for its own.
        made = await self.strangers.make(kind, name, with_our_labels="d" if kind != SECRET and rng.random() < 0.3 else "")
        if not made and kind in WATCHED_CHILDREN and (kind, name) not in self.strangers.made and self.may_meddle(kind):
            await self._client.delete(kind, self._namespace, name)
            await self.strangers.make(kind, name)

    async def put_strange_pod(self, rng: Random) -> None:
        """Take a name that the next pod may have, at random. Do nothing if it is taken."""
        await self.strangers.make(POD, names.pod_name("d", rng.randint(0, 2), rng.randint(0, 6)))

    async def take_stranger(self, rng: Random) -> None:
        """Delete one of the other owners' objects at random, or record it as touched if it was changed. Do nothing if there is none."""
        if there := list(self.strangers.made):
            await self.strangers.leave(*rng.choice(there))

    async def refuse(self, rng: Random) -> None:
        """Begin to refuse new objects of a random kind by random means. Do nothing if these means refuse something already."""
        await self._refusals.begin(rng.choice(MEANS), rng.choice([*child_names("d"), POD, POD]))

    async def admit(self, rng: Random) -> None:
        """End a random one of the refusals; do nothing if there is none."""
        if there := sorted(self._refusals.there):
            await self._refusals.end(rng.choice(there))

    async def reject_pods(self, *, rejecting: bool) -> None:
        """Have the node reject all new pods, or accept them again."""
        (self._kubelet.rejecting.add if rejecting else self._kubelet.rejecting.discard)(self._namespace)

    async def drift(self, rng: Random) -> None:
        """Change a child, or the labels of a pod, as another client."""
        kind = rng.choice([*WATCHED_CHILDREN, POD])
        if kind == POD:
            for pod in (await self._own_pods())[:1]:
                await self._client.patch(POD, self._namespace, pod["metadata"]["name"], {"metadata": {"labels": rng.choice(POD_DRIFTS)}})
        elif self.may_meddle(kind) and (kind, child_names("d")[kind]) not in self.strangers.made:
            await self._client.patch(kind, self._namespace, child_names("d")[kind], rng.choice(DRIFTS[kind]))

    def may_meddle(self, kind: Kind) -> bool:
        """Count a change of a child of this kind, and return whether it is among the first MOST_DRIFTS, which the operator repairs at
        once."""
        self._drifts[kind] = self._drifts.get(kind, 0) + 1
        return self._drifts[kind] <= MOST_DRIFTS

    async def all_go(self) -> list[str]:
        """Remove all obstacles but other owners' objects that somebody changed; return those that were changed or removed, as faults."""
        await self._refusals.end(*MEANS)
        await self.reject_pods(rejecting=False)
        await self.strangers.leave_all()
        await self._delete_disowned()
        return self.strangers.touched

    async def _delete_disowned(self) -> None:
        """Delete children that lost their owner and our mark, as a status asks a person to do: nothing says any more that they are ours."""
        for kind in WATCHED_CHILDREN:
            for one in await self._client.list(kind, self._namespace):
                metadata = one["metadata"]
                ours = metadata.get("labels", {}).get(names.LABEL_MANAGED_BY) == names.FIELD_MANAGER
                if metadata["name"] == child_names("d")[kind] and not ours and not metadata.get("ownerReferences"):
                    await self._client.delete(kind, self._namespace, metadata["name"], uid=metadata["uid"])

    async def namespace_is_gone(self) -> None:
        """Forget the obstacles that were deleted with the namespace, and remove the others."""
        self.strangers.made.clear()
        self._refusals.there -= {"policy", "quota"}
        await self.all_go()

    async def _own_pods(self) -> list[Any]:
        return [pod for pod in await self._client.list(POD, self._namespace) if pod["metadata"].get("ownerReferences")]
