# SPDX-License-Identifier: Apache-2.0
"""The revision of a replica's template: which spec fields a running pod was made from.

A revision is `<hash of the spec's part>-<hash of the image>`. The first half tells whether the spec still asks for what it asked
when the operator's default image was pinned in the status, so a new default never replaces running pods by itself.
"""

import hashlib

import msgspec

from diffusion_operator.api.deployment import DeploymentSpec, DiffusionDeployment


class Template(msgspec.Struct, frozen=True):
    revision: str
    image: str


def template_of(deployment: DiffusionDeployment, *, default_image: str) -> Template:
    spec_hash = _hash(_pod_fields(deployment.spec, deployment.served_name))
    image = deployment.spec.engine.image or _pinned_image(deployment, spec_hash) or default_image
    return Template(revision=f"{spec_hash}-{_hash(image)}", image=image)


def _pinned_image(deployment: DiffusionDeployment, spec_hash: str) -> str | None:
    pinned_for = (deployment.status.update_revision or "").partition("-")[0]
    return deployment.status.engine_image if pinned_for == spec_hash else None


def _pod_fields(spec: DeploymentSpec, served_name: str) -> object:
    """What a pod is rendered from. Left out is what reaches a running replica: replicas, sleep, service, the drain of adapters."""
    lora = msgspec.structs.replace(spec.lora, drain_timeout_seconds=0)
    return [served_name, spec.model, spec.engine, spec.parallelism, spec.resources, lora, spec.startup]


def _hash(value: object) -> str:
    """Over deterministic JSON: sorted keys, no dependence on the process."""
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:8]
