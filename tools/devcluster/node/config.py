# SPDX-License-Identifier: Apache-2.0
"""The node's addresses and the files its programs read. No side effects but writing those files."""

from __future__ import annotations

import json
from pathlib import Path
from string import Template

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

NODE_NAME = "node1"
MACHINE_LINK = "devcluster0"  # the machine's end of the cable to the node
NODE_LINK = "node0"
SERVER = f"https://{NODE_IP}:6443"
REGISTRY = f"{NODE_IP}:5000"

CONF, CERTS, LOGS, CNI = NODE_STATE / "conf", NODE_STATE / "certs", NODE_STATE / "log", NODE_STATE / "cni"
KUBECONFIG = NODE_STATE / "kubeconfig"
CONTAINERD_SOCKET = NODE_RUN / "containerd.sock"

_ACCOUNTS = {
    "kubelet": (f"system:node:{NODE_NAME}", "system:nodes"),
    "apiserver-kubelet": ("kube-apiserver-kubelet-client", "system:masters"),
    "front-proxy": ("front-proxy-client", "kube"),
    "admin": ("kubernetes-admin", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", "system:kube-controller-manager"),
    "scheduler": ("system:kube-scheduler", "system:kube-scheduler"),
    "proxy": ("system:kube-proxy", "system:node-proxier"),
}


def containerd_root() -> Path:
    """The images unpacked on the node; kept over `down`, because unpacking torch takes a minute."""
    return cache_dir() / "node-containerd"


def registry_root() -> Path:
    """The layers that were pushed; kept, so that only changed ones move."""
    return cache_dir() / "node-registry"


def write_all(*, debian: Path, pause_image: str) -> Authority:
    """Makes the certificates and writes every configuration file; gives the authority."""
    for directory in (CONF, LOGS, CNI, CONF / "registries" / "localhost"):
        directory.mkdir(parents=True, exist_ok=True)
    authority = Authority(CERTS)
    authority.service_account_key()
    names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local", "localhost"]
    addresses = (*(f"DNS:{n}" for n in names), "IP:127.0.0.1", f"IP:{NODE_IP}", f"IP:{KUBERNETES_IP}")
    authority.issue("apiserver", user="kube-apiserver", group="kube", addresses=addresses)
    for name, (user, group) in _ACCOUNTS.items():
        serves = (f"DNS:{NODE_NAME}", "IP:127.0.0.1", f"IP:{NODE_IP}") if name == "kubelet" else ()
        authority.issue(name, user=user, group=group, addresses=serves)
    for name in ("controller-manager", "scheduler", "kubelet", "proxy"):
        authority.kubeconfig(name, server=SERVER, target=CONF / f"{name}.kubeconfig")
    authority.kubeconfig("admin", server=SERVER, target=KUBECONFIG)
    for file, text in files(debian=debian, pause_image=pause_image).items():
        file.write_text(text)
    return authority


def files(*, debian: Path, pause_image: str) -> dict[Path, str]:
    """Every configuration file and its text; JSON where a program takes YAML."""
    return {
        CONF / "containerd.toml": _containerd(debian, pause_image),
        CONF / "registries" / "localhost" / "hosts.toml": _hosts(),
        CONF / "registry.json": json.dumps(_registry()),
        CNI / "10-bridge.conflist": json.dumps(_bridge()),
        CONF / "resolv.conf": "nameserver 127.0.0.1\n",  # pods outside the cluster's DNS have none
        CONF / "kubelet.json": json.dumps(_kubelet(), indent=1),
        CONF / "proxy.json": json.dumps(_proxy(), indent=1),
    }


def coredns_manifest(image: str) -> str:
    """What gives the cluster its names."""
    return Template((HERE / "node" / "coredns.yaml").read_text()).substitute(image=image, address=DNS_IP)


def _containerd(debian: Path, pause_image: str) -> str:
    cri = "io.containerd.grpc.v1.cri"
    return f"""version = 2
root = "{containerd_root()}"
state = "{NODE_RUN}/containerd"
[grpc]
  address = "{CONTAINERD_SOCKET}"
[plugins."{cri}"]
  sandbox_image = "{pause_image}"
  disable_apparmor = true
  # Without CAP_SYS_RESOURCE (root in many containers) the kernel refuses a lower score, and with it every pod.
  restrict_oom_score_adj = true
  [plugins."{cri}".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    # The packed layers are in the registry already.
    discard_unpacked_layers = true
    [plugins."{cri}".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
  [plugins."{cri}".registry]
    config_path = "{CONF}/registries"
  [plugins."{cri}".cni]
    bin_dir = "{debian}/usr/lib/cni"
    conf_dir = "{CNI}"
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


def _bridge() -> dict[str, object]:
    addresses = {
        "type": "host-local",
        "dataDir": str(NODE_RUN / "ipam"),
        "ranges": [[{"subnet": POD_NETWORK}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": False, "hairpinMode": True, "ipam": addresses}
    return {"cniVersion": "1.0.0", "name": "devcluster", "plugins": [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}]}


def _kubelet() -> dict[str, object]:
    # The disk is the machine's, so a share of it says nothing about the node.
    no_threshold = dict.fromkeys(("nodefs.available", "nodefs.inodesFree", "imagefs.available", "imagefs.inodesFree"), "0%")
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": "0.0.0.0",
        "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": True}, "x509": {"clientCAFile": str(CERTS / "ca.crt")}},
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(CERTS / "kubelet.crt"),
        "tlsPrivateKeyFile": str(CERTS / "kubelet.key"),
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDNS": [DNS_IP],
        "clusterDomain": "cluster.local",
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "resolvConf": str(CONF / "resolv.conf"),
        "evictionHard": {"memory.available": "100Mi", **no_threshold},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "nodeStatusUpdateFrequency": "5s",
        "enforceNodeAllocatable": ["pods"],
        "podLogsDir": str(NODE_STATE / "podlogs"),
        "volumePluginDir": str(NODE_STATE / "volumeplugins"),
    }


def _proxy() -> dict[str, object]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(CONF / "proxy.kubeconfig")},
        "clusterCIDR": POD_NETWORK,
        "mode": "nftables",
        "hostnameOverride": NODE_NAME,
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        # nf_conntrack_max is the whole machine's: leave it alone.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
