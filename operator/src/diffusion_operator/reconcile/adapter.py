# SPDX-License-Identifier: Apache-2.0
"""A pass over a LoRAAdapter: write its status from the view of its deployment's last pass. Acting is the deployment's part."""

from diffusion_operator.api.adapter import LoRAAdapter
from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.names import ADAPTER, DEPLOYMENT
from diffusion_operator.cluster import Manifest
from diffusion_operator.errors import NotUnderstood
from diffusion_operator.plan.adapters.conditions import not_understood
from diffusion_operator.plan.adapters.status import adapter_status
from diffusion_operator.plan.adapters.view import AdapterView
from diffusion_operator.plan.results.events import adapter_events
from diffusion_operator.reconcile.backoff import Backoffs
from diffusion_operator.reconcile.keyed_queue import Key, Result
from diffusion_operator.reconcile.not_understood import tell_not_understood
from diffusion_operator.reconcile.runtime import Runtime, adapter_key, deployment_key
from diffusion_operator.reconcile.status_write import write_status
from diffusion_operator.reconcile.store.parsing import parse

VIEW_WAIT_S = 5.0


async def reconcile_adapter(runtime: Runtime, key: Key) -> Result:
    manifest = await runtime.cluster.get(ADAPTER, key.namespace, key.name)
    if manifest is None or manifest["metadata"].get("deletionTimestamp"):
        runtime.hide(key)
        runtime.adapter_backoffs.pop(key, None)
        return Result(gone=True)
    try:
        adapter = parse(manifest, LoRAAdapter)
    except NotUnderstood as error:
        return await tell_not_understood(runtime, key, manifest, not_understood(error.why))
    deployment = await runtime.cluster.get(DEPLOYMENT, key.namespace, adapter.spec.deployment_ref.name)
    view = None
    if deployment is not None and not deployment["metadata"].get("deletionTimestamp"):
        view = _current_view(runtime, adapter, deployment_uid=deployment["metadata"]["uid"])
        if view is None and (why := _unreadable(deployment)):
            text = f"DiffusionDeployment {adapter.spec.deployment_ref.name} is not understood: {why}"
            return await tell_not_understood(runtime, key, manifest, not_understood(text))
        if view is None:  # the deployment's pass makes one and wakes this key
            runtime.wake(deployment_key(key.namespace, adapter.spec.deployment_ref.name))
            return Result(requeue_after_s=VIEW_WAIT_S)
    backoffs = runtime.adapter_backoffs.setdefault(key, Backoffs())
    backoffs.see(adapter.metadata.generation)
    await _write_status(runtime, backoffs, adapter, view, version=manifest["metadata"]["resourceVersion"])
    return Result(requeue_after_s=backoffs.next_s(runtime.now()))


def _unreadable(deployment: Manifest) -> str:
    """Return why a deployment cannot be read; empty where it can."""
    try:
        parse(deployment, DiffusionDeployment)
    except NotUnderstood as error:
        return error.why
    return ""


def _current_view(runtime: Runtime, adapter: LoRAAdapter, *, deployment_uid: str) -> AdapterView | None:
    """Return the view if it is about this deployment and the current spec; None if there is no such view yet."""
    memory = runtime.memories.get((adapter.metadata.namespace, adapter.spec.deployment_ref.name))
    view = memory.views.get(adapter.metadata.uid) if memory is not None and memory.uid == deployment_uid else None
    return view if view is not None and view.decision.adapter.metadata.generation == adapter.metadata.generation else None


async def _write_status(runtime: Runtime, backoffs: Backoffs, adapter: LoRAAdapter, view: AdapterView | None, *, version: str) -> None:
    status, metadata = adapter_status(adapter, view, now=runtime.now()), adapter.metadata
    runtime.show(adapter_key(metadata.namespace, metadata.name), status.conditions)
    if status != adapter.status:
        events = adapter_events(adapter, status)
        await write_status(runtime, backoffs, ADAPTER, metadata, version=version, events=events, status=status)
