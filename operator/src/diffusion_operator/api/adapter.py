# SPDX-License-Identifier: Apache-2.0
"""LoRAAdapter: spec and status, field for field as crds/loraadapters.yaml has them (a test holds them together)."""

from datetime import datetime
from enum import StrEnum

import msgspec

from diffusion_operator.api.deployment import Source
from diffusion_operator.api.meta import Condition, ObjectMeta


class _Spec(msgspec.Struct, frozen=True, rename="camel"):
    pass


class _Status(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    pass


class DeploymentRef(_Spec, frozen=True):
    name: str


class AdapterSpec(_Spec, frozen=True):
    deployment_ref: DeploymentRef
    source: Source
    adapter_name: str | None = None
    digest: str | None = None
    default_scale: str = "1.0"
    suspend: bool = False


class InstanceState(StrEnum):
    """An adapter on one replica."""

    PENDING = "Pending"
    LOADING = "Loading"
    LOADED = "Loaded"
    DEFERRED = "Deferred"
    FAILED = "Failed"


class ResolvedStatus(_Status, frozen=True):
    path: str | None = None
    digest: str | None = None
    size_bytes: int | None = None
    rank: int | None = None
    modules: int | None = None
    resolved_at: datetime | None = None


class OwnerStatus(_Status, frozen=True):
    served_name: str | None = None
    conflict_with: str | None = None


class ErrorStatus(_Status, frozen=True):
    code: str | None = None
    message: str | None = None
    retryable: bool | None = None


class InstanceStatus(_Status, frozen=True):
    group: int
    state: InstanceState
    pod_uid: str | None = msgspec.field(default=None, name="podUID")
    boot_id: str | None = None
    incarnation: int | None = None
    ranks_loaded: int | None = None
    ranks_total: int | None = None
    digest: str | None = None
    attempts: int | None = None
    next_retry_time: datetime | None = None
    last_error: ErrorStatus | None = None


class AdapterStatus(_Status, frozen=True):
    observed_generation: int | None = None
    deployment_uid: str | None = msgspec.field(default=None, name="deploymentUID")
    resolved: ResolvedStatus | None = None
    desired_groups: int | None = None
    loaded_groups: int | None = None
    failed_groups: int | None = None
    deferred_groups: int | None = None
    owner: OwnerStatus | None = None
    instances: tuple[InstanceStatus, ...] = ()
    conditions: tuple[Condition, ...] = ()


class LoRAAdapter(msgspec.Struct, frozen=True, rename="camel"):
    metadata: ObjectMeta
    spec: AdapterSpec
    status: AdapterStatus = AdapterStatus()

    @property
    def served_name(self) -> str:
        """The name requests use."""
        return self.spec.adapter_name or self.metadata.name
