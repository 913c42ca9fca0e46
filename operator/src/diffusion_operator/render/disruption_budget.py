# SPDX-License-Identifier: Apache-2.0
"""The PodDisruptionBudget: a drain may evict one replica at a time. A replica is one pod, so pods are counted.

Kubernetes reads how many there should be from the owner's scale subresource. A deployment's only replica is never held back, because a node
that cannot be emptied helps nobody. A replica that is not ready is not held back either, since it serves nobody.
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
