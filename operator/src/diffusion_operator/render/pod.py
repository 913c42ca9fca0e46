# SPDX-License-Identifier: Apache-2.0
"""The pod of one replica: one container, the worker, under the restricted Pod Security profile."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.deployment_spec import DeploymentSpec, Identity, RequestLimits, SecurityContext, host_namespaces
from diffusion_operator.api.names import (
    CONTAINER,
    CONTROL_PORT,
    DATA_PORT,
    LABEL_DEPLOYMENT,
    LABEL_INCARNATION,
    LABEL_REPLICA_INDEX,
    LABEL_REVISION,
    NO_GPU_RESOURCE,
    pod_name,
)
from diffusion_operator.api.pod_parts import ContainerSecurity
from diffusion_operator.api.scheduling import TopologySpread
from diffusion_operator.plan.replicas.revision import Template
from diffusion_operator.render import Manifest
from diffusion_operator.render.metadata import child_metadata, with_asked
from diffusion_operator.render.volumes import pod_volumes
from diffusion_operator.render.worker_arguments import STOP_MARGIN_S, worker_arguments

WORKER_UID = 65532
"""The user and group of our container images."""
MESH_ANNOTATIONS = ("traffic.sidecar.istio.io/excludeInboundPorts", "config.linkerd.io/skip-inbound-ports")
"""Annotations of Istio and Linkerd with ports that their proxies leave alone."""
PROBE_PERIOD_S = 2
STARTUP_MARGIN_S = 30  # the worker gives up by itself first, with a reason; the kubelet only if it hangs


def pod(
    deployment: DiffusionDeployment, template: Template, *, index: int, incarnation: int, avoided_nodes: Sequence[str] = ()
) -> Manifest:
    own = {LABEL_REPLICA_INDEX: str(index), LABEL_INCARNATION: str(incarnation), LABEL_REVISION: template.revision}
    name, asked = pod_name(deployment.metadata.name, index, incarnation), deployment.spec.pod_metadata
    annotations = {**asked.annotations, **_outside_of_meshes(asked.annotations)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": with_asked(child_metadata(deployment, name, **own), labels=asked.labels, annotations=annotations),
        "spec": {
            **pod_scheduling(deployment, avoided_nodes),
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": deployment.spec.drain.timeout_seconds + STOP_MARGIN_S,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": _security_context(deployment.spec.security_context),
            "containers": [_container(deployment, template)],
            "volumes": [*(one.volume for one in pod_volumes(deployment)), *map(_plain, deployment.spec.volumes)],
            **_service_account(deployment.spec),
            **{name: True for name, used in host_namespaces(deployment.spec).items() if used},
            **_pull_secrets(deployment.spec),
            **_device_claims(deployment.spec),
        },
    }


def _outside_of_meshes(asked: Mapping[str, str]) -> dict[str, str]:
    """Return annotations that keep the control port out of service meshes, which would end its connections in a proxy.

    Ports that the spec lists there stay listed. These are no part of the template's revision, so they replace no pod.
    """
    ports = {name: [port.strip() for port in asked.get(name, "").split(",") if port.strip()] for name in MESH_ANNOTATIONS}
    return {name: ",".join([*listed, *([] if str(CONTROL_PORT) in listed else [str(CONTROL_PORT)])]) for name, listed in ports.items()}


def _security_context(asked: SecurityContext) -> Manifest:
    """Return the restricted profile with the user and groups of the spec, else those of our images, else none."""
    own = {"runAsUser": WORKER_UID, "runAsGroup": WORKER_UID, "fsGroup": WORKER_UID} if asked.identity is Identity.IMAGE else {}
    said = {"runAsUser": asked.run_as_user, "runAsGroup": asked.run_as_group, "fsGroup": asked.fs_group}
    return {
        "runAsNonRoot": True,
        **own,
        **{name: value for name, value in said.items() if value is not None},
        **({"supplementalGroups": list(asked.supplemental_groups)} if asked.supplemental_groups else {}),
        "fsGroupChangePolicy": "OnRootMismatch",  # or each start walks through a cache of many models
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _service_account(spec: DeploymentSpec) -> Manifest:
    """Return the pod's field for the ServiceAccount of the spec; empty without one.

    No token of it is mounted: a platform's identity webhook brings one of its own.
    """
    return {"serviceAccountName": spec.service_account_name} if spec.service_account_name else {}


def _pull_secrets(spec: DeploymentSpec) -> Manifest:
    names = [{"name": one.name} for one in spec.engine.pull_secrets]
    return {"imagePullSecrets": names} if names else {}


def _device_claims(spec: DeploymentSpec) -> Manifest:
    """Return the pod's field `resourceClaims`, by which it gets devices through dynamic resource allocation; empty without any.

    `_resources` names the claims that the container uses.
    """
    claims = [
        {"name": one.name}
        | ({"resourceClaimName": one.resource_claim_name} if one.resource_claim_name is not None else {})
        | ({"resourceClaimTemplateName": one.resource_claim_template_name} if one.resource_claim_template_name is not None else {})
        for one in spec.resources.claims
    ]
    return {"resourceClaims": claims} if claims else {}


def _container(deployment: DiffusionDeployment, template: Template) -> Manifest:
    spec = deployment.spec
    return {
        "name": CONTAINER,
        "image": template.image,
        "imagePullPolicy": spec.engine.pull_policy.value,
        "args": [one.replace("$(", "$$(") for one in worker_arguments(deployment)],  # the kubelet would expand it
        "env": _environment(spec),
        **({"envFrom": [_plain(one) for one in spec.engine.env_from]} if spec.engine.env_from else {}),
        "ports": [{"name": "http", "containerPort": DATA_PORT}, {"name": "control", "containerPort": CONTROL_PORT}],
        "resources": _resources(spec),
        "startupProbe": {
            **_probe("/readyz", period_s=PROBE_PERIOD_S),
            "failureThreshold": math.ceil((spec.startup.timeout_seconds + STARTUP_MARGIN_S) / PROBE_PERIOD_S),
        },
        "livenessProbe": {**_probe("/healthz", period_s=10), "failureThreshold": 6},
        "readinessProbe": {**_probe("/readyz", period_s=PROBE_PERIOD_S), "failureThreshold": 3},
        "securityContext": container_security(spec.engine.security_context),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [*(one.mount for one in pod_volumes(deployment)), *map(_plain, spec.engine.volume_mounts)],
    }


def container_security(asked: ContainerSecurity) -> Manifest:
    """Return the restricted profile, with the privileges that the spec adds; pod_guard.py refuses those that the operator may not give."""
    added = {"add": list(asked.capabilities.add)} if asked.capabilities.add else {}
    privileged = {"privileged": True, "allowPrivilegeEscalation": True} if asked.privileged else {"allowPrivilegeEscalation": False}
    return {**privileged, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"], **added}}


def _plain(part: msgspec.Struct) -> Manifest:
    """Return a part of the spec as Kubernetes has it, without what nobody set."""
    plain: Manifest = msgspec.json.decode(msgspec.json.encode(part))
    return plain


# The root filesystem is read-only, and libraries insist on writing below a home.
_OWN_ENV: tuple[Manifest, ...] = ({"name": "HOME", "value": "/tmp"}, {"name": "XDG_CACHE_HOME", "value": "/tmp/.cache"})
# With it a worker says whose it is, before it is sent its token. An older container image ignores it.
_POD_UID = {"name": "DIFFUSION_POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}
# Without it a worker whose driver is too old would serve on the CPU. A variable and no option: an older container image, which may be
# pinned, ignores the one and would end at the other.
_ON_A_GPU = {"name": "DIFFUSION_WORKER_DEVICE", "value": "cuda"}
# Bounds of the queue, where they are not the worker's own; variables for the same reason.
_QUEUE_BOUNDS = {
    "DIFFUSION_WORKER_MAX_QUEUED": "max_queued",
    "DIFFUSION_WORKER_MAX_QUEUED_SECONDS": "max_queued_seconds",
    "DIFFUSION_WORKER_MAX_QUEUED_BYTES": "max_queued_bytes",
    "DIFFUSION_WORKER_MAX_CONNECTIONS": "max_connections",
}
_OWN_NAMES = frozenset(one["name"] for one in (*_OWN_ENV, _POD_UID, _ON_A_GPU)) | _QUEUE_BOUNDS.keys()


def _environment(spec: DeploymentSpec) -> list[Manifest]:
    """List the operator's variables and those of the spec, which cannot replace them."""
    has_gpu = bool(spec.resources.claims) or spec.resources.gpu_resource != NO_GPU_RESOURCE
    given = ({"name": one.name, "value": one.value} if one.value_from is None else _plain(one) for one in spec.engine.env)
    given = (one for one in given if one["name"] not in _OWN_NAMES)
    return [*_OWN_ENV, _POD_UID, *([_ON_A_GPU] if has_gpu else []), *_queue_bounds(spec.requests.limits), *given]


def _queue_bounds(limits: RequestLimits) -> list[Manifest]:
    """List variables for the bounds of the queue that are not the default."""
    said = {name: getattr(limits, field) for name, field in _QUEUE_BOUNDS.items()}
    usual = RequestLimits()
    return [{"name": name, "value": str(value)} for name, value in said.items() if value != getattr(usual, _QUEUE_BOUNDS[name])]


def _resources(spec: DeploymentSpec) -> Manifest:
    """Render resources: one GPU a rank, with equal request and limit as extended resources demand. Claims bring devices instead."""
    gpu = spec.resources.gpu_resource
    count = {} if gpu == NO_GPU_RESOURCE else {gpu: str(spec.parallelism.ranks_per_replica)}
    claims = [{"name": one.name} | ({"request": one.request} if one.request is not None else {}) for one in spec.resources.claims]
    parts = {
        "requests": {**_quantities(spec.resources.requests), **count},
        "limits": {**_quantities(spec.resources.limits), **count},
        "claims": claims,
    }
    return {key: value for key, value in parts.items() if value}


def _quantities(given: dict[str, int | str]) -> dict[str, str]:
    return {name: str(value) for name, value in given.items()}


def _probe(path: str, *, period_s: int) -> Manifest:
    # 5 s: on a busy CPU node the server shares its cores with the ranks.
    return {"httpGet": {"path": path, "port": DATA_PORT}, "periodSeconds": period_s, "timeoutSeconds": 5}


def pod_scheduling(deployment: DiffusionDeployment, avoided_nodes: Sequence[str] = ()) -> Manifest:
    """Render the fields that the spec sets. The pod goes to `avoided_nodes` only if no other node can take it."""
    said: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(deployment.spec.scheduling))  # lists, not tuples
    said.pop("topologySpread", None)
    spread = [_spread(one, deployment.metadata.name) for one in deployment.spec.scheduling.topology_spread]
    if avoided_nodes:
        node_affinity = said.setdefault("affinity", {}).setdefault("nodeAffinity", {})
        node_affinity.setdefault("preferredDuringSchedulingIgnoredDuringExecution", []).append(_elsewhere(avoided_nodes))
    return said | ({"topologySpreadConstraints": spread} if spread else {})


def _elsewhere(nodes: Sequence[str]) -> Manifest:
    """Return a preference for nodes other than these, with the highest weight.

    A requirement takes one field value, and a node must meet all.
    """
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in nodes]
    return {"weight": 100, "preference": {"matchFields": fields}}


def _spread(asked: TopologySpread, deployment: str) -> Manifest:
    return {
        "topologyKey": asked.topology_key,
        "whenUnsatisfiable": asked.when_unsatisfiable.value,
        "maxSkew": asked.max_skew,
        "labelSelector": {"matchLabels": {LABEL_DEPLOYMENT: deployment}},
        # A rollout's new pods are spread among themselves: those that are about to go would crowd them together.
        "matchLabelKeys": [LABEL_REVISION],
    }
