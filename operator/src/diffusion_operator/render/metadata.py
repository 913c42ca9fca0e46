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
    """Return the metadata with labels and annotations that the spec asks for besides. Ours win.

    Nothing under our own group's name is taken from a spec: by it pods are found and routed to.
    The schema refuses such names already; an object that was stored under another schema meets this.
    """
    return metadata | {
        "labels": {**_foreign(labels), **metadata["labels"]},
        "annotations": {**_foreign(annotations), **metadata["annotations"]},
    }


def _foreign(asked: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in asked.items() if GROUP not in name.partition("/")[0]}
