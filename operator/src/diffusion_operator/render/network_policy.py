# SPDX-License-Identifier: Apache-2.0
"""Peers that may connect to a deployment's pods: to the data port as the spec says, to the control port only the operator's pods.

Policies add up: one of the team's may let in more, and none can take away. A policy is a second lock beside the control token. The
cluster's network plugin enforces it, or does not. Probes of the kubelet pass any policy.
"""

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.deployment_spec import DataPortAccess
from diffusion_operator.api.names import CONTROL_PORT, DATA_PORT, LABEL_DEPLOYMENT, control_policy_name
from diffusion_operator.render import Manifest
from diffusion_operator.render.metadata import child_metadata
from diffusion_operator.settings import OperatorPods

NAMESPACE_NAME = "kubernetes.io/metadata.name"  # the API server gives it to each namespace


def network_policy(deployment: DiffusionDeployment, operator: OperatorPods) -> Manifest:
    name = deployment.metadata.name
    operator_pods = {
        "namespaceSelector": {"matchLabels": {NAMESPACE_NAME: operator.namespace}},
        "podSelector": {"matchLabels": dict(operator.labels)},
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": child_metadata(deployment, control_policy_name(name)),
        "spec": {
            "podSelector": {"matchLabels": {LABEL_DEPLOYMENT: name}},
            "policyTypes": ["Ingress"],
            "ingress": [
                *_data_rules(deployment.spec.network_policy.data),
                {"ports": [{"port": CONTROL_PORT, "protocol": "TCP"}], "from": [operator_pods]},
            ],
        },
    }


def _data_rules(access: DataPortAccess) -> list[Manifest]:
    rule: Manifest = {"ports": [{"port": DATA_PORT, "protocol": "TCP"}]}
    if access is DataPortAccess.NONE:
        return []
    return [rule if access is DataPortAccess.OPEN else {**rule, "from": [{"podSelector": {}}]}]
