# SPDX-License-Identifier: Apache-2.0
"""Actions of a plan. Each action is idempotent by name, UID, boot id or operation id, so doing it twice does nothing twice."""

import msgspec

from diffusion_operator.api.adapter_load import AdapterLoad
from diffusion_operator.api.deployment_spec import DrainMode, SleepLevel, SleepPolicy
from diffusion_operator.plan.observed.observed import AttemptKey


class CreatePod(msgspec.Struct, frozen=True):
    index: int
    incarnation: int
    avoided_nodes: tuple[str, ...] = ()
    """Name those where the pod goes only if no other node can take it."""


class CreateCheckPod(msgspec.Struct, frozen=True):
    nodes: tuple[str, ...]
    """Nodes of the replicas that would go: it goes there if it can, and leaves them the container image."""


class AdoptPod(msgspec.Struct, frozen=True):
    """Become the controller of a pod that an earlier object of the deployment's name left behind."""

    name: str
    uid: str
    index: int


class DeletePod(msgspec.Struct, frozen=True):
    name: str
    uid: str
    why: str
    orphan: bool = False
    """An earlier object of the deployment's name left it behind, so an Event reports its end."""


class SetRoutable(msgspec.Struct, frozen=True):
    name: str
    uid: str
    routable: bool
    why: str = ""
    """The reason for which the pod is to go. Empty for one that stays."""


class WorkerAddress(msgspec.Struct, frozen=True, gc=False):
    """Target of a control call: a pod's IP, and the UID and boot id that the process there must have.

    So no call affects a later process at the same IP.
    """

    pod_uid: str
    ip: str
    boot_id: str


class SleepWorker(msgspec.Struct, frozen=True):
    worker: WorkerAddress
    operation_id: str
    attempt: int
    mode: DrainMode
    deadline_s: int
    level: SleepLevel
    policy: SleepPolicy
    if_idle_since_s: int | None = None
    """The worker refuses it if a request came or ran within so many seconds, by its own clock."""


class WakeWorker(msgspec.Struct, frozen=True):
    worker: WorkerAddress
    operation_id: str
    attempt: int
    deadline_s: int
    policy: SleepPolicy


class DrainWorker(msgspec.Struct, frozen=True):
    """A call that drains a worker before its pod is deleted.

    Once the worker has taken it, the replica serves no new request any more.
    """

    worker: WorkerAddress
    operation_id: str
    deadline_s: int


class PutAdapter(msgspec.Struct, frozen=True, gc=False):
    worker: WorkerAddress
    key: AttemptKey
    operation_id: str
    name: str
    load: AdapterLoad
    deadline_s: int


class RemoveAdapter(msgspec.Struct, frozen=True):
    worker: WorkerAddress
    operation_id: str
    name: str
    drain_s: int


PodAction = CreatePod | CreateCheckPod | AdoptPod | DeletePod | SetRoutable
WorkerAction = SleepWorker | WakeWorker | DrainWorker | PutAdapter | RemoveAdapter
