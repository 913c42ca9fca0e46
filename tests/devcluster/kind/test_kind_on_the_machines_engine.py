# SPDX-License-Identifier: Apache-2.0
"""A kind cluster on a Docker engine that answers on the machine.

Real: kind, its nodes, the routes and the faults. Not real: the machine, for which the network and the mounts of our engine stand in, since
there the engine is given by DOCKER_HOST. It can pull nothing, so the node's image is ours.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.devcluster import cluster, images
from tools.devcluster.cache import locked
from tools.devcluster.kind import namespace
from tools.devcluster.kind.engine import docker
from tools.devcluster.kind.own_engine import LOCKS, MARK, OwnEngine
from tools.devcluster.paths import REPOSITORY
from tools.devcluster.providers.kind import KindProvider

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

# Run on the stand-in for the machine: an image is loaded, a Service answers, a fault is made, a second node comes and goes.
# The lock keeps this process from taking the engine for one that a killed run left.
ON_THE_MACHINE = """
import signal, subprocess, sys
from tools.devcluster import cluster
from tools.devcluster.cache import locked
from tools.devcluster.kind.machines_engine import MachinesEngine
from tools.devcluster.kind.own_engine import LOCKS

def answers():
    asked = ["curl", "--insecure", "--silent", "--max-time", "3", f"https://{address}/readyz"]
    return subprocess.run(asked, capture_output=True, text=True).stdout == "ok"

def is_ready(node):
    return cluster.kubectl("get", "node", node, "-o", "jsonpath={.status.conditions[?(@.type=='Ready')].status}") == "True"

with locked("kind", directory=LOCKS):
    where = cluster.provider()
    assert isinstance(where.engine, MachinesEngine)
    where.up()
    where.load_image(sys.argv[1])
    address = cluster.kubectl("get", "service/kubernetes", "-o", "jsonpath={.spec.clusterIP}")
    assert answers()
    nodes = where.own_nodes()
    nodes.signal("kube-apiserver", signal.SIGSTOP)
    assert not answers()
    nodes.signal("kube-apiserver", signal.SIGCONT)
    assert answers()
    with nodes.second_node() as second:
        assert is_ready(second)
    assert all(line.startswith("{") for line in nodes.audit_log())
    where.down(purge=False)
"""


@pytest.fixture
def engine() -> Iterator[OwnEngine]:
    """Start our engine without a cluster, to be the machine's; skip where it is another one, or where a cluster runs."""
    where = cluster.provider()
    if not (isinstance(where, KindProvider) and isinstance(where.engine, OwnEngine)) or where.running():
        pytest.skip("our own Docker engine is not free to stand in for the machine's")
    where.prepare()
    with locked("kind", directory=LOCKS):
        where.engine.up()
        yield where.engine
        where.engine.end()


def test_a_cluster_on_the_machines_engine_can_do_what_one_on_ours_can_and_leaves_nothing(engine: OwnEngine, tmp_path: Path) -> None:
    image, archive, pid = images.build("operator"), tmp_path / "operator.tar", namespace.first_process(MARK)
    assert pid is not None
    subprocess.run([*images.buildah(), "push", image, f"docker-archive:{archive}:{image}"], check=True, capture_output=True, timeout=300)
    docker(engine, "load", "--input", archive, deadline_s=300)
    there = namespace.entering(pid)
    environment = {**engine.environment(), "NODE_IMAGE": engine.node_image(), "PYTHONPATH": str(REPOSITORY)}
    routes = subprocess.run([*there, "ip", "route"], check=True, capture_output=True).stdout
    subprocess.run([*there, sys.executable, "-c", ON_THE_MACHINE, image], check=True, timeout=600, env=environment)
    assert docker(engine, "ps", "--all", "--quiet") == ""
    assert subprocess.run([*there, "ip", "route"], check=True, capture_output=True).stdout == routes
