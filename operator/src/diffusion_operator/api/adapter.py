# SPDX-License-Identifier: Apache-2.0
"""LoRAAdapter: spec and status, field for field as crds/loraadapters.yaml has them (a test holds them together)."""

from datetime import datetime
from enum import StrEnum

import msgspec

from diffusion_operator.api.foreign_text import OpenWord
from diffusion_operator.api.meta import Condition, ObjectMeta
from diffusion_operator.api.source import AdapterSource


class _Spec(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    pass


class _Status(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True):
    pass


class DeploymentRef(_Spec, frozen=True):
    name: str


class Component(StrEnum):
    TRANSFORMER = "Transformer"
    UNET = "UNet"
    TEXT_ENCODER = "TextEncoder"
    TEXT_ENCODER_2 = "TextEncoder2"
    TEXT_ENCODER_3 = "TextEncoder3"


class AdapterFormat(StrEnum):
    AUTO = "Auto"
    DIFFUSERS = "Diffusers"
    KOHYA = "Kohya"
    PEFT = "PEFT"


class Residency(OpenWord):
    """Time that an adapter stays in memory: always, while there is room, or from its first request on while there is room.

    A newer worker may report another word, which is kept as text.
    """

    RESIDENT = "Resident"
    CACHED = "Cached"
    ON_DEMAND = "OnDemand"


class AdapterSpec(_Spec, frozen=True):
    deployment_ref: DeploymentRef
    source: AdapterSource
    adapter_name: str | None = None
    digest: str | None = None
    default_scale: str = "1.0"
    components: tuple[Component, ...] = ()
    format: AdapterFormat = AdapterFormat.AUTO
    expected_rank: int | None = None
    residency: Residency = Residency.CACHED
    priority: int = 0
    load_timeout_seconds: int = 300
    suspend: bool = False


class InstanceState(StrEnum):
    """The phase of an adapter on a single replica."""

    PENDING = "Pending"
    FETCHING = "Fetching"
    LOADING = "Loading"
    LOADED = "Loaded"
    CACHED = "Cached"
    DRAINING = "Draining"
    DEFERRED = "Deferred"
    FAILED = "Failed"


class ResolvedStatus(_Status, frozen=True):
    source: str | None = None
    """The source, in the form of `api.source.identity`; another source voids it."""
    revision: str | None = None
    digest: str | None = None
    identity: str | None = None
    """The effect, which worker versions of another converter name otherwise; none from workers that know no identity."""
    size_bytes: int | None = None
    rank: int | None = None
    alpha: str | None = None
    modules: int | None = None
    components: tuple[str, ...] = ()
    format: str | None = None
    base_model_hint: str | None = None
    resolved_at: datetime | None = None


class UsageStatus(_Status, frozen=True):
    requests_total: int | None = None
    last_request_time: datetime | None = None


class OwnerStatus(_Status, frozen=True):
    served_name: str | None = None
    conflict_with: str | None = None


class ErrorStatus(_Status, frozen=True):
    code: str | None = None
    message: str | None = None
    retryable: bool | None = None


class InstanceStatus(_Status, frozen=True):
    replica: int
    state: InstanceState
    pod_uid: str | None = msgspec.field(default=None, name="podUID")
    boot_id: str | None = None
    incarnation: int | None = None
    ranks_loaded: int | None = None
    ranks_total: int | None = None
    digest: str | None = None
    identity: str | None = None
    fetched_bytes: int | None = None
    total_bytes: int | None = None
    attempts: int | None = None
    next_retry_time: datetime | None = None
    last_error: ErrorStatus | None = None


class AdapterStatus(_Status, frozen=True):
    observed_generation: int | None = None
    deployment_uid: str | None = msgspec.field(default=None, name="deploymentUID")
    resolved: ResolvedStatus | None = None
    desired_replicas: int | None = None
    loaded_replicas: int | None = None
    failed_replicas: int | None = None
    deferred_replicas: int | None = None
    owner: OwnerStatus | None = None
    usage: UsageStatus | None = None
    replica_instances: tuple[InstanceStatus, ...] = ()
    conditions: tuple[Condition, ...] = ()


class LoRAAdapter(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    metadata: ObjectMeta
    spec: AdapterSpec
    status: AdapterStatus = AdapterStatus()

    @property
    def served_name(self) -> str:
        """The name by which requests select the adapter: `spec.adapterName`, else the object's own name."""
        return self.spec.adapter_name or self.metadata.name
