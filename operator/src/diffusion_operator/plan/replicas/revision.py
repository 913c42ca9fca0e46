# SPDX-License-Identifier: Apache-2.0
"""The revision of a replica's template: which spec fields a running pod was made from.

A revision is `<hash of the spec's part>-<hash of the image>`. The operator's default container image is taken when the deployment is made
or restarted by annotation, and the status keeps it. So a new default replaces no pods, and an edit that is taken back gives the template of
before. Nor does an operator that knows more fields replace any: what has its default is left out of the hash. Before there is a status, two
operators with different defaults agree by the oldest pod.
"""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.deployment_spec import Lora, host_namespaces
from diffusion_operator.api.meta import Verdict, verdict
from diffusion_operator.api.names import ANNOTATION_RESTARTED_AT
from diffusion_operator.plan.observed.pods import Pod


class Template(msgspec.Struct, frozen=True):
    revision: str
    image: str
    default: str
    """The operator's default container image as it was taken, also where the spec names another."""


def template_of(deployment: DiffusionDeployment, *, default_image: str, pods: Sequence[Pod] = ()) -> Template:
    spec_hash = hash_of(_pod_fields(deployment))
    own, status = deployment.spec.engine.image, deployment.status
    kept = status.default_engine_image if status.default_engine_image_for == restart_of(deployment) else None
    default = kept or (_running_image(pods, spec_hash) if own is None else None) or default_image
    return Template(revision=_revision(spec_hash, own or default), image=own or default, default=default)


def restart_of(deployment: DiffusionDeployment) -> str:
    """Return a hash of the annotation that restarts the replicas: the same as long as it is not changed."""
    return hash_of(deployment.metadata.annotations.get(ANNOTATION_RESTARTED_AT))


def default_image(deployment: DiffusionDeployment, template: Template, newest: str) -> tuple[Verdict, ...]:
    """Return the condition DefaultImage as a tuple of one; none where the spec names an image. `newest` is the operator's default now."""
    if deployment.spec.engine.image is not None:
        return ()
    if template.default == newest:
        return (verdict("DefaultImage", True, "Current", f"{newest} is the operator's default container image"),)
    object_ = f"-n {deployment.metadata.namespace} dd {deployment.metadata.name}"
    command = f'kubectl annotate {object_} {ANNOTATION_RESTARTED_AT}="$(date -u +%FT%TZ)" --overwrite'
    kept = f"the operator's default container image is {newest} now, and this deployment keeps {template.default}"
    return (verdict("DefaultImage", False, "NewerExists", f"{kept}; to take the new one: {command}"),)


def _revision(spec_hash: str, image: str) -> str:
    return f"{spec_hash}-{hash_of(image)}"


def _running_image(pods: Sequence[Pod], spec_hash: str) -> str | None:
    """Return the container image of the oldest pod that has this hash of the spec and is not terminating; None without one.

    Pods whose image was edited later are skipped: their revision label no longer matches it.
    """
    made = [pod for pod in pods if not pod.terminating and pod.revision == _revision(spec_hash, pod.image)]
    return min(made, key=lambda pod: (pod.created_at, pod.name)).image if made else None


def _pod_fields(deployment: DiffusionDeployment) -> dict[str, Any]:
    """Collect the settings whose change replaces pods, for the hash of a revision; defaults and empty values are left out.

    So a field that a later operator knows changes no hash. Settings that a running replica takes over, and those of other objects, are not
    here.
    """
    spec = deployment.spec
    fields = {
        "servedName": deployment.served_name,
        "servedNames": spec.served_names,
        "model": spec.model,
        "engine": spec.engine,
        "parallelism": spec.parallelism,
        "resources": spec.resources,
        "lora": msgspec.structs.replace(spec.lora, drain_timeout_seconds=Lora().drain_timeout_seconds),
        "startup": spec.startup,
        "requests": spec.requests,
        "apiKeySecret": spec.service.api_key_secret,
        "scheduling": spec.scheduling,
        "drain": spec.drain,
        "securityContext": spec.security_context,
        "podMetadata": spec.pod_metadata,
        "serviceAccountName": spec.service_account_name,
        "volumes": spec.volumes,
        "host": [name for name, used in host_namespaces(spec).items() if used],
        "restartedAt": deployment.metadata.annotations.get(ANNOTATION_RESTARTED_AT),
    }
    return {name: said for name, value in fields.items() if (said := _said(value)) not in (None, {}, [])}


def _said(value: Any) -> Any:
    """Reduce a struct to its fields that differ from their defaults; keep other values."""
    if not isinstance(value, msgspec.Struct):
        return [_said(one) for one in value] if isinstance(value, tuple) else value
    return {encoded: _said(found) for name, encoded, default in _fields(type(value)) if (found := getattr(value, name)) != default}


@functools.cache
def _fields(struct: type[msgspec.Struct]) -> tuple[tuple[str, str, Any], ...]:
    """List the fields of a struct as tuples of attribute name, JSON name and default value."""
    return tuple(
        (field.name, field.encode_name, field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default)
        for field in msgspec.structs.fields(struct)
    )


def hash_of(value: object) -> str:
    """Return the first 8 hex digits of the SHA-256 of a value's JSON with sorted keys, the same in every process."""
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:8]
