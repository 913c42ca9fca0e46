# SPDX-License-Identifier: Apache-2.0
"""Who may connect to a deployment's pods: anybody to the data port, only the operator's pods to the control port.

A second lock beside the control token. Whether it is closed is up to the cluster's network plugin. Probes of the kubelet pass any policy.
"""

from diffusion_operator.api.deployment import DiffusionDeployment
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
                {"ports": [{"port": DATA_PORT, "protocol": "TCP"}]},
                {"ports": [{"port": CONTROL_PORT, "protocol": "TCP"}], "from": [operator_pods]},
            ],
        },
    }
