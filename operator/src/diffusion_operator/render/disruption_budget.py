# SPDX-License-Identifier: Apache-2.0
"""How many replicas a drain of nodes may take at once: one. A replica is one pod, so pods are counted.

Kubernetes reads how many there should be from the owner's scale subresource. The only replica of a deployment is never held back, because a
node that cannot be emptied helps nobody; nor is one that is not ready, by which nobody is served.
"""

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.names import LABEL_DEPLOYMENT
from diffusion_operator.render import Manifest
from diffusion_operator.render.metadata import child_metadata


def disruption_budget(deployment: DiffusionDeployment) -> Manifest:
    name = deployment.metadata.name
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": child_metadata(deployment, name),
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": {LABEL_DEPLOYMENT: name}},
        },
    }
