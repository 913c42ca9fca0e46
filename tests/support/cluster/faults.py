# SPDX-License-Identifier: Apache-2.0
"""Faults made from below the cluster: signals to its programs and to programs in pods, and dropped packets.

Real: the faults, made by the kernel of the node. The node must run on this machine. Otherwise `own_nodes` raises, and the test is skipped.
"""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tools.demo.kubectl import Document, Kubectl
from tools.devcluster import cluster

CONTROL_PORT = 8001


def service_address(kubectl: Kubectl, name: str) -> str:
    """Return the URL of a Service's cluster IP and first port, which is reachable from here without the API server.

    NotOfThisMachine if the nodes run elsewhere.
    """
    cluster.provider().own_nodes()
    spec = kubectl.get(f"service/{name}")["spec"]
    return f"http://{spec['clusterIP']}:{spec['ports'][0]['port']}"


@contextmanager
def api_server_stopped() -> Iterator[None]:
    """Halt the node's kube-apiserver with SIGSTOP, and let it go on after the block.

    Clients see connections that stay open and do not answer, as when its machine swaps.
    """
    nodes = cluster.provider().own_nodes()
    nodes.signal("kube-apiserver", signal.SIGSTOP)
    try:
        yield
    finally:
        nodes.signal("kube-apiserver", signal.SIGCONT)


@contextmanager
def control_port_cut_off(pod: Document) -> Iterator[None]:
    """Drop packets to a pod's control port silently while the block runs; packets to its other ports arrive.

    The rule is in the pod's network namespace: pods of one node meet on its bridge, where not every kernel can filter.
    """
    inside = ["nsenter", "--target", str(processes_of(pod)[0]), "--net", "--", "nft"]
    rule = f"table inet faults {{ chain arriving {{ type filter hook input priority 0; tcp dport {CONTROL_PORT} drop; }}; }}"
    subprocess.run([*inside, "-f", "-"], input=rule, text=True, check=True, timeout=10)
    try:
        yield
    finally:
        subprocess.run([*inside, "delete table inet faults"], check=True, timeout=10)


def kill_operator(kubectl: Kubectl) -> None:
    """Send SIGKILL to the leading operator's process, so that it cannot finish anything that it began."""
    signal_operator(leader(kubectl), signal.SIGKILL)


@contextmanager
def operator_stopped(pod: Document) -> Iterator[None]:
    """Halt the operator's processes in a pod with SIGSTOP while the block runs; their connections stay open.

    The kubelet may end the pod meanwhile, as its probe fails.
    """
    stopped = signal_operator(pod, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def signal_operator(pod: Document, number: signal.Signals) -> list[int]:
    """Send a signal to the operator's processes in a pod, and return their pids; the sandbox's process is left out."""
    pids = [pid for pid in processes_of(pod) if not Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"/pause")]
    for pid in pids:
        os.kill(pid, number)
    return pids


def leader(kubectl: Kubectl) -> Document:
    """Return the operator's pod that the Lease names; AssertionError if there is no such pod."""
    pods = operator_pods(kubectl)
    arguments: list[str] = next((one["args"] for pod in pods for one in pod["spec"]["containers"]), [])
    assert arguments, "no pod of the operator is there"
    lease = arguments[arguments.index("--lease-name") + 1]
    holder = str(kubectl.get(f"lease/{lease}")["spec"].get("holderIdentity") or "").partition("_")[0]
    found = [pod for pod in pods if pod["metadata"]["name"] == holder]
    assert found, f"the Lease names {holder or 'nobody'}, and no such pod of the operator is there"
    return found[0]


def kill_server_in(pod: Document) -> None:
    """Send SIGKILL to the first process of the worker's container; AssertionError if no server runs in it just now.

    A process inside cannot: the kernel protects the first process of a pid namespace from signals of the same namespace.
    """
    for pid in processes_of(pod):
        with suppress(FileNotFoundError, ProcessLookupError):
            words, status = (Path(f"/proc/{pid}/{file}").read_text() for file in ("cmdline", "status"))
            if "serve" in words.split("\0") and re.search(r"^NSpid:.*\s1$", status, re.MULTILINE):
                return os.kill(pid, signal.SIGKILL)
    raise AssertionError(f"pod {pod['metadata']['name']} has no server just now")


def resident_mib(pod: Document) -> float:
    """Return the resident memory of all processes of a pod, in MiB."""
    lines = [line for pid in processes_of(pod) for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return round(sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024, 1)


def operator_pods(kubectl: Kubectl) -> list[Document]:
    """Return the operator's pods that are not terminating."""
    items = kubectl.get("pods", "-l", "app.kubernetes.io/component=operator")["items"]
    return [item for item in items if "deletionTimestamp" not in item["metadata"]]


def processes_of(pod: Document) -> list[int]:
    """Return the pids of all processes in a pod's containers, in this machine's pid namespace; the sandbox's process is among them.

    AssertionError if there is none.
    """
    uid = str(pod["metadata"]["uid"])
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            groups = (folder / "cgroup").read_text()
            if uid in groups or uid.replace("-", "_") in groups:
                found.append(int(folder.name))
    if not found:
        cluster.provider().own_nodes()
    assert found, f"no process of pod {pod['metadata']['name']} is to be seen"
    return sorted(found)
