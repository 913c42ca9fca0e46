# SPDX-License-Identifier: Apache-2.0
"""kind's nodes: the cluster's configuration, a second node, and ways for tests to break nodes and look beneath them."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .. import programs
from ..apiserver import AUDIT_POLICY, audit_flags
from ..errors import CommandFailed, NotOfThisMachine, NotRunning
from ..paths import log_dir
from ..progress import run_logged, run_quiet, step
from .engine import CLUSTER, FIRST, POD_NETWORK, SECOND, SERVICE_NETWORK, Engine, address, docker, kubeconfig

READY_S = 120.0
# As the node and its API server see them: the folder of the policy, which is `Engine.state`, and that of the log.
_POLICY, _LOGS = Path("/devcluster/audit-policy.yaml"), Path("/var/log/devcluster")


def create(engine: Engine) -> None:
    """Create the cluster with its first node, wait until that is Ready, and lead this machine's packets for Services and pods to it."""
    shared = engine.state / "node"
    shared.mkdir(parents=True, exist_ok=True)
    (shared / _POLICY.name).write_text(AUDIT_POLICY)
    file, image = engine.state / "kind.json", engine.node_image()
    file.write_text(json.dumps(configuration(engine, engine.kept_images(image) if image else None)))
    words: list[str | Path] = [
        programs.kind(),
        "create",
        "cluster",
        "--name",
        CLUSTER,
        "--config",
        file,
        "--kubeconfig",
        kubeconfig(engine),
        "--wait",
        "180s",
    ]
    words += ["--image", image] if image else []
    log = log_dir() / "kind.log"
    run_logged(words, what="kind cluster", log=log, env=engine.environment(), deadline_s=900)
    engine.lead_to(address(engine, FIRST))


def configuration(engine: Engine, kept_images: Path | None = None) -> dict[str, object]:
    """Return kind's configuration of the cluster: one node, our networks and an audit log. The kubelet accepts cgroup v1."""
    mounts: list[dict[str, object]] = [{"hostPath": str(engine.state / "node"), "containerPath": str(_POLICY.parent), "readOnly": True}]
    mounts += [{"hostPath": str(kept_images), "containerPath": "/var/lib/containerd"}] if kept_images else []
    flags = [flag.removeprefix("--").split("=", 1) for flag in audit_flags(_POLICY, _LOGS / "audit.log")]
    volumes = [
        {"name": name, "hostPath": str(folder), "mountPath": str(folder), "readOnly": name == "policy", "pathType": "DirectoryOrCreate"}
        for name, folder in (("policy", _POLICY.parent), ("audit", _LOGS))
    ]
    api_server = {"extraArgs": [{"name": name, "value": value} for name, value in flags], "extraVolumes": volumes}
    patches = [{"kind": "KubeletConfiguration", "failCgroupV1": False}, {"kind": "ClusterConfiguration", "apiServer": api_server}]
    return {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "networking": {**engine.networking, "serviceSubnet": SERVICE_NETWORK, "podSubnet": POD_NETWORK},
        "nodes": [{"role": "control-plane", "extraMounts": mounts}],
        "kubeadmConfigPatches": [json.dumps(patch) for patch in patches],
    }


def existing(engine: Engine) -> list[str]:
    """List the containers of kind's nodes by name, except those that have stopped."""
    return docker(engine, "ps", "--format", "{{.Names}}", "--filter", f"label=io.x-k8s.kind.cluster={CLUSTER}").split()


class Nodes:
    """The nodes of kind's cluster, the first and the second if it was added, with the means to break them and look beneath them."""

    first = FIRST
    """The first node's name."""
    kubeconfig = Path("/etc/kubernetes/admin.conf")
    """The administrator's kubeconfig, as the first node sees it."""
    kubelet = Path("/var/lib/kubelet")
    """The kubelet's folder, as the nodes see it."""
    cdi = Path("/var/run/cdi")
    """The folder in which drivers of devices tell the runtime what a container gets, as the nodes see it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def audit_log(self) -> Iterator[str]:
        """Yield the lines of the API server's log of who asked what, the older file's first."""
        oldest_first = f"cat $(ls -tr {_LOGS}/audit*.log)"
        yield from docker(self._engine, "exec", FIRST, "sh", "-c", oldest_first).splitlines()

    def signal(self, program: str, number: signal.Signals) -> None:
        """Send a signal to a program of Kubernetes on the first node; raise CommandFailed if it does not run."""
        docker(self._engine, "exec", FIRST, "pkill", f"-{number.name.removeprefix('SIG')}", "--exact", program)

    @contextmanager
    def running(self, program: Path, *arguments: str) -> Iterator[None]:
        """Run a static program of this machine on the first node during the block; its log there is /var/log/NAME."""
        end = ["exec", FIRST, "pkill", "--exact", program.name[:15]]  # the kernel keeps so many letters
        docker(self._engine, "cp", program, f"{FIRST}:/usr/local/bin/{program.name}")
        command = f"exec {shlex.join([program.name, *arguments])} > /var/log/{program.name} 2>&1"
        docker(self._engine, "exec", "--detach", FIRST, "sh", "-c", command)
        try:
            yield
        finally:
            docker(self._engine, *end)

    @contextmanager
    def second_node(self) -> Iterator[str]:
        """Add the second node, yield its name, and remove it at the end of the block, also if it was there before."""
        try:
            yield self.add_second()
        finally:
            self.remove_second()

    def add_second(self) -> str:
        """Start a second node as kind starts its workers, or find it; return its name once it is Ready. kind itself adds none to a cluster.

        Raises:
            NotRunning: there is no first node.
            CommandFailed: it is not Ready in time; nothing of it stays.
        """
        there = existing(self._engine) if self._engine.alive() else []
        if FIRST not in there:
            raise NotRunning("kind's first node is not running: `python -m tools.devcluster up` starts it")
        if SECOND not in there:
            with step("kind's second node: Ready"):
                try:
                    self._start_second()
                except BaseException:
                    self.remove_second()
                    raise
        return SECOND

    def remove_second(self) -> None:
        """Remove the second node and its pods from the cluster, and its container; do nothing if there is none or the engine is off."""
        if not self._engine.alive():
            return
        self._kubectl("delete", "node", SECOND, "--ignore-not-found", "--wait=false")
        with contextlib.suppress(CommandFailed):  # nobody else can say that they are gone
            self._kubectl("delete", "pods", "-A", f"--field-selector=spec.nodeName={SECOND}", "--force", "--grace-period=0")
        if SECOND in existing(self._engine):
            docker(self._engine, "rm", "--force", "--volumes", SECOND)

    @contextmanager
    def unplugged(self) -> Iterator[None]:
        """Drop all packets from and to the second node during the block; it and its pods run on."""
        # Of both families: Docker's network for kind has IPv6 as well.
        arriving = "chain arriving { type filter hook prerouting priority -300; iifname eth0 drop; };"
        leaving = "chain leaving { type filter hook postrouting priority 300; oifname eth0 drop; };"
        docker(self._engine, "exec", SECOND, "nft", f"table inet unplugged {{ {arriving} {leaving} }}")
        try:
            yield
        finally:
            docker(self._engine, "exec", SECOND, "nft", "delete table inet unplugged")

    def check_reachable(self) -> None:
        """Raise NotOfThisMachine unless we are root and the first node's processes are this machine's."""
        container = docker(self._engine, "inspect", "--format", "{{.Id}}", FIRST).strip()
        for groups in Path("/proc").glob("[0-9]*/cgroup") if os.geteuid() == 0 else ():
            with contextlib.suppress(OSError):
                if container in groups.read_text():
                    return
        raise NotOfThisMachine("this needs root, and a Docker engine whose containers are processes of this machine")

    def _start_second(self) -> None:
        labels = [f"--label=io.x-k8s.kind.{key}={value}" for key, value in (("cluster", CLUSTER), ("role", "worker"))]
        places = ["--tmpfs=/tmp", "--tmpfs=/run", "--volume=/var", "--volume=/lib/modules:/lib/modules:ro"]
        rights = ["--privileged", "--security-opt=seccomp=unconfined", "--security-opt=apparmor=unconfined", "--cgroupns=private"]
        words = ["run", "--detach", "--tty", "--name", SECOND, "--hostname", SECOND, "--network=kind", *labels, *places, *rights]
        docker(self._engine, *words, docker(self._engine, "inspect", "--format", "{{.Config.Image}}", FIRST).strip())
        join = docker(self._engine, "exec", FIRST, "kubeadm", "token", "create", "--print-join-command").split()
        join_when_up = "until ctr version > /dev/null 2>&1; do sleep 0.1; done; exec " + " ".join([*join, "--ignore-preflight-errors=all"])
        docker(self._engine, "exec", SECOND, "sh", "-c", join_when_up, deadline_s=READY_S)
        ends = time.monotonic() + READY_S
        ready = 'jsonpath={.status.conditions[?(@.type=="Ready")].status}'
        while self._kubectl("get", "node", SECOND, "--ignore-not-found", "-o", ready).strip() != "True":
            if time.monotonic() > ends:
                raise CommandFailed(f"kind's second node is not Ready after {READY_S:.0f} s; `docker logs {SECOND}` says why")
            time.sleep(0.3)

    def _kubectl(self, *words: str) -> str:
        return run_quiet([self._engine.kubectl(), "--kubeconfig", kubeconfig(self._engine), "--request-timeout=10s", *words])
