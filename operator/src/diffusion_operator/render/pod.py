# SPDX-License-Identifier: Apache-2.0
"""The pod of one replica: one container, the worker, under the restricted Pod Security profile."""

import math
from typing import Any

import msgspec

from diffusion_operator.api.deployment import Cache, DeploymentSpec, DiffusionDeployment, Lora
from diffusion_operator.api.names import (
    CACHE_DIR,
    CLAIMS_DIR,
    CONTAINER,
    CONTROL_DIR,
    CONTROL_PORT,
    DATA_PORT,
    DEFAULT_GPU_RESOURCE,
    DESIRED_DIR,
    DESIRED_KEY,
    LABEL_GROUP_INDEX,
    LABEL_INCARNATION,
    LABEL_REVISION,
    NO_GPU_RESOURCE,
    SECRETS_DIR,
    STATE_DIR,
    TOKEN_KEY,
    pod_name,
)
from diffusion_operator.api.source import ModelSource
from diffusion_operator.plan.revision import Template
from diffusion_operator.render import Manifest
from diffusion_operator.render.metadata import child_metadata
from diffusion_operator.render.quantity import quantity_bytes
from diffusion_operator.render.volumes import pod_volumes

WORKER_UID = 65532
TERMINATION_GRACE_S = 60  # a drain finishes running pictures; more than that is cut off, as a node's shutdown would
STOP_MARGIN_S = 15  # from the end of a worker's drain to the end of its ranks
PROBE_PERIOD_S = 2
STARTUP_MARGIN_S = 30  # the worker gives up by itself first, with a reason; the kubelet only if it hangs


def pod(deployment: DiffusionDeployment, template: Template, *, index: int, incarnation: int) -> Manifest:
    labels = {LABEL_GROUP_INDEX: str(index), LABEL_INCARNATION: str(incarnation), LABEL_REVISION: template.revision}
    name = pod_name(deployment.metadata.name, index, incarnation)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": child_metadata(deployment, name, **labels),
        "spec": {
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": TERMINATION_GRACE_S,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": WORKER_UID,
                "runAsGroup": WORKER_UID,
                "fsGroup": WORKER_UID,
                "fsGroupChangePolicy": "OnRootMismatch",  # or each start walks through a cache of many models
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [_container(deployment, template)],
            "volumes": [one.volume for one in pod_volumes(deployment)],
        },
    }


def _container(deployment: DiffusionDeployment, template: Template) -> Manifest:
    spec = deployment.spec
    return {
        "name": CONTAINER,
        "image": template.image,
        "imagePullPolicy": spec.engine.pull_policy.value,
        "args": [one.replace("$(", "$$(") for one in worker_arguments(deployment)],  # the kubelet would expand it
        "env": [*_OWN_ENV, *({"name": one.name, "value": one.value} for one in spec.engine.env if one.name not in _OWN_NAMES)],
        "ports": [{"name": "http", "containerPort": DATA_PORT}, {"name": "control", "containerPort": CONTROL_PORT}],
        "resources": _resources(spec),
        "startupProbe": {
            **_probe("/readyz", period_s=PROBE_PERIOD_S),
            "failureThreshold": math.ceil((spec.startup.timeout_seconds + STARTUP_MARGIN_S) / PROBE_PERIOD_S),
        },
        "livenessProbe": {**_probe("/healthz", period_s=10), "failureThreshold": 6},
        "readinessProbe": {**_probe("/readyz", period_s=PROBE_PERIOD_S), "failureThreshold": 3},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [one.mount for one in pod_volumes(deployment)],
    }


# The root filesystem is read-only, and libraries insist on writing below a home.
_OWN_ENV: tuple[dict[str, str], ...] = ({"name": "HOME", "value": "/tmp"}, {"name": "XDG_CACHE_HOME", "value": "/tmp/.cache"})
_OWN_NAMES = frozenset(one["name"] for one in _OWN_ENV)


def worker_arguments(deployment: DiffusionDeployment) -> list[str]:
    spec = deployment.spec
    options: dict[str, Any] = {
        "model": _model(spec.model.source),
        "served-name": deployment.served_name,
        "dtype": spec.model.dtype.value.lower(),
        "ranks": spec.parallelism.ranks_per_replica,
        "host": "0.0.0.0",
        "port": DATA_PORT,
        "control-port": CONTROL_PORT,
        "control-token-file": f"{CONTROL_DIR}/{TOKEN_KEY}",
        "desired": f"{DESIRED_DIR}/{DESIRED_KEY}",
        "max-batch-size": spec.engine.max_batch_size,
        **_lora_options(spec.lora),
        "cache-dir": CACHE_DIR,
        **_cache_limit(spec.model.cache),
        "secrets-dir": SECRETS_DIR,
        "claims-dir": CLAIMS_DIR,
        "state-dir": STATE_DIR,
        "startup-timeout-seconds": spec.startup.timeout_seconds,
        "drain-timeout-seconds": TERMINATION_GRACE_S - STOP_MARGIN_S,
    }
    targets = (f"--lora-target-module={name}" for name in spec.lora.target_modules)
    return ["serve", *(f"--{name}={value}" for name, value in options.items()), *targets]


def _model(source: ModelSource) -> str:
    """A folder, or what a worker fetches it from; its JSON has no Secret, only the names of some."""
    return source.path if source.path is not None else msgspec.json.encode(source).decode()


def _cache_limit(cache: Cache) -> dict[str, int]:
    """The worker evicts from its cache before the kubelet would evict the pod; the tenth is for what is being fetched."""
    limit = cache.empty_dir.size_limit if cache.empty_dir is not None else None
    return {} if limit is None else {"cache-size-bytes": max(1, quantity_bytes(limit) * 9 // 10)}


def _lora_options(lora: Lora) -> dict[str, Any]:
    return {
        "max-loras": lora.slots,
        "max-cached-loras": lora.cached,
        "max-lora-rank": lora.max_rank,
        "max-loras-per-request": lora.per_request,
        "lora-on-missing": lora.on_missing.value.lower(),
        "lora-load-timeout-seconds": lora.load_timeout_seconds,
    }


def _resources(spec: DeploymentSpec) -> Manifest:
    """The number of GPUs is the number of ranks; an extended resource's request and limit must be equal."""
    gpu = spec.resources.gpu_resource_name or DEFAULT_GPU_RESOURCE
    count = {} if gpu == NO_GPU_RESOURCE else {gpu: str(spec.parallelism.ranks_per_replica)}
    requests = {**_quantities(spec.resources.requests), **count}
    limits = {**_quantities(spec.resources.limits), **count}
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def _quantities(given: dict[str, int | str]) -> dict[str, str]:
    return {name: str(value) for name, value in given.items()}


def _probe(path: str, *, period_s: int) -> Manifest:
    # 5 s: on a busy CPU node the server shares its cores with the ranks.
    return {"httpGet": {"path": path, "port": DATA_PORT}, "periodSeconds": period_s, "timeoutSeconds": 5}
