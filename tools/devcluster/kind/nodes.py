# SPDX-License-Identifier: Apache-2.0
"""kind's nodes on our engine: the cluster's configuration, a second node, and the way from the machine into them."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from .. import programs
from ..apiserver import AUDIT_POLICY, audit_flags
from ..errors import CommandFailed, NotRunning
from ..node import namespace
from ..own_nodes import OwnNodes
from ..paths import KIND_STATE, cache_dir
from ..progress import run_logged, run_quiet, step
from . import engine, node_image

CLUSTER = "diffusion-operator"
FIRST, SECOND = f"{CLUSTER}-control-plane", f"{CLUSTER}-worker"
KUBECONFIG = KIND_STATE / "kubeconfig"
LOGS = KIND_STATE / "log"
AUDIT_LOG = LOGS / "audit.log"
READY_S = 120.0
_IN_NODE = Path("/devcluster")  # LOGS and the audit log's policy, as the node and its API server see them
_POLICY = "audit-policy.yaml"


def create() -> None:
    """Create the cluster with its first node, wait until that is Ready, and lead this machine's packets for Services and pods to it."""
    LOGS.mkdir(parents=True, exist_ok=True)  # Docker makes it too, for the container of a killed run
    (LOGS / _POLICY).write_text(AUDIT_POLICY)
    file = KIND_STATE / "kind.json"
    file.write_text(json.dumps(configuration()))
    words: list[str | Path] = [
        "create",
        "cluster",
        "--name",
        CLUSTER,
        "--image",
        node_image.build(),
        "--config",
        file,
        "--kubeconfig",
        KUBECONFIG,
    ]
    log = cache_dir() / "log/kind.log"
    run_logged([programs.kind(), *words, "--wait", "180s"], what="kind cluster", log=log, env=engine.environment(), deadline_s=400)
    engine.lead_to(_address(FIRST))


def configuration() -> dict[str, object]:
    """Return kind's configuration of the cluster: one node, our networks and an audit log. The kubelet accepts cgroup v1."""
    flags = [flag.removeprefix("--").split("=", 1) for flag in audit_flags(_IN_NODE / _POLICY, _IN_NODE / AUDIT_LOG.name)]
    volume = {"name": "devcluster", "hostPath": str(_IN_NODE), "mountPath": str(_IN_NODE), "readOnly": False, "pathType": "Directory"}
    api_server = {"extraArgs": [{"name": name, "value": value} for name, value in flags], "extraVolumes": [volume]}
    patches = [{"kind": "KubeletConfiguration", "failCgroupV1": False}, {"kind": "ClusterConfiguration", "apiServer": api_server}]
    networks = {"serviceSubnet": engine.SERVICE_NETWORK, "podSubnet": engine.POD_NETWORK}
    return {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "networking": {"apiServerAddress": engine.INNER_IP, "apiServerPort": 6443, **networks},
        "nodes": [{"role": "control-plane", "extraMounts": [{"hostPath": str(LOGS), "containerPath": str(_IN_NODE)}]}],
        "kubeadmConfigPatches": [json.dumps(patch) for patch in patches],
    }


def pull(reference: str) -> None:
    """Have each node pull an image from the registry beside the engine and unpack it; return when all have."""
    command = ["cri-pull", "--endpoint", "unix:///run/containerd/containerd.sock", reference]
    log = cache_dir() / "log/kind-pull.log"
    for node in existing():
        words = ["docker", "exec", node, *command]
        run_logged(words, what=f"{node} unpacks {reference}", log=log, env=engine.environment(), deadline_s=1200)


def existing() -> list[str]:
    """List the containers of kind's nodes by name, except those that have stopped."""
    return engine.docker("ps", "--format", "{{.Names}}", "--filter", f"label=io.x-k8s.kind.cluster={CLUSTER}").split()


def add_second() -> str:
    """Start a second node as kind starts its workers, or find it; return its name. kind itself adds none to a cluster.

    Raises:
        NotRunning: there is no first node.
        CommandFailed: it is not Ready in time; nothing of it stays.
    """
    if FIRST not in (existing() if engine.alive() else []):
        raise NotRunning("kind's first node is not running: `python -m tools.devcluster up` starts it")
    if SECOND in existing():
        return SECOND
    with step("kind's second node: Ready"):
        try:
            _start_second()
        except BaseException:
            remove_second()
            raise
    return SECOND


def remove_second() -> None:
    """Remove the second node and its pods from the cluster, and its container; do nothing if there is none or the engine is off."""
    if not engine.alive():
        return
    _kubectl("delete", "node", SECOND, "--ignore-not-found", "--wait=false")
    with contextlib.suppress(CommandFailed):  # nobody else can say that they are gone
        _kubectl("delete", "pods", "-A", f"--field-selector=spec.nodeName={SECOND}", "--force", "--grace-period=0")
    if SECOND in existing():
        engine.docker("rm", "--force", "--volumes", SECOND)


@contextmanager
def unplugged() -> Iterator[None]:
    """Take the second node's network link down during the block: it and its pods run on, but nothing reaches them."""
    index = engine.docker("exec", SECOND, "cat", "/sys/class/net/eth0/iflink").strip()
    links = json.loads(engine.inside("ip", "-json", "link", "show", "type", "veth"))
    (cable,) = [link["ifname"] for link in links if link["ifindex"] == int(index)]
    engine.inside("ip", "link", "set", cable, "down")
    try:
        yield
    finally:
        engine.inside("ip", "link", "set", cable, "up")


class Nodes(OwnNodes):
    """The nodes of kind's cluster on our engine: the first, and the second if it was added."""

    first = FIRST
    kubeconfig = Path("/etc/kubernetes/admin.conf")
    audit_log = AUDIT_LOG
    kubelet = Path("/var/lib/kubelet")
    cdi = Path("/var/run/cdi")

    def find_program(self, name: str) -> int | None:
        return next((pid for pid, words, _ in _processes_of(FIRST) if Path(words[0]).name == name), None)

    def command(self, program: Path) -> list[str]:
        engine.docker("cp", program, f"{FIRST}:/usr/local/bin/{program.name}")
        first = next(pid for pid, _, pids in _processes_of(FIRST) if len(pids) == 3 and pids[-1] == "1")
        return [*namespace.ending_with(first), f"/usr/local/bin/{program.name}"]

    def add_second(self) -> str:
        return add_second()

    def remove_second(self) -> None:
        remove_second()

    def unplugged(self) -> AbstractContextManager[None]:
        return unplugged()


def _processes_of(node: str) -> Iterator[tuple[int, list[str], list[str]]]:
    """Yield each process of a node's container: its pid on the machine, the words of its command, and its pids in all namespaces."""
    container = engine.docker("inspect", "--format", "{{.Id}}", node).strip()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if container in (entry / "cgroup").read_text():
                words = (entry / "cmdline").read_text().split("\0")
                pids = re.findall(r"(?m)^NSpid:(.*)$", (entry / "status").read_text())[0].split()
                yield int(entry.name), words, pids


def _start_second() -> None:
    labels = [f"--label=io.x-k8s.kind.{key}={value}" for key, value in (("cluster", CLUSTER), ("role", "worker"))]
    places = ["--tmpfs=/tmp", "--tmpfs=/run", "--volume=/var", "--volume=/lib/modules:/lib/modules:ro"]
    rights = ["--privileged", "--security-opt=seccomp=unconfined", "--security-opt=apparmor=unconfined", "--cgroupns=private"]
    words = ["run", "--detach", "--tty", "--name", SECOND, "--hostname", SECOND, "--network=kind", *labels, *places, *rights]
    engine.docker(*words, engine.docker("inspect", "--format", "{{.Config.Image}}", FIRST).strip())
    join = engine.docker("exec", FIRST, "kubeadm", "token", "create", "--print-join-command").split()
    join_when_up = "until ctr version > /dev/null 2>&1; do sleep 0.1; done; exec " + " ".join([*join, "--ignore-preflight-errors=all"])
    engine.docker("exec", SECOND, "sh", "-c", join_when_up, deadline_s=READY_S)
    ends = time.monotonic() + READY_S
    ready = 'jsonpath={.status.conditions[?(@.type=="Ready")].status}'
    while _kubectl("get", "node", SECOND, "--ignore-not-found", "-o", ready).strip() != "True":
        if time.monotonic() > ends:
            raise CommandFailed(f"kind's second node is not Ready after {READY_S:.0f} s; `docker logs {SECOND}` says why")
        time.sleep(0.3)


def _address(node: str) -> str:
    return engine.docker("inspect", "--format", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", node).strip()


def _kubectl(*words: str) -> str:
    return run_quiet([programs.kube() / "kubectl", "--kubeconfig", KUBECONFIG, "--request-timeout=10s", *words])
