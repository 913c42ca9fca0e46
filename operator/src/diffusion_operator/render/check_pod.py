# SPDX-License-Identifier: Apache-2.0
"""The check pod of a template: its container image and options, without devices, mounts, privileges and the namespaces of its node."""

from collections.abc import Sequence

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.names import LABEL_INCARNATION, LABEL_REPLICA_INDEX, NO_GPU_RESOURCE, check_pod_name
from diffusion_operator.api.pod_parts import ContainerSecurity
from diffusion_operator.plan.replicas.revision import Template
from diffusion_operator.render import Manifest
from diffusion_operator.render.pod import container_security, pod

_WITHOUT = (
    "affinity", "topologySpreadConstraints", "hostNetwork", "hostIPC", "hostPID", "resourceClaims", "ports", "startupProbe",
    "livenessProbe", "readinessProbe", LABEL_REPLICA_INDEX, LABEL_INCARNATION,
)  # fmt: skip
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_RESOURCES = {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "512Mi"}}
"""A worker that only reads its options imports no torch."""


def check_pod(deployment: DiffusionDeployment, template: Template, *, nodes: Sequence[str]) -> Manifest:
    """Render the check pod, which prefers `nodes`. The worker in it reads a replica's arguments after `serve --check`, and ends."""
    made = pod(deployment, template, index=0, incarnation=0)
    (worker,), name = made["spec"]["containers"], check_pod_name(deployment.metadata.name, template.revision)
    container = {
        **_rest(worker),
        "args": ["serve", "--check", *worker["args"][1:]],
        "resources": _RESOURCES,
        "securityContext": container_security(ContainerSecurity()),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    asked = made["spec"].get("affinity", {}).get("nodeAffinity", {})
    near = [
        {"weight": 100, "preference": {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}} for node in nodes
    ]
    # The cluster adds this toleration to pods that ask for the device, and nodes may keep all others off it.
    gpu = deployment.spec.resources.gpu_resource
    device = [{"key": gpu, "operator": "Exists"}] if gpu != NO_GPU_RESOURCE else []
    spec = {
        **_rest(made["spec"]),
        "tolerations": [*made["spec"].get("tolerations", ()), *device],
        "affinity": {"nodeAffinity": {**asked, _PREFERRED: [*asked.get(_PREFERRED, ()), *near]}},
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "activeDeadlineSeconds": deployment.spec.rollout.progress_deadline_seconds,
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}}],
    }
    return made | {"metadata": made["metadata"] | {"name": name, "labels": _rest(made["metadata"]["labels"])}, "spec": spec}


def _rest(part: Manifest) -> Manifest:
    return {name: value for name, value in part.items() if name not in _WITHOUT}
