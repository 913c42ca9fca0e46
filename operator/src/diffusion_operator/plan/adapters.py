# SPDX-License-Identifier: Apache-2.0
"""The adapters of a deployment on its replicas: decisions, records and pushes, and what each LoRAAdapter's status is computed from.

The deployment's reconcile decides and acts, because acceptance, capacity and the mounted file span all adapters; the LoRAAdapter's
reconcile writes the status of its object from the view made here.
"""

from collections.abc import Sequence
from datetime import datetime

import msgspec

from diffusion_operator.api.adapter import InstanceState
from diffusion_operator.api.deployment import AdaptersStatus, GroupState
from diffusion_operator.api.worker_state import AdapterRecord
from diffusion_operator.plan.acceptance import Decision, decide_all
from diffusion_operator.plan.actions import PutAdapter, RemoveAdapter
from diffusion_operator.plan.groups import Group
from diffusion_operator.plan.instances import Instance, instance_of, strays
from diffusion_operator.plan.observed import Observed


class AdapterView(msgspec.Struct, frozen=True):
    """One adapter as its deployment's last pass saw it."""

    deployment_uid: str
    decision: Decision
    instances: tuple[Instance, ...] = ()
    group_states: tuple[GroupState, ...] = ()
    """In the order of instances."""

    def count(self, *states: InstanceState) -> int:
        return sum(instance.status.state in states for instance in self.instances)

    @property
    def report(self) -> AdapterRecord | None:
        """What the first replica that has it says about it."""
        return next((one.record for one in self.instances if one.status.state is InstanceState.LOADED), None)

    @property
    def ready(self) -> bool:
        """Every awake replica has it, and there is one."""
        awake = [
            instance.status.state
            for instance, state in zip(self.instances, self.group_states, strict=True)
            if state in (GroupState.AWAKE, GroupState.VERIFYING)
        ]
        return bool(awake) and all(state is InstanceState.LOADED for state in awake)


class AdapterPlan(msgspec.Struct, frozen=True):
    views: tuple[AdapterView, ...]
    groups: tuple[Group, ...]
    """The same groups, those that are not yet verified as Verifying."""
    pushes: tuple[PutAdapter, ...]
    removals: tuple[RemoveAdapter, ...]

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return tuple(view.decision for view in self.views)

    @property
    def summary(self) -> AdaptersStatus:
        failed = sum(not view.decision.accepted or view.count(InstanceState.FAILED) > 0 for view in self.views)
        desired = sum(view.decision.desired is not None for view in self.views)
        return AdaptersStatus(desired=desired, ready=sum(view.ready for view in self.views), failed=failed)


def plan_adapters(observed: Observed, groups: tuple[Group, ...], now: datetime) -> AdapterPlan:
    decisions = decide_all(observed.deployment, observed.adapters)
    present = tuple(group for group in groups if group.state is not GroupState.TERMINATING)
    table = [tuple(_instances(observed, decision, present, now)) for decision in decisions]
    wanted = frozenset(decision.desired.name for decision in decisions if decision.desired is not None)
    lora = observed.deployment.spec.lora
    removals = {group.index: strays(group, wanted, lora=lora) for group in present}
    verified = {
        group.index: _verified(group, [row[column] for row in table if row], removals=removals[group.index])
        for column, group in enumerate(present)
    }
    states = tuple(verified[group.index].state for group in present)
    return AdapterPlan(
        views=tuple(
            AdapterView(
                deployment_uid=observed.deployment.metadata.uid,
                decision=decision,
                instances=row,
                group_states=states if row else (),
            )
            for decision, row in zip(decisions, table, strict=True)
        ),
        groups=tuple(verified.get(group.index, group) for group in groups),
        pushes=tuple(instance.push for row in table for instance in row if instance.push is not None),
        removals=tuple(removal for one in removals.values() for removal in one),
    )


def _instances(observed: Observed, decision: Decision, groups: Sequence[Group], now: datetime) -> list[Instance]:
    desired = decision.desired
    if desired is None:
        return []
    lora = observed.deployment.spec.lora
    return [instance_of(group, desired, attempts=observed.attempts, lora=lora, now=now) for group in groups]


def _verified(group: Group, instances: Sequence[Instance], *, removals: Sequence[RemoveAdapter]) -> Group:
    """Awake is entered through Verifying: once, for each life of the server and each wake. A new adapter does not lead back."""
    if group.state is not GroupState.AWAKE:
        return group
    before = group.previous
    was_awake = before is not None and before.state is GroupState.AWAKE and before.boot_id == group.boot_id
    if was_awake or (not removals and all(instance.done for instance in instances)):
        return group
    return msgspec.structs.replace(group, state=GroupState.VERIFYING)
