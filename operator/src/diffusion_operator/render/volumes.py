# SPDX-License-Identifier: Apache-2.0
"""The volumes of a replica's pod, each with where it is mounted: our own, the cache, the API key, what sources name.

A user's names are no volume names: a Secret may be called as a claim is, or have a dot. So their volumes are numbered.
"""

from collections.abc import Iterator

import msgspec

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.deployment_spec import Cache, DeploymentSpec, ServiceSpec
from diffusion_operator.api.names import (
    API_KEY_DIR,
    CACHE_DIR,
    CLAIMS_DIR,
    CONTROL_DIR,
    DESIRED_DIR,
    SECRETS_DIR,
    control_secret_name,
    desired_config_name,
)
from diffusion_operator.api.source import claim_of, secret_of
from diffusion_operator.render import Manifest

SECRET_MODE = 0o440  # readable through fsGroup alone


class Volume(msgspec.Struct, frozen=True):
    name: str
    path: str
    content: Manifest
    read_only: bool = False

    @property
    def volume(self) -> Manifest:
        return {"name": self.name, **self.content}

    @property
    def mount(self) -> Manifest:
        return {"name": self.name, "mountPath": self.path} | ({"readOnly": True} if self.read_only else {})


def pod_volumes(deployment: DiffusionDeployment) -> list[Volume]:
    spec = deployment.spec
    return [*_own(deployment), _cache(spec.model.cache), *_api_key(spec.service), *_secrets(spec), *_claims(spec)]


def _own(deployment: DiffusionDeployment) -> Iterator[Volume]:
    name, spec = deployment.metadata.name, deployment.spec
    control = {"secret": {"secretName": control_secret_name(name), "defaultMode": SECRET_MODE}}
    yield Volume(name="tmp", path="/tmp", content={"emptyDir": {}})
    yield Volume(name="control", path=CONTROL_DIR, content=control, read_only=True)
    yield Volume(name="desired", path=DESIRED_DIR, content={"configMap": {"name": desired_config_name(name)}}, read_only=True)
    if spec.parallelism.ranks_per_replica > 1:
        memory = {"medium": "Memory", "sizeLimit": str(spec.resources.shared_memory)}
        yield Volume(name="shm", path="/dev/shm", content={"emptyDir": memory})


def _api_key(spec: ServiceSpec) -> Iterator[Volume]:
    """Yield the volume with the API key, if the spec names a Secret for it.

    The volume is not optional. Without the Secret a pod stays pending instead of serving unprotected, and starts once the Secret exists.
    """
    wanted = spec.api_key_secret
    if wanted is not None:
        content = {"secret": {"secretName": wanted.name, "defaultMode": SECRET_MODE, "items": [{"key": wanted.key, "path": wanted.key}]}}
        yield Volume(name="api-key", path=API_KEY_DIR, content=content, read_only=True)


def _cache(cache: Cache) -> Volume:
    if cache.claim is not None:
        return Volume(name="cache", path=CACHE_DIR, content={"persistentVolumeClaim": {"claimName": cache.claim.claim_name}})
    limit = cache.empty_dir.size_limit if cache.empty_dir is not None else None
    return Volume(name="cache", path=CACHE_DIR, content={"emptyDir": {} if limit is None else {"sizeLimit": str(limit)}})


def _secrets(spec: DeploymentSpec) -> Iterator[Volume]:
    """Yield Secrets as optional volumes, so a missing one stops no pod and appears once created."""
    own = secret_of(spec.model.source)
    names = {*spec.lora.mounted_secrets, *([own] if own is not None else [])}
    for index, name in enumerate(sorted(names)):
        content = {"secret": {"secretName": name, "optional": True, "defaultMode": SECRET_MODE}}
        yield Volume(name=f"secret-{index}", path=f"{SECRETS_DIR}/{name}", content=content, read_only=True)


def _claims(spec: DeploymentSpec) -> Iterator[Volume]:
    own = claim_of(spec.model.source)
    names = {*spec.lora.mounted_claims, *([own] if own is not None else [])}
    for index, name in enumerate(sorted(names)):
        content = {"persistentVolumeClaim": {"claimName": name, "readOnly": True}}
        yield Volume(name=f"claim-{index}", path=f"{CLAIMS_DIR}/{name}", content=content, read_only=True)
