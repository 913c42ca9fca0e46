# SPDX-License-Identifier: Apache-2.0
"""The check pod of a template: its container image and options, without devices, mounts, privileges and the network of its node."""

from collections.abc import Sequence

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.names import ANNOTATION_DESIRED, LABEL_INCARNATION, LABEL_REPLICA_INDEX, NO_GPU_RESOURCE, check_pod_name
from diffusion_operator.api.pod_parts import ContainerSecurity
from diffusion_operator.plan.replicas.revision import Template
from diffusion_operator.render import Manifest
from diffusion_operator.render.pod import container_security, gpu_resource, pod

_OF_THE_POD = (
    "automountServiceAccountToken", "enableServiceLinks", "securityContext", "serviceAccountName", "imagePullSecrets", "nodeSelector",
    "priorityClassName", "runtimeClassName", "schedulerName",
)  # fmt: skip
_OF_THE_CONTAINER = ("name", "image", "imagePullPolicy", "env", "envFrom", "terminationMessagePolicy")
_RESOURCES = {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "512Mi"}}
"""A worker that reads its options imports no torch: it takes a second and 60 MiB."""


def check_pod(deployment: DiffusionDeployment, template: Template, *, nodes: Sequence[str]) -> Manifest:
    """Render the check pod, which prefers `nodes`. It reads the arguments of a replica's pod after `serve --check`, and ends."""
    made = pod(deployment, template, index=0, incarnation=0)
    spec, (worker,) = made["spec"], made["spec"]["containers"]
    container = {
        **_said(worker, _OF_THE_CONTAINER),
        "args": ["serve", "--check", *worker["args"][1:]],
        "resources": _RESOURCES,
        "securityContext": container_security(ContainerSecurity()),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    # The cluster adds this toleration to pods that ask for the device, and nodes may keep all others off it.
    gpu = gpu_resource(deployment.spec)
    device = [{"key": gpu, "operator": "Exists"}] if gpu != NO_GPU_RESOURCE else []
    return {
        **made,
        "metadata": {
            **made["metadata"],
            "name": check_pod_name(deployment.metadata.name, template.revision),
            "labels": _without(made["metadata"]["labels"], LABEL_REPLICA_INDEX, LABEL_INCARNATION),
            "annotations": _without(made["metadata"]["annotations"], ANNOTATION_DESIRED),
        },
        "spec": {
            **_said(spec, _OF_THE_POD),
            "tolerations": [*spec.get("tolerations", ()), *device],
            "affinity": {"nodeAffinity": _node_affinity(spec, nodes)},
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "activeDeadlineSeconds": deployment.spec.rollout.progress_deadline_seconds,
            "containers": [container],
            "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}}],
        },
    }


def _node_affinity(spec: Manifest, nodes: Sequence[str]) -> Manifest:
    """Return what a replica's pod requires of its node, and a preference for `nodes`."""
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    asked = spec.get("affinity", {}).get("nodeAffinity", {})
    fields = ({"key": "metadata.name", "operator": "In", "values": [name]} for name in nodes)
    preferred = [{"weight": 100, "preference": {"matchFields": [field]}} for field in fields]
    return {**_said(asked, (required,)), "preferredDuringSchedulingIgnoredDuringExecution": preferred}


def _said(part: Manifest, names: Sequence[str]) -> Manifest:
    return {name: part[name] for name in names if name in part}


def _without(part: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in part.items() if name not in names}
