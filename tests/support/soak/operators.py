# SPDX-License-Identifier: Apache-2.0
"""The soak of two operators on two real nodes. Applications ask through the Service while the leader and workers die, nodes are drained and
templates roll out.

At most one request in a hundred may be refused, during a fault and with a code that allows another try. None may be lost. The audit log
must show one writer at a time.
"""

import signal
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from support.cluster.audit import read_log
from support.cluster.faults import kill_operator, leader, operator_stopped
from support.cluster.rig import SERVING, ClusterRig
from support.soak.frame import Outcome
from support.soak.node import DD, RECOVERY_S, NodeSoak, operators_ready, reported
from support.soak.writers import foreign_writes, pods_of
from tools.demo.stage import stage
from tools.devcluster import cluster

NAMESPACE = "diffusion-operators"
STOPPED_S = (20.0, 60.0)
DRAIN_S = 240.0
MOST_REFUSED = 0.01
SPREAD = {"topologySpread": [{"topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}]}
WORKERS = "diffusion-operator.dev/deployment"


class OperatorsSoak(NodeSoak):
    """Faults of the leader, of workers and of nodes, one at a time.

    Real: two nodes, two operators, their workers and the causes of the faults. Not real: the applications, which are threads here.
    """

    calm_s = (5.0, 20.0)

    def __init__(self, rig: ClusterRig, seed: int, *, nodes: Sequence[str]) -> None:
        super().__init__(rig, seed, scheduling=SPREAD)
        self._nodes = nodes
        self.faults: dict[str, Callable[[], None]] = {
            "leader-killed": partial(kill_operator, rig.kubectl),
            "leader-stopped": self._stop_leader,
            "leader-deleted": self._delete_leader,
            "rank-killed": partial(self._signal_rank, signal.SIGKILL),
            "server-killed": self._kill_server,
            "pod-deleted": self._delete_pod,
            "node-drained": self._drain,
            "rolled-out": self._roll_out,
            "scaled": self._scale,
        }

    def run(self, limit_s: float, rounds: Sequence[Sequence[str]] = ()) -> Outcome:
        """Spread the operators over the nodes, run the soak, and check the writers and the refusals."""
        began = datetime.now(UTC)
        self._wait_for_operators()
        self._delete_leader()
        self._wait_for_operators()
        outcome = super().run(limit_s, rounds)
        log = read_log(cluster.provider().own_nodes().audit_log(), began)
        outcome.lead_changes, outcome.writes, foreign = foreign_writes(log, pods_of(self.rig.kubectl.namespace))
        outcome.wrong += foreign
        if outcome.refused.total() > MOST_REFUSED * outcome.sent:
            outcome.wrong.append(f"{outcome.refused.total()} of {outcome.sent} requests were refused")
        return outcome

    def _wait_for_operators(self) -> None:
        self.rig.eventually("two operators, one of which leads", lambda: operators_ready(self.rig.kubectl), deadline_s=120)

    def _chosen(self) -> Sequence[str]:
        return [self.rng.choice(sorted(self.faults))]

    def _stop_leader(self) -> None:
        """Stop the leader for longer than its Lease lasts."""
        with operator_stopped(leader(self.rig.kubectl)):
            time.sleep(self.rng.uniform(*STOPPED_S))

    def _delete_leader(self) -> None:
        pod = leader(self.rig.kubectl)["metadata"]
        self.rig.kubectl.text("delete", "pod", str(pod["name"]), deadline_s=60)

    def _drain(self) -> None:
        """Drain a random node, wait until all serve, and uncordon it. On the first node only workers are drained, since the other pods
        have no other place."""
        node = self.rng.choice(self._nodes)
        which = [] if node != self._nodes[0] else ["--pod-selector", WORKERS]
        options = ["--ignore-daemonsets", "--delete-emptydir-data", f"--timeout={DRAIN_S:g}s", *which]
        try:
            self.rig.kubectl.text("drain", node, *options, deadline_s=DRAIN_S + 10)
            self.rig.wait(DD, SERVING, deadline_s=RECOVERY_S)
        finally:
            self.rig.kubectl.text("uncordon", node, deadline_s=30)

    def _roll_out(self) -> None:
        """Change the template to one that no pod has."""
        size = self.rig.kubectl.get(DD)["spec"]["engine"]["maxBatchSize"] % 4 + 1
        self.rig.kubectl.patch(DD, {"spec": {"engine": {"maxBatchSize": size}}})


def run_operators(_: Path, *, seed: int, limit_s: float) -> Outcome:
    """Run the soak in a namespace of its own on the development cluster; the full outcome is in bench-output."""
    with stage(NAMESPACE) as set_up, cluster.provider().own_nodes().second_node() as second:
        nodes = [cluster.provider().own_nodes().first, second]
        outcome = OperatorsSoak(ClusterRig(set_up.kubectl, set_up.images.worker), seed, nodes=nodes).run(limit_s)
    return reported(outcome, "operators")
