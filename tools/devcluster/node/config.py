# SPDX-License-Identifier: Apache-2.0
"""The node's addresses and the files its programs read. No side effects but writing those files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from string import Template

from ..apiserver import AUDIT_POLICY
from ..certs import Authority
from ..paths import HERE, NODE_RUN, NODE_STATE, cache_dir

# From the block that is set apart for tests between machines: what people commonly have (10/8, 172.16/12) stays theirs.
LINK_NETWORK = "198.18.0.0/24"
NODE_IP = "198.18.0.1"
MACHINE_IP = "198.18.0.254"
SERVICE_NETWORK = "198.18.64.0/18"
KUBERNETES_IP = "198.18.64.1"
DNS_IP = "198.18.64.10"
POD_NETWORK = "198.19.0.0/24"

# A second node, if there is one, on a cable of its own to the first.
SECOND_LINK_NETWORK = "198.18.1.0/24"
SECOND_IP, SECOND_GATEWAY = "198.18.1.2", "198.18.1.1"
SECOND_POD_NETWORK = "198.19.1.0/24"

NETWORKS = (LINK_NETWORK, SERVICE_NETWORK, POD_NETWORK, SECOND_LINK_NETWORK, SECOND_POD_NETWORK)
POD_NETWORKS = "198.19.0.0/16"  # in which those of all nodes are

NODE_NAME, SECOND_NAME = "node1", "node2"
MACHINE_LINK = "devcluster0"  # the machine's end of the cable to the node
NODE_LINK = "node0"
SERVER = f"https://{NODE_IP}:6443"
REGISTRY = f"{NODE_IP}:5000"

CERTS = NODE_STATE / "certs"
KUBECONFIG = NODE_STATE / "kubeconfig"


@dataclass(frozen=True)
class Node:
    """A node on this machine: its name, addresses, folders and cgroup, which no other node shares.

    Each node runs a kubelet, a kube-proxy and a containerd, which are configured from these fields.
    """

    name: str
    ip: str
    pods: str
    state: Path
    run: Path
    containerd_root: Path
    """The images unpacked on the node."""
    cgroup: str
    """The parent of the control groups of its pods. If it is `/`, the kubelet puts them in `/kubepods`."""

    @property
    def conf(self) -> Path:
        return self.state / "conf"

    @property
    def logs(self) -> Path:
        return self.state / "log"

    @property
    def cni(self) -> Path:
        return self.state / "cni"

    @property
    def cdi(self) -> Path:
        """The folder in which drivers of devices tell the runtime what a container gets."""
        return self.run / "cdi"

    @property
    def containerd_socket(self) -> Path:
        return self.run / "containerd.sock"


def first_node() -> Node:
    """Return the description of the node that also runs the API server.

    Images that it unpacked lie in the cache and outlast `down`, because unpacking torch takes a minute.
    """
    return Node(NODE_NAME, NODE_IP, POD_NETWORK, NODE_STATE, NODE_RUN, cache_dir() / "node-containerd", "/")


def second_node() -> Node:
    """Return the description of the node that a test joins to the first. All its folders, images included, go when it is removed."""
    state, run = (folder.with_name(SECOND_NAME) for folder in (NODE_STATE, NODE_RUN))
    return Node(
        SECOND_NAME, SECOND_IP, SECOND_POD_NETWORK, state, run, cache_dir() / f"{SECOND_NAME}-containerd", f"/devcluster-{SECOND_NAME}"
    )


CONF, LOGS, CNI, CONTAINERD_SOCKET = first_node().conf, first_node().logs, first_node().cni, first_node().containerd_socket
AUDIT_POLICY_FILE = CONF / "audit-policy.yaml"
AUDIT_LOG = LOGS / "audit.log"

_ACCOUNTS = {
    "apiserver-kubelet": ("kube-apiserver-kubelet-client", "system:masters"),
    "front-proxy": ("front-proxy-client", "kube"),
    "admin": ("kubernetes-admin", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", "system:kube-controller-manager"),
    "scheduler": ("system:kube-scheduler", "system:kube-scheduler"),
    "proxy": ("system:kube-proxy", "system:node-proxier"),
}


def registry_root() -> Path:
    """Return the folder of pushed layers; it is kept, so that only changed ones are pushed."""
    return cache_dir() / "node-registry"


def write_all(*, debian: Path, pause_image: str) -> Authority:
    """Make all keys and certificates, write every configuration file of the first node, and return the certificate authority."""
    authority = Authority(CERTS)
    authority.service_account_key()
    names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local", "localhost"]
    addresses = (*(f"DNS:{n}" for n in names), "IP:127.0.0.1", f"IP:{NODE_IP}", f"IP:{KUBERNETES_IP}")
    authority.issue("apiserver", user="kube-apiserver", group="kube", addresses=addresses)
    for name, (user, group) in _ACCOUNTS.items():
        authority.issue(name, user=user, group=group)
    write_node(authority, first_node(), debian=debian, pause_image=pause_image)
    for name in ("controller-manager", "scheduler"):
        authority.kubeconfig(name, server=SERVER, target=CONF / f"{name}.kubeconfig")
    authority.kubeconfig("admin", server=SERVER, target=KUBECONFIG)
    return authority


def write_node(authority: Authority, node: Node, *, debian: Path, pause_image: str) -> None:
    """Write a node's files: a certificate for its kubelet, two kubeconfigs, and the configuration of its programs."""
    for directory in (node.conf, node.logs, node.cni, node.conf / "registries" / "localhost"):
        directory.mkdir(parents=True, exist_ok=True)
    serves = (f"DNS:{node.name}", "IP:127.0.0.1", f"IP:{node.ip}")
    authority.issue(_kubelet_account(node), user=f"system:node:{node.name}", group="system:nodes", addresses=serves)
    authority.kubeconfig(_kubelet_account(node), server=SERVER, target=node.conf / "kubelet.kubeconfig")
    authority.kubeconfig("proxy", server=SERVER, target=node.conf / "proxy.kubeconfig")
    for file, text in files(node, debian=debian, pause_image=pause_image).items():
        file.write_text(text)


def files(node: Node, *, debian: Path, pause_image: str) -> dict[Path, str]:
    """Return the text of each configuration file by its path; nothing is written, and YAML is given as JSON.

    Only the first node has a registry and an audit policy. `debian` is the folder that `programs.debian` unpacks.
    """
    only_first = {node.conf / "registry.json": json.dumps(_registry()), AUDIT_POLICY_FILE: AUDIT_POLICY} if node == first_node() else {}
    return only_first | {
        node.conf / "containerd.toml": _containerd(node, debian, pause_image),
        node.conf / "registries" / "localhost" / "hosts.toml": _hosts(),
        node.cni / "10-bridge.conflist": json.dumps(_bridge(node)),
        node.conf / "resolv.conf": "nameserver 127.0.0.1\n",  # pods outside the cluster's DNS have none
        node.conf / "kubelet.json": json.dumps(_kubelet(node), indent=1),
        node.conf / "proxy.json": json.dumps(_proxy(node), indent=1),
    }


def _kubelet_account(node: Node) -> str:
    return f"kubelet-{node.name}"


def coredns_manifest(image: str) -> str:
    """Return the manifest of the cluster's DNS, as YAML, for this image."""
    return Template((HERE / "node" / "coredns.yaml").read_text()).substitute(image=image, address=DNS_IP)


def _containerd(node: Node, debian: Path, pause_image: str) -> str:
    images, runtime = "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime"
    return f"""version = 3
root = "{node.containerd_root}"
state = "{node.run}/containerd"
[grpc]
  address = "{node.containerd_socket}"
[plugins."{images}"]
  snapshotter = "overlayfs"
  # The packed layers are in the registry already.
  discard_unpacked_layers = true
  [plugins."{images}".pinned_images]
    sandbox = "{pause_image}"
  [plugins."{images}".registry]
    config_path = "{node.conf}/registries"
[plugins."{runtime}"]
  disable_apparmor = true
  # Without CAP_SYS_RESOURCE (root in many containers) the kernel refuses a lower score, and with it every pod.
  restrict_oom_score_adj = true
  cdi_spec_dirs = ["{node.cdi}"]
  [plugins."{runtime}".containerd]
    default_runtime_name = "runc"
    [plugins."{runtime}".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
  [plugins."{runtime}".cni]
    bin_dirs = ["{debian}/usr/lib/cni"]
    conf_dir = "{node.cni}"
"""


def _hosts() -> str:
    # Images named localhost/… come from the node's registry: their names are the same for the builder, for pods and on every provider.
    return f'server = "http://{REGISTRY}"\n\n[host."http://{REGISTRY}"]\n  capabilities = ["pull", "resolve"]\n'


def _registry() -> dict[str, object]:
    return {
        "version": 0.1,
        "log": {"level": "warn"},
        "storage": {"filesystem": {"rootdirectory": str(registry_root())}},
        "http": {"addr": REGISTRY},
    }


def _bridge(node: Node) -> dict[str, object]:
    addresses = {
        "type": "host-local",
        "dataDir": str(node.run / "ipam"),
        "ranges": [[{"subnet": node.pods}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": False, "hairpinMode": True, "ipam": addresses}
    return {"cniVersion": "1.0.0", "name": "devcluster", "plugins": [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}]}


def _kubelet(node: Node) -> dict[str, object]:
    # The disk is the machine's, so a share of it says nothing about the node.
    no_threshold = dict.fromkeys(("nodefs.available", "nodefs.inodesFree", "imagefs.available", "imagefs.inodesFree"), "0%")
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": "0.0.0.0",
        "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": True}, "x509": {"clientCAFile": str(CERTS / "ca.crt")}},
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(CERTS / f"{_kubelet_account(node)}.crt"),
        "tlsPrivateKeyFile": str(CERTS / f"{_kubelet_account(node)}.key"),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": node.cgroup,
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDNS": [DNS_IP],
        "clusterDomain": "cluster.local",
        "containerRuntimeEndpoint": f"unix://{node.containerd_socket}",
        "resolvConf": str(node.conf / "resolv.conf"),
        "evictionHard": {"memory.available": "100Mi", **no_threshold},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "nodeStatusUpdateFrequency": "5s",
        "enforceNodeAllocatable": ["pods"],
        "podLogsDir": str(node.state / "podlogs"),
        "volumePluginDir": str(node.state / "volumeplugins"),
    }


def _proxy(node: Node) -> dict[str, object]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(node.conf / "proxy.kubeconfig")},
        "clusterCIDR": POD_NETWORKS,
        "mode": "nftables",
        "hostnameOverride": node.name,
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        # nf_conntrack_max is the whole machine's: leave it alone.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
