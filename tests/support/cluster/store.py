# SPDX-License-Identifier: Apache-2.0
"""A bucket and a hub in a pod of a test's namespace, with a certificate of its own authority, and claims on the node's /tmp.

Real: the pod, its Service, its TLS and the claims. Not real: S3 and the Hugging Face hub, in whose place `servers` answers.
"""

import base64
import json
from pathlib import Path

from support.cluster.rig import ClusterRig
from support.sources import servers
from tools.demo.kubectl import Document
from tools.devcluster.certs import Authority

STORE = "store"
TRUST, TLS = "store-ca", "store-tls"
ACCESS_KEY = "AKTESTS"


def host_of(rig: ClusterRig) -> str:
    return f"{STORE}.{rig.kubectl.namespace}.svc"


def worker_environment(rig: ClusterRig) -> list[Document]:
    """Return environment entries for workers: the address of the hub, and the CA file that signed its certificate.

    The file exists where the Secret TRUST is mounted.
    """
    trusted = {"name": "SSL_CERT_FILE", "value": f"/var/run/diffusion-operator/secrets/{TRUST}/ca.crt"}
    return [trusted, {"name": "HF_ENDPOINT", "value": f"https://{host_of(rig)}"}]


def apply(rig: ClusterRig, *documents: Document) -> None:
    rig.kubectl.text("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": documents}))


def secret(name: str, **data: bytes) -> Document:
    encoded = {key.replace("_", "."): base64.b64encode(value).decode() for key, value in data.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": encoded}


def start_store(rig: ClusterRig, folder: Path, *, served: str, claim: str, first: str) -> None:
    """Start a pod that answers as a bucket and a hub by TLS, with a Service, and wait until it is ready.

    It serves the folder `served` of the worker's image, after the shell command `first`, which has the volume claim `claim` at /claim.
    `folder` gets the certificates.
    """
    authority = Authority(folder)
    authority.issue("server", user=STORE, group="tests", addresses=(f"DNS:{host_of(rig)}",))
    trusted, certificate, key = (authority.file(name).read_bytes() for name in ("ca.crt", "server.crt", "server.key"))
    script = {"servers.py": Path(servers.__file__).read_text()}
    container = {
        "name": STORE,
        "image": rig.worker_image,
        "command": ["sh", "-c", f"{first} && exec python3 /script/servers.py {served} /tls/tls.crt /tls/tls.key {ACCESS_KEY}"],
        "readinessProbe": {"tcpSocket": {"port": servers.PORT}, "periodSeconds": 1},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": name, "mountPath": f"/{name}"} for name in ("script", "tls", "claim")],
    }
    volumes: list[Document] = [
        {"name": "script", "configMap": {"name": STORE}},
        {"name": "tls", "secret": {"secretName": TLS, "defaultMode": 0o440}},
        {"name": "claim", "persistentVolumeClaim": {"claimName": claim}},
    ]
    security = {"runAsNonRoot": True, "runAsUser": 65532, "fsGroup": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {"containers": [container], "volumes": volumes, "securityContext": security, "terminationGracePeriodSeconds": 0}
    ports = [{"port": 443, "targetPort": servers.PORT}]
    apply(
        rig,
        secret(TRUST, ca_crt=trusted),
        secret(TLS, tls_crt=certificate, tls_key=key),
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": STORE}, "data": script},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": STORE}, "spec": {"selector": {"app": STORE}, "ports": ports}},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": STORE, "labels": {"app": STORE}}, "spec": spec},
    )
    rig.kubectl.text("wait", f"pod/{STORE}", "--for=condition=Ready", "--timeout=60s", deadline_s=70)


def remove_store(rig: ClusterRig) -> None:
    mine = [f"{kind}/{STORE}" for kind in ("pod", "service", "configmap")] + [f"secret/{name}" for name in (TRUST, TLS)]
    rig.kubectl.text("delete", *mine, "--ignore-not-found", deadline_s=30)


def claim_on_the_node(namespace: str, name: str, path: str = "/tmp") -> list[Document]:
    """Return documents of a volume in the node's folder `path` and of a claim, bound by name, so no provisioner is needed.

    A pod without root may write to /tmp on any node.
    """
    size, names = {"storage": "1Gi"}, {"name": name, "namespace": namespace}
    volume = {
        "capacity": size, "accessModes": ["ReadWriteMany"], "hostPath": {"path": path}, "storageClassName": "",
        "persistentVolumeReclaimPolicy": "Retain", "claimRef": names,
    }  # fmt: skip
    claim = {"accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeName": name, "resources": {"requests": size}}
    return [
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": volume},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": claim},
    ]
