# SPDX-License-Identifier: Apache-2.0
"""A child of a deployment: written where it is not as the spec asks, put back where somebody changed it, tried again where it fails.

The watched object is compared with the rendered one, so an operator's start writes nothing that already matches. The Secret is never read:
the ConfigMap says that it was written.
"""

import logging
from datetime import timedelta

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.names import (
    ANNOTATION_APPLIED,
    ANNOTATION_SECRET,
    CONFIG_MAP,
    LABEL_DEPLOYMENT,
    SECRET,
    SERVICE,
    desired_config_name,
)
from diffusion_operator.errors import ClusterConflict, ClusterError, ClusterUnavailable, NamespaceEnds
from diffusion_operator.plan.observed.children import (
    OPERATORS_PACE,
    PASS_FAILED,
    UNTOLD,
    Change,
    ChildState,
    Repairs,
    anothers,
    contested,
    leaving,
    refused,
    stranger,
    tried,
)
from diffusion_operator.plan.observed.ownership import Ownership, is_controlled_by
from diffusion_operator.plan.results.drift import drift, leads_elsewhere
from diffusion_operator.reconcile.children.repairs import tell_repaired
from diffusion_operator.reconcile.children.writes import remove_child, unwanted, write_child, write_secret
from diffusion_operator.reconcile.memory import NONE, Applied, DeploymentMemory
from diffusion_operator.reconcile.runtime import Runtime
from diffusion_operator.render.child import Child

BLIND_SHARE = 0.8
"""The share of the time between two resyncs, which come a little earlier or later. Each of them looks at what no watch reports."""

log = logging.getLogger(__name__)


async def keep_child(runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, child: Child) -> ChildState:
    """Keep one child as the spec asks, and return its state.

    Return the last state while the next try is not due and nothing changed. An error becomes the state; only NamespaceEnds is raised.
    Unexpected errors and an API server that is away are also reported at the end of the pass.
    """
    kind, key, content, before = child.kind.kind, child.key, child.mark, memory.tries.get(child.key)
    doubted = key in memory.doubted
    if before is not None and before.content == content and not doubted and runtime.now() < before.again_at:
        return before.state
    try:
        state = await _kept(runtime, deployment, memory, child)
    except NamespaceEnds:
        raise
    except ClusterError as error:
        ours = await _is_there(runtime, deployment, memory, child)
        passing = isinstance(error, ClusterConflict | ClusterUnavailable)
        asked = runtime.now() + timedelta(seconds=error.retry_after_s)
        state = refused(child.kind, child.name, ours=ours, reason=error.reason, message=error.said, passing=passing, not_before=asked)
        if isinstance(error, ClusterUnavailable):
            memory.failures.append(error)
    except Exception as error:
        log.exception("a child could not be reconciled namespace=%s child=%s %s", deployment.metadata.namespace, kind, child.name)
        memory.failures.append(error)
        ours = await _is_there(runtime, deployment, memory, child)
        text = f"{kind} {child.name} could not be reconciled: {type(error).__name__}: {error}; the operator tries again"
        state = ChildState(kind=kind, name=child.name, ours=ours, reason=PASS_FAILED, message=text)
    if not state.reason:
        memory.tries.pop(key, None)
        return state
    attempt = memory.tries[key] = tried(before, state, content=content, now=runtime.now())
    if before is None or before.state.message != state.message:
        log.warning("a child is not as the spec asks namespace=%s reason=%s %s", deployment.metadata.namespace, state.reason, state.message)
    return attempt.state


async def _kept(runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, child: Child) -> ChildState:
    key, ours = child.key, ChildState(kind=child.kind.kind, name=child.name, ours=True)
    repaired = await _to_repair(runtime, deployment, memory, child)
    if repaired is None:
        return ours
    repairs = memory.repairs.get(key, Repairs())
    if repaired.text and await _is_anothers(runtime, deployment, child):
        again_at = memory.applied[key].at + OPERATORS_PACE
        if again_at > runtime.now():
            return anothers(child.kind, child.name, not_before=again_at)
        repaired = UNTOLD  # no user did it, so no Event says so
    if repaired.text and child.manifest is not None:
        there = await _is_there(runtime, deployment, memory, child)
        again_at = repairs.next_at(child.kind, runtime.now(), useless=not there or repaired.misroutes)
        if again_at > runtime.now():
            memory.repairs[key] = repairs.put_off()
            return contested(child.kind, child.name, repaired, ours=there, not_before=again_at)
    found = await _write(runtime, deployment, child)
    if found is Ownership.LEAVING:
        return leaving(child.kind, child.name)
    if found is Ownership.STRANGER:
        return stranger(child.kind, child.name)
    memory.applied[key] = Applied(content=child.mark, at=runtime.now())
    if repaired.text:
        repairs = memory.repairs[key] = repairs.and_now(runtime.now())
        await tell_repaired(runtime, deployment, repaired.text, about=key)
    left = await _changed(runtime, deployment, child, known=True) if child.manifest is not None else None
    if left is not None and left.text:  # an admission webhook changed the write itself
        again_at = repairs.next_at(child.kind, runtime.now(), useless=left.misroutes)
        return contested(child.kind, child.name, left, ours=True, not_before=again_at)
    return ours


async def _write(runtime: Runtime, deployment: DiffusionDeployment, child: Child) -> Ownership:
    """Write the child, or remove it where the spec does without; return whose object has its name then."""
    if child.manifest is None:
        return await remove_child(runtime, deployment, child.kind, child.name)
    write = write_secret if child.kind == SECRET else write_child
    return await write(runtime, deployment, child.manifest)


async def _to_repair(runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, child: Child) -> Change | None:
    """Return a Change if the child has to be written or removed, otherwise None.

    The text says what another client changed; it is empty if no other client is known to have changed anything.
    """
    key, last = child.key, memory.applied.get(child.key)
    doubted = key in memory.doubted and child.kind != SECRET
    memory.doubted = memory.doubted - {key} or NONE
    if last is not None and last.content != child.mark:
        return UNTOLD
    failing, blind_after = key in memory.tries, timedelta(seconds=BLIND_SHARE * runtime.settings.resync_s)
    if last is not None and not doubted and not failing and runtime.now() - last.at < blind_after:
        return None
    changed = await _changed(runtime, deployment, child, known=last is not None)
    if changed is None:
        memory.applied[key] = Applied(content=child.mark, at=runtime.now())
        return None
    return changed if last is not None else UNTOLD  # a process that has just begun does not know who changed it


async def _changed(runtime: Runtime, deployment: DiffusionDeployment, child: Child, *, known: bool) -> Change | None:
    """Return the difference of the live child from the rendered one; None where it is as it was written.

    It is looked for by its label, so without that it counts as deleted.
    The Secret cannot be read: it counts as changed, unless an earlier process wrote it and this one has not (`known`).
    """
    metadata = deployment.metadata
    if child.manifest is None:
        return UNTOLD if await unwanted(runtime, deployment, child.kind, child.name) else None
    if child.kind == SECRET:
        written = not known and await _secret_mark(runtime, deployment) == child.written
        return None if written else UNTOLD
    live = await runtime.cluster.get(child.kind, metadata.namespace, child.name)
    if live is None or live["metadata"].get("labels", {}).get(LABEL_DEPLOYMENT) != metadata.name:
        return Change(f"{child.kind.kind} {child.name} was deleted or its labels were removed")
    paths = drift(live, child.manifest)
    if not paths:
        return None
    elsewhere = child.kind == SERVICE and leads_elsewhere(live, child.manifest)
    return Change(f"{child.kind.kind} {child.name} was changed: {', '.join(paths)}", misroutes=elsewhere)


async def _is_there(runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, child: Child) -> bool:
    """Return whether the child is there and our object controls it, though the last write of it failed.

    The Secret cannot be read: it counts as there if it was written once.
    """
    if child.kind == SECRET:
        last = memory.applied.get(child.key)
        return bool(last.content) if last is not None else bool(await _secret_mark(runtime, deployment))
    found = await runtime.cluster.get(child.kind, deployment.metadata.namespace, child.name)
    return found is not None and is_controlled_by(found, deployment.metadata.uid)


async def _is_anothers(runtime: Runtime, deployment: DiffusionDeployment, child: Child) -> bool:
    """Return whether the live child carries the hash of another rendering: only an operator writes one."""
    live = await runtime.cluster.get(child.kind, deployment.metadata.namespace, child.name) if child.manifest is not None else None
    if live is None or not is_controlled_by(live, deployment.metadata.uid):
        return False
    carried: str = live["metadata"].get("annotations", {}).get(ANNOTATION_APPLIED, child.written)
    return carried != child.written


async def _secret_mark(runtime: Runtime, deployment: DiffusionDeployment) -> str:
    """Return the hash of the Secret that an earlier process wrote before the ConfigMap. Empty where it wrote none."""
    metadata = deployment.metadata
    found = await runtime.cluster.get(CONFIG_MAP, metadata.namespace, desired_config_name(metadata.name))
    if found is None or not is_controlled_by(found, metadata.uid):
        return ""
    return str(found["metadata"].get("annotations", {}).get(ANNOTATION_SECRET, ""))
