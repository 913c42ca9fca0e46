# SPDX-License-Identifier: Apache-2.0
"""Metadata of every child: labels to find it by, and the controlling owner that collects it."""

from collections.abc import Mapping
from typing import Any

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.meta import ObjectMeta
from diffusion_operator.api.names import ANNOTATION_OWNER_UID, DEPLOYMENT, FIELD_MANAGER, GROUP, LABEL_DEPLOYMENT, LABEL_MANAGED_BY


def child_metadata(owner: DiffusionDeployment, name: str, **labels: str) -> dict[str, Any]:
    """Build the metadata of a child with its owner's reference. `labels` are further ones, passed as `**{LABEL: value}`."""
    return {
        "name": name,
        "namespace": owner.metadata.namespace,
        "labels": {LABEL_MANAGED_BY: FIELD_MANAGER, LABEL_DEPLOYMENT: owner.metadata.name, **labels},
        "annotations": {ANNOTATION_OWNER_UID: owner.metadata.uid},
        "ownerReferences": [controller_reference(owner.metadata)],
    }


def controller_reference(owner: ObjectMeta) -> dict[str, Any]:
    return {
        "apiVersion": DEPLOYMENT.api_version,
        "kind": DEPLOYMENT.kind,
        "name": owner.name,
        "uid": owner.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def with_asked(metadata: dict[str, Any], *, labels: Mapping[str, str], annotations: Mapping[str, str]) -> dict[str, Any]:
    """Add the spec's extra labels and annotations to a child's metadata; the operator's own values take precedence.

    Names whose prefix contains the operator's API group are dropped, because such labels select pods and route to them. The schema rejects
    them, but a stored object may be older than that rule.
    """
    return metadata | {
        "labels": {**_foreign(labels), **metadata["labels"]},
        "annotations": {**_foreign(annotations), **metadata["annotations"]},
    }


def _foreign(asked: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in asked.items() if GROUP not in name.partition("/")[0]}
