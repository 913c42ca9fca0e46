# SPDX-License-Identifier: Apache-2.0
"""Placement of a replica's pod, rendered from its spec under Kubernetes' own names."""

from collections.abc import Sequence
from typing import Any

import msgspec

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.names import LABEL_DEPLOYMENT, LABEL_REVISION
from diffusion_operator.api.scheduling import TopologySpread
from diffusion_operator.render import Manifest


def pod_scheduling(deployment: DiffusionDeployment, avoided_nodes: Sequence[str] = ()) -> Manifest:
    """Render the fields that the spec sets. The pod goes to `avoided_nodes` only if no other node can take it."""
    said: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(deployment.spec.scheduling))  # lists, not tuples
    said.pop("topologySpread", None)
    spread = [_spread(one, deployment.metadata.name) for one in deployment.spec.scheduling.topology_spread]
    if avoided_nodes:
        node_affinity = said.setdefault("affinity", {}).setdefault("nodeAffinity", {})
        node_affinity.setdefault("preferredDuringSchedulingIgnoredDuringExecution", []).append(_elsewhere(avoided_nodes))
    return said | ({"topologySpreadConstraints": spread} if spread else {})


def _elsewhere(nodes: Sequence[str]) -> Manifest:
    """Return a preference for nodes other than these, with the highest weight.

    A requirement takes one field value, and a node must meet all.
    """
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in nodes]
    return {"weight": 100, "preference": {"matchFields": fields}}


def _spread(asked: TopologySpread, deployment: str) -> Manifest:
    return {
        "topologyKey": asked.topology_key,
        "whenUnsatisfiable": asked.when_unsatisfiable.value,
        "maxSkew": asked.max_skew,
        "labelSelector": {"matchLabels": {LABEL_DEPLOYMENT: deployment}},
        # A rollout's new pods are spread among themselves: those that are about to go would crowd them together.
        "matchLabelKeys": [LABEL_REVISION],
    }
