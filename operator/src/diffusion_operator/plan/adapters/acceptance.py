# SPDX-License-Identifier: Apache-2.0
"""Choice of the LoRAAdapters that a deployment serves: names, precedence, room and mounts. CEL cannot check these because they span
objects.

The older object wins a name; what it refuses it refuses without touching what is served. A replica alone discovers the rank and layers of a
file. This verdict overrules the decision (`overruled`), but the adapter stays declared so that its reports remain known.
"""

from collections.abc import Iterable, Sequence

import msgspec

from diffusion_operator.api.adapter import AdapterFormat, LoRAAdapter, Residency, ResolvedStatus
from diffusion_operator.api.adapter_load import AdapterLoad, adapter_load
from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.deployment_spec import Lora
from diffusion_operator.api.meta import ConditionStatus, condition_of
from diffusion_operator.api.source import AdapterSource, claim_of, identity, secret_of
from diffusion_operator.api.worker_state import AdapterRecord, RecordState, WireError
from diffusion_operator.plan.adapters.error_codes import DEPLOYMENT_REASONS

_RANKS = (8, 16, 32, 64, 128, 256)


class DesiredAdapter(msgspec.Struct, frozen=True, gc=False):
    """Content and settings of an adapter that the workers are to load. Their records are compared with it."""

    uid: str
    generation: int
    name: str
    load: AdapterLoad
    load_timeout_s: int
    declared: str = ""
    """`identity` of the source as the spec has it; that of `load` may name the commit that a branch was found to be."""
    changed: bool = False
    """Another version was pinned before, so a replica has this one only after a push."""


class Decision(msgspec.Struct, frozen=True, gc=False):
    """Acceptance of an adapter, or the reason for its refusal."""

    adapter: LoRAAdapter
    accepted: bool
    reason: str = "Accepted"
    message: str = ""
    conflict_with: str | None = None
    desired: DesiredAdapter | None = None


class Claim(msgspec.Struct, frozen=True, gc=False):
    """All facts about older adapters that the decision on a younger one needs."""

    owner: str | None = None
    """The adapter that has its name."""
    full: bool = False
    """There is no room for another Resident one."""


def decide(deployment: DiffusionDeployment, adapter: LoRAAdapter, claim: Claim, *, held: Sequence[AdapterRecord]) -> Decision:
    """Decide whether a deployment serves an adapter. The decision on a suspended adapter has no `desired`.

    `held` are the records that awake replicas have under the adapter's name.
    """
    refusal = _refusal(deployment, adapter, claim, held=held)
    if refusal is not None:
        reason, message = refusal
        return Decision(
            adapter=adapter, accepted=False, reason=reason, message=message, conflict_with=claim.owner if reason == "NameConflict" else None
        )
    desired = None if adapter.spec.suspend else _desired(deployment, adapter)
    accepted = f"accepted by DiffusionDeployment {deployment.metadata.name}"
    return Decision(adapter=adapter, accepted=True, message=accepted, desired=desired)


def overruled(decision: Decision, errors: Iterable[WireError]) -> Decision:
    """Turn an acceptance into a refusal, if an error that replicas found shows that the deployment has no room for the adapter.

    Otherwise return the decision unchanged.
    """
    error = next((one for one in errors if one.code in DEPLOYMENT_REASONS), None)
    if error is None or not decision.accepted:
        return decision
    return msgspec.structs.replace(decision, accepted=False, reason=error.code, message=error.message)


def declared(adapter: LoRAAdapter) -> str:
    """Return a line of the source, the components used, and the checks asked for. A pin holds for this line only; another line voids it."""
    spec = adapter.spec
    parts = [component.value for component in spec.components]
    parts += [] if spec.format is AdapterFormat.AUTO else [spec.format.value]
    parts += [] if spec.expected_rank is None else [f"rank {spec.expected_rank}"]
    return identity(spec.source) + (f" ({', '.join(parts)})" if parts else "")


def pinned(deployment_uid: str, adapter: LoRAAdapter) -> ResolvedStatus | None:
    """Return the pin in the adapter's status: the first report of this source by a replica of this deployment.

    None if there is none, or if it is of another source or deployment.
    """
    resolved = adapter.status.resolved
    if resolved is None or adapter.status.deployment_uid != deployment_uid or resolved.source != declared(adapter):
        return None
    return resolved


def _refusal(
    deployment: DiffusionDeployment, adapter: LoRAAdapter, claim: Claim, *, held: Sequence[AdapterRecord]
) -> tuple[str, str] | None:
    """Find the first rule that the adapter breaks, and return the reason and message of its refusal; None if it breaks no rule."""
    lora, name = deployment.spec.lora, adapter.served_name
    its_deployment = f"DiffusionDeployment {deployment.metadata.name}"
    if not lora.enabled:
        return "LoRADisabled", f"spec.lora.enabled of {its_deployment} is false"
    if name in deployment.served_names:
        return "NameReserved", f"the name {name!r} is a served name of {its_deployment}; create the adapter with another spec.adapterName"
    if claim.owner is not None:
        return (
            "NameConflict",
            f"the name {name!r} belongs to the older LoRAAdapter {claim.owner}; create this one with another spec.adapterName",
        )
    if _held_by_another(deployment, adapter, held):
        return "NameConflict", f"an earlier adapter of the name {name!r} is still being unloaded; this one is accepted after that"
    return (
        _not_mounted(adapter, lora, its_deployment)
        or _too_large(deployment, adapter, its_deployment)
        or _capacity_refusal(adapter, lora, its_deployment, full=claim.full)
    )


def _held_by_another(deployment: DiffusionDeployment, adapter: LoRAAdapter, records: Sequence[AdapterRecord]) -> bool:
    """Return whether an awake replica still holds another object's adapter under this name: a draining one, or another source.

    False for an adapter that is accepted already: it holds the name itself.
    """
    before = condition_of(adapter.status.conditions, "Accepted")
    if before is not None and before.status is ConditionStatus.TRUE and adapter.status.deployment_uid == deployment.metadata.uid:
        return False
    own = identity(adapter.spec.source)
    return any(record.state is RecordState.DRAINING or identity(record.source) != own for record in records)


def _not_mounted(adapter: LoRAAdapter, lora: Lora, its_deployment: str) -> tuple[str, str] | None:
    secret, claim = secret_of(adapter.spec.source), claim_of(adapter.spec.source)
    if secret is not None and secret not in lora.secrets:
        return "SecretNotMounted", f"spec.source needs the Secret {secret}: add it to spec.lora.secrets of {its_deployment}"
    if claim is not None and claim not in lora.claims:
        return (
            "ClaimNotMounted",
            f"spec.source lies on the PersistentVolumeClaim {claim}: add it to spec.lora.claims of {its_deployment}",
        )
    return None


def _too_large(deployment: DiffusionDeployment, adapter: LoRAAdapter, its_deployment: str) -> tuple[str, str] | None:
    known = pinned(deployment.metadata.uid, adapter)
    rank, limit = adapter.spec.expected_rank or (known.rank if known else None), deployment.spec.lora.max_rank
    if rank is None or rank <= limit:
        return None
    enough = next((one for one in _RANKS if one >= rank), None)
    found = f"spec.expectedRank is {rank}" if adapter.spec.expected_rank else f"the adapter has rank {rank}"
    smaller = "use an adapter of a smaller rank"
    advice = f"raise spec.lora.maxRank to {enough}, which replaces the replicas, or {smaller}" if enough else smaller
    return "RankTooLarge", f"{found}, and spec.lora.maxRank of {its_deployment} is {limit}: {advice}"


def _capacity_refusal(adapter: LoRAAdapter, lora: Lora, its_deployment: str, *, full: bool) -> tuple[str, str] | None:
    """Return reason and message if the deployment has no places, or if they are all taken and the adapter is Resident.

    Other adapters take turns; None for them, and for a suspended one.
    """
    if lora.slots == 0:
        return "CapacityExceeded", f"spec.lora.maxLoaded of {its_deployment} is 0, so no adapter can be used: raise it"
    if adapter.spec.suspend or adapter.spec.residency is not Residency.RESIDENT or not full:
        return None
    crowd = f"spec.lora.maxLoaded of {its_deployment} is {lora.slots}, and it has as many older adapters with the residency Resident"
    return "CapacityExceeded", f"{crowd}: raise maxLoaded, or give one of the adapters the residency Cached"


def _desired(deployment: DiffusionDeployment, adapter: LoRAAdapter) -> DesiredAdapter:
    known = pinned(deployment.metadata.uid, adapter)
    load = adapter_load(adapter.spec, digest=_digest(adapter, known), identity=known.identity if known is not None else None)
    resolved = adapter.status.resolved
    return DesiredAdapter(
        uid=adapter.metadata.uid,
        generation=adapter.metadata.generation,
        name=adapter.served_name,
        load=msgspec.structs.replace(load, source=_at(load.source, known)),
        load_timeout_s=adapter.spec.load_timeout_seconds,
        declared=identity(adapter.spec.source),
        changed=known is None and resolved is not None and adapter.status.deployment_uid == deployment.metadata.uid,
    )


def _digest(adapter: LoRAAdapter, known: ResolvedStatus | None) -> str | None:
    """Return the digest that the spec demands, else the one found before; None without either."""
    http = adapter.spec.source.http
    demanded = adapter.spec.digest or (f"sha256:{http.sha256}" if http is not None else None)
    return demanded or (known.digest if known is not None else None)


def _at(source: AdapterSource, known: ResolvedStatus | None) -> AdapterSource:
    """Return the source with a branch pinned to the commit that the first replica found, so that later ones fetch the same.

    Without such a commit, and for a source outside of a hub, return it unchanged.
    """
    if source.hugging_face is None or known is None or known.revision is None:
        return source
    return msgspec.structs.replace(source, hugging_face=msgspec.structs.replace(source.hugging_face, revision=known.revision))
