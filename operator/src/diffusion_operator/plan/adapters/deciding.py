# SPDX-License-Identifier: Apache-2.0
"""Decisions on all adapters of a deployment, in the order of precedence: the older ones take names and places from the others."""

from collections.abc import Mapping, Sequence

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.deployment_status import ReplicaState
from diffusion_operator.api.worker_state import AdapterRecord
from diffusion_operator.plan.adapters.acceptance import Claim, decide
from diffusion_operator.plan.adapters.roster import Roster
from diffusion_operator.plan.adapters.row import Decided, Row, Table
from diffusion_operator.plan.adapters.slices import SLICE, Slices
from diffusion_operator.plan.observed.replica_state import Group


def decide_all(
    deployment: DiffusionDeployment, roster: Roster, touched: frozenset[str], table: Table, *, before: Mapping[str, Row]
) -> Slices[dict[str, Decided]]:
    """Decide on the `touched` UIDs, and on Resident adapters that get or lose their place by it.

    Returns only these decisions, by UID. `before` has the rows of the pass before.
    """
    decided: dict[str, Decided] = {}
    slots, residents = deployment.spec.lora.slots, 0
    for uid in roster.in_order({*touched, *roster.residents}):
        adapter, resident, known = roster.adapters[uid], uid in roster.residents, before.get(uid)
        claim = Claim(owner=roster.owner(uid), full=resident and residents >= slots)
        if known is None or uid in touched or claim != known.claim:
            held = _held(table.groups, table.records(adapter.served_name))
            decided[uid] = Decided(claim=claim, accepted=decide(deployment, adapter, claim, held=held))
            if len(decided) % SLICE == 0:
                yield
        accepted = decided[uid].accepted if uid in decided or known is None else known.accepted
        residents += resident and accepted.desired is not None
    return decided


def asks_another(decided: Mapping[str, Decided], before: Mapping[str, Row]) -> bool:
    """Return whether a decided adapter had no row before, or replicas are to have another content or settings of it than before."""
    return any((known := before.get(uid)) is None or known.accepted.desired != one.accepted.desired for uid, one in decided.items())


def _held(groups: Sequence[Group], records: Sequence[Sequence[AdapterRecord]]) -> list[AdapterRecord]:
    """Return the records of awake replicas."""
    return [one for group, there in zip(groups, records, strict=True) if group.state is ReplicaState.AWAKE for one in there]
