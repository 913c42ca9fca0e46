# SPDX-License-Identifier: Apache-2.0
"""Metadata of every child: labels to find it by, and the controlling owner that collects it."""

from typing import Any

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.names import DEPLOYMENT, FIELD_MANAGER, LABEL_DEPLOYMENT, LABEL_MANAGED_BY


def child_metadata(owner: DiffusionDeployment, name: str, **labels: str) -> dict[str, Any]:
    """Label keys of ours have slashes, so callers pass them by `**{LABEL: value}`."""
    return {
        "name": name,
        "namespace": owner.metadata.namespace,
        "labels": {LABEL_MANAGED_BY: FIELD_MANAGER, LABEL_DEPLOYMENT: owner.metadata.name, **labels},
        "ownerReferences": [
            {
                "apiVersion": DEPLOYMENT.api_version,
                "kind": DEPLOYMENT.kind,
                "name": owner.metadata.name,
                "uid": owner.metadata.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }
