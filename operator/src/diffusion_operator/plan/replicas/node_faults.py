# SPDX-License-Identifier: Apache-2.0
"""Nodes that ended or refused pods by a fault of their own: a device that is gone, memory that is short, a shutdown.

Such an end is no failure of the replica. The next pod comes after a pause that doubles with each fault of that node, and prefers other
nodes for ten minutes. It may come back to that node, because its claim or its volume may be nowhere else.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from diffusion_operator.api.deployment_status import AvoidedNode
from diffusion_operator.plan.observed.replica_state import Group

AVOIDED_FOR = timedelta(minutes=10)
MOST = 32  # the schema's bound


def avoided_nodes(before: Sequence[AvoidedNode], groups: Sequence[Group], now: datetime) -> tuple[AvoidedNode, ...]:
    """Return the nodes to avoid, by name: those of the last status whose time is not over, and those with a new fault.

    A new fault counts up and sets ten minutes from now. Only the 32 newest are kept.
    """
    nodes = {node.name: node for node in before if node.until > now}
    for group in groups:
        if group.pod.node_fault and group.pod.node and not _known(group):
            known = nodes.get(group.pod.node)
            faults = known.faults + 1 if known is not None else 1
            nodes[group.pod.node] = AvoidedNode(name=group.pod.node, faults=faults, until=now + AVOIDED_FOR)
    newest = sorted(nodes.values(), key=lambda node: node.until, reverse=True)[:MOST]
    return tuple(sorted(newest, key=lambda node: node.name))


def faults_of(nodes: Sequence[AvoidedNode]) -> Mapping[str, int]:
    """Map the names of nodes to their numbers of faults."""
    return {node.name: node.faults for node in nodes}


def _known(group: Group) -> bool:
    """Return whether the status has counted this pod's failure, which it shows by the time of the successor."""
    before = group.previous
    return before is not None and before.leader_pod == group.pod.name and before.next_restart_time is not None
