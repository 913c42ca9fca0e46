# SPDX-License-Identifier: Apache-2.0
"""The Service in front of a deployment's replicas: only pods the operator marked routable, and only the data port."""

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.names import DATA_PORT, LABEL_DEPLOYMENT, LABEL_ROUTABLE
from diffusion_operator.render import Manifest
from diffusion_operator.render.metadata import child_metadata, with_asked


def service(deployment: DiffusionDeployment) -> Manifest:
    name, spec = deployment.metadata.name, deployment.spec.service
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": with_asked(child_metadata(deployment, name), labels={}, annotations=spec.annotations),
        "spec": {
            "type": spec.type.value,
            "selector": {LABEL_DEPLOYMENT: name, LABEL_ROUTABLE: "true"},
            "publishNotReadyAddresses": False,
            "ports": [{"name": "http", "port": spec.port, "targetPort": DATA_PORT, "protocol": "TCP"}],
        },
    }
