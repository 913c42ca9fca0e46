# SPDX-License-Identifier: Apache-2.0
"""Which LoRAAdapters a deployment serves: names, precedence and capacity, which CEL cannot see because they span objects.

The older object wins a name; what it refuses it refuses without touching what is served.
"""

from collections.abc import Sequence

import msgspec

from diffusion_operator.api.adapter import LoRAAdapter
from diffusion_operator.api.adapter_load import AdapterLoad, adapter_load
from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.source import identity


class DesiredAdapter(msgspec.Struct, frozen=True):
    """What every replica should hold."""

    uid: str
    generation: int
    name: str
    load: AdapterLoad
    load_timeout_s: int


class Decision(msgspec.Struct, frozen=True):
    """Whether an adapter is served, and why not."""

    adapter: LoRAAdapter
    accepted: bool
    reason: str = "Accepted"
    message: str = ""
    conflict_with: str | None = None

    @property
    def desired(self) -> DesiredAdapter | None:
        if not self.accepted or self.adapter.spec.suspend:
            return None
        return _desired(self.adapter)


def decide_all(deployment: DiffusionDeployment, adapters: Sequence[LoRAAdapter]) -> tuple[Decision, ...]:
    """Oldest first; the order is the precedence."""
    holders: dict[str, str] = {}
    decisions: list[Decision] = []
    loaded = 0
    for adapter in sorted(adapters, key=lambda one: (one.metadata.creation_timestamp, one.metadata.name)):
        decision = _decide(deployment, adapter, holder=holders.get(adapter.served_name), loaded=loaded)
        holders.setdefault(adapter.served_name, adapter.metadata.name)
        loaded += decision.desired is not None
        decisions.append(decision)
    return tuple(decisions)


def _decide(deployment: DiffusionDeployment, adapter: LoRAAdapter, *, holder: str | None, loaded: int) -> Decision:
    name, limit = adapter.served_name, deployment.spec.lora.max_loaded
    if name == deployment.served_name:
        message = f"the name {name!r} is the served name of DiffusionDeployment {deployment.metadata.name}"
        return Decision(adapter=adapter, accepted=False, reason="NameReserved", message=message)
    if holder is not None:
        message = f"the name {name!r} belongs to the older LoRAAdapter {holder}"
        return Decision(adapter=adapter, accepted=False, reason="NameConflict", message=message, conflict_with=holder)
    if not adapter.spec.suspend and loaded >= limit:
        message = f"{loaded} of {limit} adapters are in use on DiffusionDeployment {deployment.metadata.name} (spec.lora.maxLoaded)"
        return Decision(adapter=adapter, accepted=False, reason="CapacityExceeded", message=message)
    return Decision(adapter=adapter, accepted=True, message=f"served by DiffusionDeployment {deployment.metadata.name}")


def _desired(adapter: LoRAAdapter) -> DesiredAdapter:
    return DesiredAdapter(
        uid=adapter.metadata.uid,
        generation=adapter.metadata.generation,
        name=adapter.served_name,
        load=adapter_load(adapter.spec, digest=adapter.spec.digest or pinned_digest(adapter)),
        load_timeout_s=adapter.spec.load_timeout_seconds,
    )


def pinned_digest(adapter: LoRAAdapter) -> str | None:
    """What the first replica reported for this source; another source voids it."""
    resolved = adapter.status.resolved
    return resolved.digest if resolved is not None and resolved.source == identity(adapter.spec.source) else None
