# SPDX-License-Identifier: Apache-2.0
"""The status of a LoRAAdapter, from the view its deployment's last pass made; without one, from the fact that there is none."""

from datetime import datetime

from diffusion_operator.api.adapter import AdapterStatus, InstanceState, LoRAAdapter, OwnerStatus, ResolvedStatus
from diffusion_operator.api.deployment import GroupState
from diffusion_operator.api.meta import Verdict, settle_conditions, verdict
from diffusion_operator.api.source import identity
from diffusion_operator.plan.adapters import AdapterView

INSTANCES_SHOWN = 64
_ASLEEP = (GroupState.DRAINING, GroupState.SLEEPING, GroupState.ASLEEP, GroupState.WAKING)
_SOURCE_ERRORS = frozenset({"InvalidAdapter", "DigestMismatch", "NotFound", "SourceNotFound"})


def adapter_status(adapter: LoRAAdapter, view: AdapterView | None, *, now: datetime) -> AdapterStatus:
    """No view means that there is no such deployment: nothing is loaded anywhere and nothing is pinned any more."""
    verdicts = _without_deployment(adapter) if view is None else _verdicts(adapter, view)
    return AdapterStatus(
        observed_generation=adapter.metadata.generation,
        deployment_uid=view.deployment_uid if view else None,
        resolved=_resolved(adapter, view, now) if view else None,
        desired_groups=len(view.instances) if view else 0,
        loaded_groups=view.count(InstanceState.LOADED) if view else 0,
        failed_groups=view.count(InstanceState.FAILED) if view else 0,
        deferred_groups=view.count(InstanceState.DEFERRED) if view else 0,
        owner=OwnerStatus(served_name=adapter.served_name, conflict_with=view.decision.conflict_with if view else None),
        instances=tuple(instance.status for instance in view.instances[:INSTANCES_SHOWN]) if view else (),
        conditions=settle_conditions(verdicts, previous=adapter.status.conditions, generation=adapter.metadata.generation, now=now),
    )


def _resolved(adapter: LoRAAdapter, view: AdapterView, now: datetime) -> ResolvedStatus | None:
    """Kept while the source and the deployment stay the same; otherwise what the first replica reports."""
    kept, source = adapter.status.resolved, identity(adapter.spec.source)
    if kept is not None and kept.source == source and adapter.status.deployment_uid == view.deployment_uid:
        return kept
    report = view.report
    if report is None or identity(report.source) != source or report.digest is None:
        return None
    return ResolvedStatus(
        source=source, digest=report.digest, size_bytes=report.size_bytes, rank=report.rank, modules=report.modules, resolved_at=now
    )


def _without_deployment(adapter: LoRAAdapter) -> tuple[Verdict, ...]:
    message = f"there is no DiffusionDeployment {adapter.spec.deployment_ref.name} in namespace {adapter.metadata.namespace}"
    return (
        verdict("Ready", False, "DeploymentMissing", message),
        verdict("Accepted", False, "DeploymentNotFound", message),
        verdict("SourceResolved", None, "NotTried", message),
        verdict("Loaded", False, "NoGroups", message),
    )


def _verdicts(adapter: LoRAAdapter, view: AdapterView) -> tuple[Verdict, ...]:
    accepted = verdict("Accepted", view.decision.accepted, view.decision.reason, view.decision.message)
    return (_ready(adapter, view), accepted, _source(adapter, view), _loaded(view))


def _ready(adapter: LoRAAdapter, view: AdapterView) -> Verdict:
    if not view.decision.accepted:
        return verdict("Ready", False, "NotAccepted", view.decision.message)
    if adapter.spec.suspend:
        return verdict("Ready", False, "Suspended", "spec.suspend is true")
    text = f"loaded on {view.count(InstanceState.LOADED)} of {len(view.instances)} replicas"
    if view.ready:
        return verdict("Ready", True, "LoadedEverywhere", text)
    if view.count(InstanceState.FAILED):
        reason = "PartiallyLoaded" if view.count(InstanceState.LOADED) else "SourceError" if _source_error(view) else "Failed"
        return verdict("Ready", False, reason, _first_error(view))
    if view.count(InstanceState.LOADED):
        return verdict("Ready", False, "PartiallyLoaded", text)
    if any(state in _ASLEEP for state in view.group_states) and view.count(InstanceState.DEFERRED) == len(view.instances):
        return verdict("Ready", False, "Deferred", f"{text}; it is loaded before a replica is awake again")
    return verdict("Ready", False, "Loading", text)


def _source(adapter: LoRAAdapter, view: AdapterView) -> Verdict:
    error = _source_error(view)
    if error:
        return verdict("SourceResolved", False, error, _first_error(view))
    resolved, source = adapter.status.resolved, identity(adapter.spec.source)
    digest = view.report.digest if view.report else resolved.digest if resolved and resolved.source == source else None
    if digest is not None:
        return verdict("SourceResolved", True, "Resolved", f"{source} is {digest}")
    return verdict("SourceResolved", None, "NotTried", "no replica has looked at the source yet")


def _loaded(view: AdapterView) -> Verdict:
    total, loaded = len(view.instances), view.count(InstanceState.LOADED)
    text = f"{loaded} of {total} replicas"
    if total == 0:
        return verdict("Loaded", False, "NoGroups", "there is no replica to load it on" if view.decision.desired else "not asked for")
    if loaded == total:
        return verdict("Loaded", True, "AllGroups", text)
    if view.count(InstanceState.FAILED):
        return verdict("Loaded", False, "SomeGroupsFailed", f"{text}; {_first_error(view)}")
    if any(state in _ASLEEP for state in view.group_states):
        return verdict("Loaded", False, "WaitingForWake", text)
    return verdict("Loaded", False, "WaitingForEngine", text)


def _source_error(view: AdapterView) -> str | None:
    """The source is at fault where the worker says so with one of its codes for that."""
    codes = (one.status.last_error.code for one in view.instances if one.status.last_error is not None)
    return next((code for code in codes if code in _SOURCE_ERRORS), None)


def _first_error(view: AdapterView) -> str:
    for instance in view.instances:
        error = instance.status.last_error
        if error is not None:
            return f"replica {instance.status.group}: {error.code}: {error.message}"
    return ""
