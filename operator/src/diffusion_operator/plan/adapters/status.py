# SPDX-License-Identifier: Apache-2.0
"""The status of a LoRAAdapter, from the view its deployment's last pass made; without one, from the fact that there is none."""

from datetime import datetime

import msgspec

from diffusion_operator.api.adapter import AdapterStatus, InstanceState, LoRAAdapter, OwnerStatus, ResolvedStatus
from diffusion_operator.api.adapter_load import components_of, format_of
from diffusion_operator.api.foreign_text import plain_text
from diffusion_operator.api.meta import settle_conditions
from diffusion_operator.plan.adapters.acceptance import declared, pinned
from diffusion_operator.plan.adapters.conditions import adapter_verdicts, without_deployment
from diffusion_operator.plan.adapters.records import converter_of
from diffusion_operator.plan.adapters.view import AdapterView

INSTANCES_SHOWN = 64


def adapter_status(adapter: LoRAAdapter, view: AdapterView | None, *, now: datetime) -> AdapterStatus:
    """Compute an adapter's status. `view` None means that its deployment is missing: nothing is loaded or pinned any more."""
    resolved = _resolved(adapter, view, now) if view else None
    verdicts = adapter_verdicts(adapter, view, resolved) if view else without_deployment(adapter)
    desired = view is not None and view.decision.desired is not None
    return AdapterStatus(
        observed_generation=adapter.metadata.generation,
        deployment_uid=view.deployment_uid if view else None,
        resolved=resolved or _earlier(adapter, view),
        desired_replicas=len(view.instances) if view and desired else 0,
        loaded_replicas=view.count(InstanceState.LOADED) if view else 0,
        failed_replicas=view.count(InstanceState.FAILED) if view else 0,
        deferred_replicas=view.count(InstanceState.DEFERRED) if view else 0,
        owner=OwnerStatus(served_name=adapter.served_name, conflict_with=view.decision.conflict_with if view else None),
        usage=view.usage if view else None,
        replica_instances=tuple(instance.status for instance in view.instances[:INSTANCES_SHOWN]) if view else (),
        conditions=settle_conditions(verdicts, previous=adapter.status.conditions, generation=adapter.metadata.generation, now=now),
    )


def _earlier(adapter: LoRAAdapter, view: AdapterView | None) -> ResolvedStatus | None:
    """Return the pin that the status has, for the time until the current source is resolved.

    None without a deployment, or if the status is of another one.
    """
    return adapter.status.resolved if view is not None and adapter.status.deployment_uid == view.deployment_uid else None


def _resolved(adapter: LoRAAdapter, view: AdapterView, now: datetime) -> ResolvedStatus | None:
    """Return the pin while the source and the deployment stay the same, otherwise the first replica's report; None without one.

    Only the identity of a kept pin may change.
    """
    kept, report = pinned(view.deployment_uid, adapter), view.report
    if kept is not None:
        return msgspec.structs.replace(kept, identity=_identity(kept, view))
    if report is None:
        return None
    return ResolvedStatus(
        source=declared(adapter),
        revision=report.revision[:128] if report.revision else None,
        digest=report.digest,
        identity=report.identity,
        size_bytes=report.size_bytes,
        rank=report.rank,
        alpha=None if report.alpha is None else f"{report.alpha:g}",
        modules=report.modules,
        components=tuple(plain_text(name, 64) for name in components_of(report.components))[:8],
        format=format_of(report.format),
        base_model_hint=report.base_model[:256] if report.base_model else None,
        resolved_at=now,
    )


def _identity(kept: ResolvedStatus, view: AdapterView) -> str | None:
    """Return the identity to pin: kept while a replica has that converter, else what the first replica with the pinned weights reports.

    The pinned one stays too while no replica with these weights reports any. None without either.
    """
    records = (one.record for one in view.instances if one.record is not None and one.record.digest == kept.digest)
    found = [record.identity for record in records if record.identity is not None]
    if kept.identity is not None and (not found or converter_of(kept.identity) in map(converter_of, found)):
        return kept.identity
    return found[0] if found else None
