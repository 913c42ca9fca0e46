# SPDX-License-Identifier: Apache-2.0
"""The status of a DiffusionDeployment, field for field as the schema has it. All fields are optional and left out when None, so that a
server-side apply removes what is no longer known."""

from datetime import datetime
from enum import StrEnum

import msgspec

from diffusion_operator.api.deployment_spec import SleepLevel
from diffusion_operator.api.meta import Condition


class _Status(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    pass


class ReplicaState(StrEnum):
    """The state of a replica; plan/observed/replica_state.py says what leads to each."""

    PENDING = "Pending"
    STARTING = "Starting"
    VERIFYING = "Verifying"
    AWAKE = "Awake"
    DRAINING = "Draining"
    SLEEPING = "Sleeping"
    ASLEEP = "Asleep"
    WAKING = "Waking"
    FAILED = "Failed"
    TERMINATING = "Terminating"


class LoadStatus(_Status, frozen=True):
    stage: str | None = None
    bytes_done: int | None = None
    bytes_total: int | None = None
    percent: int | None = None
    started_at: datetime | None = None


class FailureStatus(_Status, frozen=True):
    code: str | None = None
    message: str | None = None
    time: datetime | None = None
    exit_code: int | None = None


class OperationStatus(_Status, frozen=True):
    """The sleep or wake that a replica ended last. `bytes` were given back by a sleep, or are in memory again after a wake."""

    id: str | None = None
    kind: str | None = None
    level: SleepLevel | None = None
    seconds: str | None = None
    bytes: int | None = None
    code: str | None = None
    message: str | None = None


class ReplicaStatus(_Status, frozen=True):
    index: int
    state: ReplicaState
    incarnation: int | None = None
    boot_id: str | None = None
    leader_pod: str | None = None
    node: str | None = None
    revision: str | None = None
    message: str | None = None
    restarts: int | None = None
    failures: int | None = None
    failing_since: datetime | None = None
    next_restart_time: datetime | None = None
    load: LoadStatus | None = None
    last_failure: FailureStatus | None = None
    generation: int | None = None
    last_rank_loss: str | None = None
    last_operation: OperationStatus | None = None


class AvoidedNode(_Status, frozen=True):
    """A node that ended or refused pods by a fault of its own. New pods prefer other nodes until `until`."""

    name: str
    faults: int
    until: datetime


class ModelStatus(_Status, frozen=True):
    source: str | None = None
    revision: str | None = None
    resolved_at: datetime | None = None
    pinned_for: str | None = None
    digest: str | None = None
    size_bytes: int | None = None
    pipeline: str | None = None


class RolloutStatus(_Status, frozen=True):
    """Progress of replacing replicas after a change of the template, from its start until all serve with the new one.

    `served` is the most replicas so far that served with the new template, `remaining` the fewest so far that had another.
    `progress_time` is when one of them last improved, or `paused` fell.
    """

    revision: str
    served: int
    remaining: int
    progress_time: datetime
    paused: int = 0
    """Pods for which the progress deadline does not run: they end, or wait for quota."""


class EndpointsStatus(_Status, frozen=True):
    url: str | None = None


class HeldStatus(_Status, frozen=True):
    """Requests that wait for a replica to be awake."""

    current: int | None = None
    oldest_seconds: int | None = None


class AdaptersStatus(_Status, frozen=True):
    desired: int | None = None
    ready: int | None = None
    failed: int | None = None


class DeploymentStatus(_Status, frozen=True):
    observed_generation: int | None = None
    served_name: str | None = None
    engine_image: str | None = None
    default_engine_image: str | None = None
    default_engine_image_for: str | None = None
    replicas: int | None = None
    updated_replicas: int | None = None
    ready_replicas: int | None = None
    available_replicas: int | None = None
    awake_replicas: int | None = None
    asleep_replicas: int | None = None
    failed_replicas: int | None = None
    selector: str | None = None
    current_revision: str | None = None
    update_revision: str | None = None
    rollout: RolloutStatus | None = None
    model: ModelStatus | None = None
    endpoints: EndpointsStatus | None = None
    adapters: AdaptersStatus | None = None
    held: HeldStatus | None = None
    last_request_time: datetime | None = None
    sleep_eligible_time: datetime | None = None
    avoided_nodes: tuple[AvoidedNode, ...] = ()
    replica_states_truncated: bool | None = None
    replica_states: tuple[ReplicaStatus, ...] = ()
    conditions: tuple[Condition, ...] = ()
