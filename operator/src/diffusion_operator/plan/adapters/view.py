# SPDX-License-Identifier: Apache-2.0
"""An adapter as its deployment's last pass saw it, and the marks by which a deployment counts its adapters."""

from collections.abc import Sequence

import msgspec

from diffusion_operator.api.adapter import InstanceState, Residency, UsageStatus
from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.deployment_spec import Lora, OnMissing, SleepPolicy
from diffusion_operator.api.deployment_status import ReplicaState
from diffusion_operator.api.worker_state import AdapterRecord
from diffusion_operator.plan.adapters.acceptance import Decision, overruled
from diffusion_operator.plan.adapters.instances import Instance
from diffusion_operator.plan.adapters.row import Column, Row
from diffusion_operator.plan.adapters.usage import usage_of
from diffusion_operator.plan.observed.states import ADAPTER_SERVING_STATES, RESTING_STATES

CROWDED, REFUSED, BROKEN, EVICTED, WANTED, READY, WAKEABLE, UNANSWERED = (1 << bit for bit in range(8))
"""Marks. CROWDED: there is no room for it. REFUSED: not accepted. BROKEN: failed somewhere. EVICTED: out of memory where requests are
refused. WANTED: to be served. READY: would be served. WAKEABLE: would be after a wake. UNANSWERED: asked for and not begun somewhere.
They are plain numbers, because thousands of them are counted at once."""


class Frame(msgspec.Struct, frozen=True):
    """A deployment, as far as the plan of each adapter depends on it."""

    uid: str
    name: str
    served_names: tuple[str, ...]
    lora: Lora
    suspended: bool
    on_idle: bool


class AdapterView(msgspec.Struct, frozen=True, gc=False):
    """An adapter's state at its deployment's last pass."""

    deployment_uid: str
    decision: Decision
    instances: tuple[Instance, ...] = ()
    group_states: tuple[ReplicaState, ...] = ()
    """In the order of instances."""
    loads_on_request: bool = False
    """A request for it is held while it is loaded, where it is out of memory."""
    suspended: bool = False
    """The deployment is, so there is nothing to load it on."""
    on_idle: bool = False
    """The replicas sleep because nobody needs them, and a request wakes them."""
    usage: UsageStatus | None = None

    def count(self, *states: InstanceState) -> int:
        return sum(instance.status.state in states for instance in self.instances)

    @property
    def report(self) -> AdapterRecord | None:
        """The record of the first replica that has the adapter, in memory or not, and knows its digest; None without one."""
        has = (one for one in self.instances if one.status.state in (InstanceState.LOADED, InstanceState.CACHED))
        return next((one.record for one in has if one.record is not None and one.record.digest is not None), None)

    @property
    def awake(self) -> tuple[Instance, ...]:
        """Instances on replicas that serve: those in the states Awake and Verifying."""
        pairs = zip(self.instances, self.group_states, strict=True)
        return tuple(instance for instance, state in pairs if state in ADAPTER_SERVING_STATES)

    @property
    def ready(self) -> bool:
        """True if the adapter is accepted, at least one replica is awake, and every awake one would serve it."""
        return self.decision.accepted and bool(self.awake) and all(self.serves(instance) for instance in self.awake)

    def serves(self, instance: Instance) -> bool:
        state = instance.status.state
        return state is InstanceState.LOADED or (state is InstanceState.CACHED and self.loads_on_request)

    @property
    def wakeable(self) -> bool:
        """Return whether all replicas sleep until a request comes, and each has found it and will load it before it serves."""
        asleep = self.on_idle and bool(self.instances) and all(state in RESTING_STATES for state in self.group_states)
        return asleep and all(
            one.status.state is InstanceState.DEFERRED and one.push is None and one.record is not None and one.record.error is None
            for one in self.instances
        )

    @property
    def evicted(self) -> tuple[Instance, ...]:
        """Instances out of memory on awake replicas, which answer 503 to a request for the adapter."""
        return tuple(one for one in self.awake if one.status.state is InstanceState.CACHED and not self.loads_on_request)


def frame_of(deployment: DiffusionDeployment) -> Frame:
    spec = deployment.spec
    return Frame(
        uid=deployment.metadata.uid,
        name=deployment.metadata.name,
        served_names=deployment.served_names,
        lora=spec.lora,
        suspended=spec.suspend,
        on_idle=spec.sleep.policy is SleepPolicy.ON_IDLE,
    )


def view_of(frame: Frame, columns: Sequence[Column], row: Row, states: tuple[ReplicaState, ...]) -> AdapterView:
    """Build an adapter's view from its row. Errors on replicas with current settings may overrule its acceptance.

    `states` are those of the columns' replicas after verification.
    """
    current = [error for column, cell in zip(columns, row.cells, strict=True) if column.current for error in cell.errors]
    before = row.adapter.status.usage if row.adapter.status.deployment_uid == frame.uid else None
    on_request = frame.lora.on_missing is OnMissing.LOAD or row.adapter.spec.residency is Residency.ON_DEMAND
    return AdapterView(
        deployment_uid=frame.uid,
        decision=overruled(row.decision, current),
        instances=row.instances,
        group_states=tuple(state for state, cell in zip(states, row.cells, strict=True) for _ in cell.instances),
        loads_on_request=on_request,
        suspended=frame.suspended,
        on_idle=frame.on_idle,
        usage=usage_of([cell.use for cell in row.cells], before=before) if row.desired is not None else before,
    )


def marks_of(view: AdapterView) -> int:
    wanted, accepted = view.decision.desired is not None, view.decision.accepted
    return (
        (CROWDED if view.decision.reason == "CapacityExceeded" else 0)
        | (0 if accepted else REFUSED)
        | (BROKEN if view.count(InstanceState.FAILED) else 0)
        | (EVICTED if view.evicted else 0)
        | (WANTED if wanted else 0)
        | (READY if view.ready else 0)
        | (WAKEABLE if view.wakeable else 0)
        | (UNANSWERED if view.count(InstanceState.LOADING, InstanceState.PENDING) else 0)
    )
