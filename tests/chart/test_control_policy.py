# SPDX-License-Identifier: Apache-2.0
"""The policy that an operator started by the chart makes for a deployment, read as Kubernetes documents it.

Nothing enforces it here; the local cluster has no network plugin that does.
"""

from typing import Any, NamedTuple

import msgspec
import pytest

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.plan.replicas.revision import template_of
from diffusion_operator.render.network_policy import network_policy
from diffusion_operator.render.pod import pod
from diffusion_operator.settings import operator_pods
from support.operator.chart_rendering import NAMESPACE, VALUE_SETS, Chart, the_only

DEPLOYMENT = msgspec.convert(
    {
        "metadata": {"name": "d", "namespace": "team", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"model": {"source": {"path": "/m"}}},
    },
    DiffusionDeployment,
)


class Client(NamedTuple):
    namespace: str
    labels: dict[str, str]


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Return whether a selector matches these labels; an empty one matches all. The policy uses no match expressions."""
    assert selector.keys() <= {"matchLabels"}
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def lets_in(rule: dict[str, Any], client: Client, port: int) -> bool:
    """Return whether an ingress rule admits a client to a port; the rule has to list the port.

    Without `from` it admits any client, else one that both selectors of a peer match.
    """
    peers = rule.get("from")
    known = peers is None or any(
        selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": client.namespace})
        and selects(peer["podSelector"], client.labels)
        for peer in peers
    )
    return known and any(one["port"] == port for one in rule["ports"])


def may_connect(policy: dict[str, Any], client: Client, labels: dict[str, str], port: int) -> bool:
    """Return whether a client may connect to this port of pods with these labels; a pod outside the policy accepts everybody."""
    spec = policy["spec"]
    return not selects(spec["podSelector"], labels) or any(lets_in(rule, client, port) for rule in spec["ingress"])


@pytest.mark.parametrize("values", VALUE_SETS)
def test_the_operators_own_pod_reaches_control_ports_and_nobody_else_does(chart: Chart, values: str) -> None:
    template = the_only(chart.documents(values), "Deployment")["spec"]["template"]
    arguments: list[str] = template["spec"]["containers"][0]["args"]
    told = [(option, arguments[at + 1]) for at, option in enumerate(arguments[:-1])]
    (namespace,) = (value for option, value in told if option == "--operator-namespace")
    operator = operator_pods(namespace, [value for option, value in told if option == "--operator-label"])
    assert operator is not None
    policy = network_policy(DEPLOYMENT, operator)
    labels = pod(DEPLOYMENT, template_of(DEPLOYMENT, default_image="i"), index=0, incarnation=0)["metadata"]["labels"]

    itself = Client(NAMESPACE, template["metadata"]["labels"])
    impostor = Client("team", template["metadata"]["labels"])
    neighbour = Client(NAMESPACE, {"app": "other"})
    assert may_connect(policy, itself, labels, 8001)
    assert not may_connect(policy, impostor, labels, 8001), "the same labels in another namespace"
    assert not may_connect(policy, neighbour, labels, 8001), "another pod of the operator's namespace"
    assert all(may_connect(policy, client, labels, 8000) for client in (itself, impostor, neighbour))
    assert not may_connect(policy, itself, labels, 22)
    assert may_connect(policy, neighbour, {"diffusion-operator.dev/deployment": "another"}, 8001), "pods of others are left alone"
