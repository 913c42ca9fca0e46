# SPDX-License-Identifier: Apache-2.0
"""The conditions of a LoRAAdapter. Each condition repeats a replica's report, and its message names that replica."""

from diffusion_operator.api.adapter import InstanceState, LoRAAdapter, ResolvedStatus
from diffusion_operator.api.meta import Condition, ConditionStatus, Verdict, condition_of, verdict
from diffusion_operator.plan.adapters.acceptance import declared
from diffusion_operator.plan.adapters.error_codes import DEPLOYMENT_REASONS, RELOAD_LOOP, SOURCE_REASONS
from diffusion_operator.plan.adapters.instances import Instance
from diffusion_operator.plan.adapters.records import comes_from, contradicts
from diffusion_operator.plan.adapters.view import AdapterView
from diffusion_operator.plan.observed.states import RESTING_STATES

MIB = 1024 * 1024
_COMING = (InstanceState.FETCHING, InstanceState.LOADING)
NOT_UNDERSTOOD = "NotUnderstood"
"""The reason of Ready where the object cannot be read."""
_NO_NEWS = "; no replica has a newer answer from the source yet: see the condition Loaded"


def without_deployment(adapter: LoRAAdapter) -> tuple[Verdict, ...]:
    message = f"there is no DiffusionDeployment {adapter.spec.deployment_ref.name} in namespace {adapter.metadata.namespace}"
    return (
        verdict("Ready", False, "DeploymentMissing", message),
        verdict("Accepted", False, "DeploymentNotFound", message),
        verdict("SourceResolved", None, "NotTried", message),
        verdict("Loaded", False, "NoReplicas", message),
        verdict("Degraded", True, "DeploymentMissing", message),
        verdict("UpToDate", None, "NotLoaded", message),
    )


def not_understood(wrong_field: str) -> tuple[Verdict, ...]:
    """Return Ready=Unknown and Degraded=True for an object of either kind that cannot be read, or for an adapter of such a deployment.

    `wrong_field` begins with the field, and says what was expected there and what was found. The message adds the remedy.
    """
    by_kubectl = " by `kubectl edit --subresource=status`" if wrong_field.startswith("status.") else ""
    idle = f"the operator leaves everything as it is until the field is corrected{by_kubectl}"
    text = f"{wrong_field}; {idle}, and the rest of this status may be out of date"
    return verdict("Ready", None, NOT_UNDERSTOOD, text), verdict("Degraded", True, NOT_UNDERSTOOD, text)


def adapter_verdicts(adapter: LoRAAdapter, view: AdapterView, resolved: ResolvedStatus | None) -> tuple[Verdict, ...]:
    accepted = verdict("Accepted", view.decision.accepted, view.decision.reason, view.decision.message)
    return (ready(adapter, view), accepted, source_resolved(adapter, view, resolved), loaded(view), degraded(view), up_to_date(view))


def ready(adapter: LoRAAdapter, view: AdapterView) -> Verdict:
    if not view.decision.accepted:
        return verdict("Ready", False, "NotAccepted", view.decision.message)
    if adapter.spec.suspend:
        leaving = f"; the adapter is still being unloaded on {_replicas(view.instances)}" if view.instances else ""
        return verdict("Ready", False, "Suspended", f"spec.suspend is true{leaving}")
    if view.suspended:
        return verdict("Ready", False, "Deferred", "the deployment's spec.suspend is true, so no replica can load the adapter")
    if not view.instances:
        return verdict("Ready", False, "Deferred", "the deployment has no replica to load the adapter on")
    tally = _tally(view)
    if view.wakeable:
        text = f"{tally}; the next request wakes a replica, which loads the adapter before it serves"
        return verdict("Ready", True, "AsleepWakeable", text)
    if view.ready:
        everywhere = view.count(InstanceState.LOADED) == len(view.instances)
        whole = all(one.status.state is InstanceState.LOADED for one in view.awake)
        return verdict("Ready", True, "LoadedEverywhere" if everywhere else "LoadedWhereAwake" if whole else "CachedOnDemand", tally)
    served = any(view.serves(one) for one in view.awake)
    if view.count(InstanceState.FAILED):
        reason = "PartiallyLoaded" if served else "SourceError" if _source_error(view) else "Failed"
        return verdict("Ready", False, reason, _first_error(view) + _other_version(view))
    if view.evicted:
        return verdict("Ready", False, "Evicted", _evicted(view))
    if served:
        return verdict("Ready", False, "PartiallyLoaded", tally)
    if any(state in RESTING_STATES for state in view.group_states) and view.count(InstanceState.DEFERRED) == len(view.instances):
        return verdict("Ready", False, "Deferred", f"{tally}; a replica that wakes loads the adapter before it serves")
    return verdict("Ready", False, "Loading", tally + _other_version(view))


def source_resolved(adapter: LoRAAdapter, view: AdapterView, resolved: ResolvedStatus | None) -> Verdict:
    """Return SourceResolved: False with a source's error, True with what was found there, else Unknown.

    While a failed load is tried again, an answer of this generation holds until a replica has a newer one.
    """
    error = _source_error(view)
    if error is not None:
        return verdict("SourceResolved", False, error, _first_error(view))
    if resolved is not None:
        return verdict("SourceResolved", True, "Resolved", f"{resolved.source} has the digest {resolved.digest}")
    if version := _found(view):
        source = declared(adapter)
        text = f"a replica found {source} at {version}; status.resolved is set when one has loaded it: see the condition Loaded"
        return verdict("SourceResolved", True, "Resolved", text)
    if view.count(InstanceState.CACHED):
        untried = "no replica has fetched the adapter yet"
        when = ": its first request does" if view.loads_on_request else ", and a request for it does not: see the condition Ready"
        return verdict("SourceResolved", None, "NotTried", f"{untried}{when}")
    if (before := _last_error(adapter, view)) is not None:
        return verdict("SourceResolved", False, before.reason, before.message.partition(_NO_NEWS)[0] + _NO_NEWS)
    if view.count(*_COMING, InstanceState.FAILED):
        return verdict("SourceResolved", None, "NotKnown", "no replica has found out yet what the source has: see the condition Loaded")
    return verdict("SourceResolved", None, "NotTried", "no replica has looked at the source yet")


def loaded(view: AdapterView) -> Verdict:
    desired = view.decision.desired is not None
    total, tally = len(view.instances) if desired else 0, _tally(view)
    if total == 0:
        unwanted = "no replica is asked to load the adapter, which is suspended or not accepted"
        return verdict("Loaded", False, "NoReplicas", "there is no replica to load the adapter on" if desired else unwanted)
    if view.count(InstanceState.LOADED) == total:
        return verdict("Loaded", True, "AllReplicas", f"loaded on {total} of {total} replicas")
    if view.count(InstanceState.FAILED):
        return verdict("Loaded", False, "SomeReplicasFailed", f"{tally}; {_first_error(view)}")
    if any(state in RESTING_STATES for state in view.group_states):
        return verdict("Loaded", False, "WaitingForWake", tally)
    if view.count(InstanceState.LOADED, InstanceState.CACHED) == total:
        return verdict("Loaded", False, "CachedOnDemand" if view.loads_on_request else "Evicted", tally)
    return verdict("Loaded", False, "WaitingForEngine", tally)


def degraded(view: AdapterView) -> Verdict:
    for one in view.instances:
        if one.error is not None and one.error.code == RELOAD_LOOP:
            return verdict("Degraded", True, "ReloadLoop", f"replica {one.status.replica}: {one.error.message}")
    for one in view.instances:
        if one.drifted:
            load = view.decision.desired.load if view.decision.desired is not None else None
            expected = load.digest if load is not None else None
            if load is not None and one.other_digest == expected and contradicts(one.other_identity, load.identity):
                found = f"has the weights {expected} with another configuration: identity {one.other_identity}, expected {load.identity}"
                return verdict("Degraded", True, "IdentityMismatch", f"replica {one.status.replica} {found}")
            version = one.other_digest or "a version without a digest"
            message = f"replica {one.status.replica} has {version}, every replica must have {expected}"
            return verdict("Degraded", True, "DigestDrift", message)
    for one in view.instances:
        if one.record is not None and one.record.verification_failed:
            message = (
                "after a wake the adapter differed from the one loaded before; no request used it, and it was loaded again from its file"
            )
            return verdict("Degraded", True, "VerificationFailed", f"replica {one.status.replica}: {message}")
    for one in view.instances:
        if one.evictions:
            evictions = f"replica {one.status.replica} evicted the adapter {one.evictions} times in the last ten minutes"
            message = f"{evictions}, though nobody asked for that; the operator has it loaded again"
            return verdict("Degraded", True, "EvictedUnexpectedly", message)
    if not view.decision.accepted:
        return verdict("Degraded", True, "NotAccepted", view.decision.message)
    if view.decision.desired is not None and view.count(InstanceState.FAILED):
        return verdict("Degraded", True, "LoadFailed", _first_error(view))
    if view.decision.desired is not None and view.evicted:
        return verdict("Degraded", True, "Evicted", _evicted(view))
    return verdict("Degraded", False, "AsExpected", "")


def up_to_date(view: AdapterView) -> Verdict:
    if any(one.other_digest is not None for one in view.instances):
        return verdict("UpToDate", False, "OldDigestStillLoaded", _other_version(view).lstrip("; "))
    if _source_error(view) is not None:
        text = "a replica could not get a usable adapter from the source: see the condition SourceResolved"
        return verdict("UpToDate", None, "SourceNotResolved", text)
    if view.decision.accepted and view.count(InstanceState.LOADED, InstanceState.CACHED):
        return verdict("UpToDate", True, "Current", "no replica has another version of the adapter")
    return verdict("UpToDate", None, "NotLoaded", "no replica serves the adapter")


def _tally(view: AdapterView) -> str:
    loaded_on = f"loaded on {view.count(InstanceState.LOADED)} of {len(view.instances)} replicas"
    cached = [one for one in view.instances if one.status.state is InstanceState.CACHED]
    later = ", where the next request for it loads it" if view.loads_on_request else ""
    missing = f"; not in memory on {_replicas(cached)}{later}" if cached else ""
    coming = "".join(f"; replica {one.status.replica}: {_progress(one)}" for one in view.instances if one.status.state in _COMING)
    return f"{loaded_on}{missing}{coming}"


def _progress(instance: Instance) -> str:
    status = instance.status
    if status.state is InstanceState.FETCHING and status.total_bytes:
        fetched, total = (status.fetched_bytes or 0) // MIB, -(-status.total_bytes // MIB)
        return f"Fetching, {fetched} of {total} MiB"
    return status.state.value


def _evicted(view: AdapterView) -> str:
    return (
        f"not in memory on {_replicas(view.evicted)}, where a request for it gets 503 AdapterNotLoaded. The deployment has more "
        "adapters than its spec.lora.maxCached: raise that, set its spec.lora.onMissing to Load, or set this adapter's spec.residency to "
        "Resident"
    )


def _other_version(view: AdapterView) -> str:
    others = [one for one in view.instances if one.other_digest is not None]
    return f"; another version, {others[0].other_digest}, still serves on {_replicas(others)}" if others else ""


def _replicas(instances: tuple[Instance, ...] | list[Instance]) -> str:
    return "replica " + ", ".join(str(one.status.replica) for one in instances)


def _source_error(view: AdapterView) -> str | None:
    """Return the condition's reason for the first error of a replica that blames the source; None without one."""
    return next((SOURCE_REASONS[one.error.code] for one in view.instances if one.error and one.error.code in SOURCE_REASONS), None)


def _found(view: AdapterView) -> str | None:
    """Return the digest or commit that a replica found at the declared source, though it may not have loaded it; None without one."""
    desired = view.decision.desired
    if desired is None:
        return None
    records = [one.record for one in view.instances if one.record is not None and comes_from(one.record, desired)]
    return next((found for one in records if (found := one.digest or one.revision) is not None), None)


def _last_error(adapter: LoRAAdapter, view: AdapterView) -> Condition | None:
    """Return the status's SourceResolved=False, if it is of this generation and this deployment; None otherwise."""
    before = condition_of(adapter.status.conditions, "SourceResolved")
    if before is None or before.status is not ConditionStatus.FALSE or adapter.status.deployment_uid != view.deployment_uid:
        return None
    return before if before.observed_generation == adapter.metadata.generation else None


def _first_error(view: AdapterView) -> str:
    """Return a replica's error as text, one of the source first; empty if there is none.

    Lack of room on the deployment comes last, because Accepted reports it.
    """
    errors = [one for one in view.instances if one.error is not None]
    errors.sort(key=lambda one: one.error is None or (one.error.code not in SOURCE_REASONS, one.error.code in DEPLOYMENT_REASONS))
    return next((f"replica {one.status.replica}: {one.error.code}: {one.error.message}" for one in errors if one.error), "")
