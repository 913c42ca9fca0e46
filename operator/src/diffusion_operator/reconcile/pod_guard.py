# SPDX-License-Identifier: Apache-2.0
"""A guard of pods before they are made: none gets the operator's key or account, nor access to its node unless that is allowed.

The API server would make such pods by the operator's rights, though the user who wrote the spec may have none to make a pod.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from diffusion_operator.errors import ClusterRefused
from diffusion_operator.render import Manifest
from diffusion_operator.settings import Settings

HOST_NAMESPACES = ("hostNetwork", "hostIPC", "hostPID")
INVALID = 422


def guard(settings: Settings, pod: Manifest) -> None:
    """Raise ClusterRefused for a pod with the operator's key or account, or with access to its node that nobody allowed."""
    spec = pod["spec"]
    if settings.operator_pods is not None and pod["metadata"]["namespace"] == settings.operator_pods.namespace:
        _guard_own(settings, spec)
    wanted = [] if settings.allow_host_access else list(_host_access(spec))
    if wanted:
        raise ClusterRefused(
            f"{', '.join(wanted)} would give the pod access to its node, and the operator was started without "
            "--allow-host-access. Remove it from the spec, or set workers.allowHostAccess of the chart",
            status=INVALID,
        )


def _guard_own(settings: Settings, spec: Mapping[str, Any]) -> None:
    """Raise ClusterRefused for a pod with the operator's key or account. Call it for pods of the operator's own namespace."""
    if settings.operator_key_secret and settings.operator_key_secret in _secrets(spec):
        raise ClusterRefused(
            f"the Secret {settings.operator_key_secret} is the operator's own key, and no worker may have it: name another Secret in "
            "model.source, lora.secrets, service.apiKeySecret, volumes or engine.env",
            status=INVALID,
        )
    if settings.operator_service_account and spec.get("serviceAccountName") == settings.operator_service_account:
        raise ClusterRefused(
            f"the ServiceAccount {settings.operator_service_account} is the operator's own, and no worker may have it: name another one in "
            "serviceAccountName",
            status=INVALID,
        )


def _secrets(spec: Mapping[str, Any]) -> Iterator[str]:
    """Name every Secret whose content the pod would have."""
    for volume in spec["volumes"]:
        yield volume.get("secret", {}).get("secretName", "")
    for container in spec["containers"]:
        yield from (one.get("valueFrom", {}).get("secretKeyRef", {}).get("name", "") for one in container.get("env", ()))
        yield from (one.get("secretRef", {}).get("name", "") for one in container.get("envFrom", ()))


def _host_access(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings by which a pod asks for more than the restricted profile gives: host namespaces and paths, privileges."""
    yield from (name for name in HOST_NAMESPACES if spec.get(name))
    yield from (f"the hostPath of volume {volume['name']}" for volume in spec["volumes"] if "hostPath" in volume)
    for container in spec["containers"]:
        security = container["securityContext"]
        if security.get("privileged"):
            yield "engine.securityContext.privileged"
        if security["capabilities"].get("add"):
            yield "engine.securityContext.capabilities.add"
