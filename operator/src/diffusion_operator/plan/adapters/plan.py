# SPDX-License-Identifier: Apache-2.0
"""The adapters of a deployment on its replicas: decisions, records and pushes, and what each LoRAAdapter's status is computed from.

The deployment's reconcile decides and acts, because acceptance, capacity and the mounted file span all adapters; the LoRAAdapter's
reconcile writes the status of its object from the view made here.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime

import msgspec

from diffusion_operator.api.adapter import InstanceState, Residency, UsageStatus
from diffusion_operator.api.deployment_spec import Lora, OnMissing, SleepPolicy
from diffusion_operator.api.deployment_status import AdaptersStatus, ReplicaState
from diffusion_operator.api.worker_state import AdapterRecord, WireError
from diffusion_operator.plan.adapters.acceptance import Decision, DesiredAdapter, Holders, decide_all, overruled
from diffusion_operator.plan.adapters.instances import Instance, instance_of, leaving_instances, undeclared_removals
from diffusion_operator.plan.adapters.load_attempts import learn
from diffusion_operator.plan.adapters.refilling import refills
from diffusion_operator.plan.adapters.usage import usage_of
from diffusion_operator.plan.observed.observed import Attempt, AttemptKey, Observed
from diffusion_operator.plan.observed.replica_state import Group
from diffusion_operator.plan.observed.states import ADAPTER_CALL_STATES, ADAPTER_SERVING_STATES, RESTING_STATES
from diffusion_operator.plan.results.actions import PutAdapter, RemoveAdapter


class AdapterView(msgspec.Struct, frozen=True):
    """One adapter as its deployment's last pass saw it."""

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
        """What the first replica that has it says about it, in memory or not."""
        has = (one for one in self.instances if one.status.state in (InstanceState.LOADED, InstanceState.CACHED))
        return next((one.record for one in has if one.record is not None and one.record.digest is not None), None)

    @property
    def awake(self) -> tuple[Instance, ...]:
        """On replicas that serve."""
        pairs = zip(self.instances, self.group_states, strict=True)
        return tuple(instance for instance, state in pairs if state in ADAPTER_SERVING_STATES)

    @property
    def ready(self) -> bool:
        """Every awake replica would serve it, and there is one."""
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
        """Out of memory on replicas that answer 503 to a request for it."""
        return tuple(one for one in self.awake if one.status.state is InstanceState.CACHED and not self.loads_on_request)


class AdapterPlan(msgspec.Struct, frozen=True):
    views: tuple[AdapterView, ...]
    groups: tuple[Group, ...]
    """The same groups, those that are not yet verified as Verifying."""
    pushes: tuple[PutAdapter, ...]
    removals: tuple[RemoveAdapter, ...]
    attempts: Mapping[AttemptKey, Attempt] = {}
    """With what the replicas say now."""

    @property
    def calls(self) -> tuple[PutAdapter | RemoveAdapter, ...]:
        """What goes first makes room."""
        return (*self.removals, *self.pushes)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return tuple(view.decision for view in self.views)

    @property
    def summary(self) -> AdaptersStatus:
        failed = sum(not view.decision.accepted or view.count(InstanceState.FAILED) > 0 for view in self.views)
        desired = sum(view.decision.desired is not None for view in self.views)
        return AdaptersStatus(desired=desired, ready=sum(view.ready for view in self.views), failed=failed)


def plan_adapters(observed: Observed, groups: tuple[Group, ...], now: datetime, *, revision: str) -> AdapterPlan:
    present = tuple(group for group in groups if group.state is not ReplicaState.TERMINATING)
    decisions = decide_all(observed.deployment, observed.adapters, holders=_holders(present))
    desired = [decision.desired for decision in decisions if decision.desired is not None]
    attempts = _attempts(observed, desired, present, now)
    table = [_instances(decision, present, attempts, now) for decision in decisions]
    wanted = frozenset(one.name for one in desired)
    lora = observed.deployment.spec.lora
    removals = {group.index: undeclared_removals(group, wanted, lora=lora) for group in present}
    rows = [row for decision, row in zip(decisions, table, strict=True) if decision.desired is not None]
    verified = {
        group.index: _verified(group, [row[column] for row in rows], removals=removals[group.index]) for column, group in enumerate(present)
    }
    states = {index: group.state for index, group in verified.items()}
    # Others are about to go, and have settings that the spec has no more.
    current = tuple(group for group in present if group.pod.revision == revision)
    pushes = tuple(instance.push for row in rows for instance in row if instance.push is not None)
    return AdapterPlan(
        views=tuple(
            _view(observed, overruled(decision, _errors(row, current)), row, states, usage=_usage(observed, decision, present, now))
            for decision, row in zip(decisions, table, strict=True)
        ),
        groups=tuple(verified.get(group.index, group) for group in groups),
        pushes=(*pushes, *refills(desired, current, lora=lora, pushes=pushes, attempts=attempts, now=now)),
        removals=tuple(removal for one in removals.values() for removal in one),
        attempts=attempts,
    )


def _view(
    observed: Observed,
    decision: Decision,
    row: tuple[Instance, ...],
    states: Mapping[int, ReplicaState],
    *,
    usage: UsageStatus | None,
) -> AdapterView:
    return AdapterView(
        deployment_uid=observed.deployment.metadata.uid,
        decision=decision,
        instances=row,
        group_states=tuple(states[instance.status.replica] for instance in row),
        loads_on_request=_loads_on_request(decision, observed.deployment.spec.lora),
        suspended=observed.deployment.spec.suspend,
        on_idle=observed.deployment.spec.sleep.policy is SleepPolicy.ON_IDLE,
        usage=usage,
    )


def _errors(row: Sequence[Instance], groups: Sequence[Group]) -> list[WireError]:
    indices = {group.index for group in groups}
    return [one.error for one in row if one.error is not None and one.status.replica in indices]


def _usage(observed: Observed, decision: Decision, groups: Sequence[Group], now: datetime) -> UsageStatus | None:
    """What was counted under a name that this adapter has not is another's."""
    status = decision.adapter.status
    before = status.usage if status.deployment_uid == observed.deployment.metadata.uid else None
    return usage_of(decision.adapter.served_name, groups, before=before, now=now) if decision.desired is not None else before


def _loads_on_request(decision: Decision, lora: Lora) -> bool:
    return lora.on_missing is OnMissing.LOAD or decision.adapter.spec.residency is Residency.ON_DEMAND


def _holders(groups: Sequence[Group]) -> Holders:
    holders: dict[str, list[AdapterRecord]] = defaultdict(list)
    for group in groups:
        if group.state is ReplicaState.AWAKE and group.document is not None:
            for record in group.document.adapters:
                holders[record.name].append(record)
    return holders


def _attempts(observed: Observed, desired: Sequence[DesiredAdapter], groups: Sequence[Group], now: datetime) -> dict[AttemptKey, Attempt]:
    """A document that could not be refreshed says nothing new."""
    answering = tuple(group for group in groups if group.state in ADAPTER_CALL_STATES and group.poll.fresh)
    learned = dict(observed.attempts)
    for one in desired:
        learned |= learn(observed.attempts, answering, one, now=now)
    return learned


def _instances(
    decision: Decision, groups: tuple[Group, ...], attempts: Mapping[AttemptKey, Attempt], now: datetime
) -> tuple[Instance, ...]:
    if decision.desired is not None:
        return tuple(instance_of(group, decision.desired, attempts=attempts, now=now) for group in groups)
    return leaving_instances(groups, decision.adapter.served_name) if decision.accepted else ()


def _verified(group: Group, instances: Sequence[Instance], *, removals: Sequence[RemoveAdapter]) -> Group:
    """Awake is entered through Verifying: once, for each life of the server and each wake. A new adapter does not lead back."""
    if group.state is not ReplicaState.AWAKE:
        return group
    before = group.previous
    was_awake = before is not None and before.state is ReplicaState.AWAKE and before.boot_id == group.boot_id
    if was_awake or (not removals and all(instance.done for instance in instances)):
        return group
    return msgspec.structs.replace(group, state=ReplicaState.VERIFYING)
