# SPDX-License-Identifier: Apache-2.0
"""The command lines of the node's programs, by name, in the order in which they start."""

from __future__ import annotations

from pathlib import Path

from ..apiserver import audit_flags, etcd_command
from ..paths import NODE_STATE
from .config import AUDIT_LOG, AUDIT_POLICY_FILE, CERTS, CONF, NODE_IP, SERVICE_NETWORK, Node, first_node

Command = list[str | Path]


def storage(debian: Path, runtime: Path, etcd: Path) -> dict[str, Command]:
    """Return the command lines of the programs that start first, by name: etcd, the registry and containerd."""
    client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
    return {
        "etcd": etcd_command(etcd, NODE_STATE / "etcd", client, peer),
        "registry": [debian / "usr/bin/docker-registry", "serve", CONF / "registry.json"],
        "containerd": containerd(first_node(), runtime),
    }


def containerd(node: Node, runtime: Path) -> Command:
    """Return the command line of a node's container runtime; `runtime` is the folder of its program."""
    return [runtime / "containerd", "--config", node.conf / "containerd.toml"]


def apiserver(kube: Path) -> dict[str, Command]:
    """Return the command line of the API server by its name, with aggregation, access to kubelets, and an audit log of service accounts."""
    return {
        "kube-apiserver": [
            kube / "kube-apiserver",
            "--etcd-servers=http://127.0.0.1:2379",
            f"--advertise-address={NODE_IP}",
            "--bind-address=0.0.0.0",
            "--secure-port=6443",
            f"--tls-cert-file={CERTS}/apiserver.crt",
            f"--tls-private-key-file={CERTS}/apiserver.key",
            f"--client-ca-file={CERTS}/ca.crt",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={CERTS}/sa.pub",
            f"--service-account-signing-key-file={CERTS}/sa.key",
            f"--service-cluster-ip-range={SERVICE_NETWORK}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            f"--kubelet-client-certificate={CERTS}/apiserver-kubelet.crt",
            f"--kubelet-client-key={CERTS}/apiserver-kubelet.key",
            f"--kubelet-certificate-authority={CERTS}/ca.crt",
            "--kubelet-preferred-address-types=InternalIP",
            f"--requestheader-client-ca-file={CERTS}/ca.crt",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={CERTS}/front-proxy.crt",
            f"--proxy-client-key-file={CERTS}/front-proxy.key",
            *audit_flags(AUDIT_POLICY_FILE, AUDIT_LOG),
        ]
    }


def controllers(kube: Path) -> dict[str, Command]:
    """Return the command lines, by name, of the programs that start after the API server.

    They are the controller manager, the scheduler, and the first node's kubelet and kube-proxy.
    """
    alone = ["--leader-elect=false", "--bind-address=127.0.0.1"]
    return {
        "kube-controller-manager": [
            kube / "kube-controller-manager",
            f"--kubeconfig={CONF}/controller-manager.kubeconfig",
            f"--service-account-private-key-file={CERTS}/sa.key",
            f"--root-ca-file={CERTS}/ca.crt",
            f"--cluster-signing-cert-file={CERTS}/ca.crt",
            f"--cluster-signing-key-file={CERTS}/ca.key",
            "--use-service-account-credentials=true",
            *alone,
        ],
        "kube-scheduler": [kube / "kube-scheduler", f"--kubeconfig={CONF}/scheduler.kubeconfig", *alone],
        **agents(first_node(), kube),
    }


def agents(node: Node, kube: Path) -> dict[str, Command]:
    """Return the command lines, by name, of the kubelet and kube-proxy, which make a machine with a container runtime a node."""
    return {
        "kubelet": [
            kube / "kubelet",
            f"--config={node.conf}/kubelet.json",
            f"--kubeconfig={node.conf}/kubelet.kubeconfig",
            f"--hostname-override={node.name}",
            f"--node-ip={node.ip}",
            f"--root-dir={node.state}/kubelet",
            f"--cert-dir={node.state}/kubelet-pki",
        ],
        "kube-proxy": [kube / "kube-proxy", f"--config={node.conf}/proxy.json"],
    }


def folders(debian: Path, runtime: Path) -> list[Path]:
    """Return the folders that have to be in PATH for the container runtime: that of its shim, and those of runc."""
    return [runtime, debian / "usr/bin", debian / "usr/sbin"]


def ctr(node: Node, runtime: Path) -> Command:
    """Return the first words of a call of containerd's own client, for the images and containers of this node's pods."""
    return [runtime / "ctr", "--address", node.containerd_socket, "--namespace", "k8s.io"]
