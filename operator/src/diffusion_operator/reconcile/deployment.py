# SPDX-License-Identifier: Apache-2.0
"""One pass over a DiffusionDeployment: observe, plan, act, write the status once.

A child, a pod or a call that fails keeps nothing else from being done. The status is written all the same, and then the pass fails."""

import logging

import msgspec

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.deployment_status import DeploymentStatus
from diffusion_operator.api.meta import reason_of, settle_conditions
from diffusion_operator.api.names import ADAPTER, DEPLOYMENT
from diffusion_operator.errors import ClusterError, NamespaceEnds
from diffusion_operator.plan.deployment import DeploymentPlan, plan_deployment, status_after
from diffusion_operator.plan.observed.children import hurried
from diffusion_operator.plan.observed.observed import Observed
from diffusion_operator.plan.results.child_events import child_events
from diffusion_operator.plan.results.events import deployment_events, wakes_between
from diffusion_operator.plan.sleep.next_look import WAKEABLE_POLL_S
from diffusion_operator.plan.status.conditions import pass_failed
from diffusion_operator.reconcile.act import act_on_pods, call_workers
from diffusion_operator.reconcile.children import keep_children, next_try_s, recheck_secret
from diffusion_operator.reconcile.keyed_queue import Key, Result
from diffusion_operator.reconcile.memory import DeploymentMemory
from diffusion_operator.reconcile.observe import adapters_of, observe, parse
from diffusion_operator.reconcile.repairs import tell_missed_pods
from diffusion_operator.reconcile.report import report
from diffusion_operator.reconcile.runtime import Runtime, adapter_key, deployment_key
from diffusion_operator.reconcile.sleep_snapshot import sleepers_unchanged, snapshot_of
from diffusion_operator.reconcile.status_write import worth_writing, write_status
from diffusion_operator.reconcile.template_trial import try_template
from diffusion_operator.render import Manifest
from diffusion_operator.render.control_secret import control_secret
from diffusion_operator.render.desired_config import desired_config
from diffusion_operator.render.service import service

LOOK = "look"

log = logging.getLogger(__name__)


async def reconcile_deployment(runtime: Runtime, key: Key, *, touched: bool) -> Result:
    """`touched`: something woke the key, and not time alone."""
    if await _nothing_new(runtime, key, touched=touched):
        return Result(requeue_after_s=WAKEABLE_POLL_S)
    manifest = await runtime.cluster.get(DEPLOYMENT, key.namespace, key.name)
    if manifest is None or manifest["metadata"].get("deletionTimestamp"):
        return await _gone(runtime, key)
    deployment = parse(manifest, DiffusionDeployment)
    memory = runtime.memory(deployment.metadata)

    _begin(memory, deployment, runtime)
    if memory.backoffs.waiting(LOOK, runtime.now()):
        return Result(requeue_after_s=memory.backoffs.next_s(runtime.now()))
    observed, plan, manifests = await _look(runtime, deployment, memory)
    memory.attempts, memory.departures = dict(plan.attempts), plan.departures
    await tell_missed_pods(runtime, deployment, memory, plan)

    recheck_secret(memory, observed.pods, now=runtime.now())
    memory.children = await keep_children(runtime, deployment, memory, manifests)
    made = await act_on_pods(runtime, deployment, memory, plan.pods, template=plan.template)
    if plan.trial is not None:
        await try_template(runtime, deployment, memory, plan.trial, template=plan.template)
    await call_workers(runtime, memory, plan.calls)

    status = status_after(deployment, plan, children=memory.children, refusal=memory.refusal, now=runtime.now())
    if not (made and deployment.status.observed_generation is None):  # the pass that sees the first pods follows at once
        await _write_status(runtime, deployment, memory, status)
    _publish_views(runtime, key.namespace, memory, plan)
    for told in plan.told:
        await report(runtime, (told.event,), kind=ADAPTER, about=told.about)
    if memory.failures:
        raise memory.failures[0]  # the queue logs it, and tries again with backoff
    return _next_pass(runtime, memory, observed, plan)


def _begin(memory: DeploymentMemory, deployment: DiffusionDeployment, runtime: Runtime) -> None:
    """Forget the failures of the pass before. After an edit of the spec every child is tried at once."""
    memory.failures.clear()
    memory.backoffs.see(deployment.metadata.generation)
    if memory.generation != deployment.metadata.generation:
        memory.generation = deployment.metadata.generation
        memory.tries = {kind: hurried(one, runtime.now()) for kind, one in memory.tries.items()}


async def _look(
    runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory
) -> tuple[Observed, DeploymentPlan, tuple[Manifest, ...]]:
    """Observe and plan. A failure leaves nothing to act on, so the status says so before the error is raised again."""
    try:
        observed = await observe(runtime, deployment, memory)
        plan = plan_deployment(observed, runtime.now())
        manifests = _children(runtime, deployment, plan)
        memory.backoffs.succeeded(LOOK)
        return observed, plan, manifests
    except NamespaceEnds:
        raise
    except Exception as error:
        memory.backoffs.failed(LOOK, error, runtime.now())
        await _tell_of_no_plan(runtime, deployment, memory, error)
        raise


def _next_pass(runtime: Runtime, memory: DeploymentMemory, observed: Observed, plan: DeploymentPlan) -> Result:
    now, steady_s = runtime.now(), runtime.settings.steady_poll_s
    retry_s = min((one for one in (next_try_s(memory, now), memory.backoffs.next_s(now)) if one is not None), default=None)
    look_again_s = min((one for one in (plan.look_again_s, retry_s) if one is not None), default=None)
    if retry_s is None:
        memory.snapshot = snapshot_of(observed, look_again_s=look_again_s, now=now, steady_s=steady_s)
    return Result(requeue_after_s=min(look_again_s or steady_s, steady_s))


async def _nothing_new(runtime: Runtime, key: Key, *, touched: bool) -> bool:
    """Whether all sleep and say what they said; the pass that comes where they do not looks at everything, as do those after a failure."""
    memory = runtime.memories.get((key.namespace, key.name))
    snapshot = memory.snapshot if memory is not None else None
    if memory is None or snapshot is None:
        return False
    memory.snapshot = None
    if touched or runtime.now() >= snapshot.until or not await sleepers_unchanged(runtime, memory, snapshot):
        return False
    memory.snapshot = snapshot
    return True


async def _gone(runtime: Runtime, key: Key) -> Result:
    """Owner references collect the children; the adapters that referred to it must hear of it."""
    runtime.memories.pop((key.namespace, key.name), None)
    runtime.ready_reasons.pop(key, None)
    runtime.statuses.pop(key, None)
    for adapter in await adapters_of(runtime, key.namespace, key.name):
        runtime.wake(adapter_key(key.namespace, adapter.metadata.name))
    return Result(gone=True)


def _children(runtime: Runtime, deployment: DiffusionDeployment, plan: DeploymentPlan) -> tuple[Manifest, ...]:
    """Before the pods, which mount the first two."""
    return (
        control_secret(deployment, key=runtime.settings.operator_key),
        desired_config(deployment, plan.desired, plan.status.model),
        service(deployment),
    )


async def _tell_of_no_plan(runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, error: Exception) -> None:
    """A status that claims nothing: what was true at the last look may not be any more."""
    text = f"the operator could not look at the deployment: {type(error).__name__}: {error}; all else here is from an earlier look"
    now, generation, before = runtime.now(), deployment.metadata.generation, deployment.status.conditions
    (ready,) = settle_conditions((pass_failed(text),), previous=before, generation=generation, now=now)
    others = tuple(one for one in before if one.type != ready.type)
    await _write_status(runtime, deployment, memory, msgspec.structs.replace(deployment.status, conditions=(ready, *others)))


async def _write_status(runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, status: DeploymentStatus) -> None:
    """Keep a failure for the end of the pass."""
    metadata, now, key = deployment.metadata, runtime.now(), deployment_key(deployment.metadata.namespace, deployment.metadata.name)
    runtime.ready_reasons[key] = reason_of(status.conditions, "Ready")
    runtime.statuses[key] = DeploymentStatus(replica_states=status.replica_states, held=status.held)
    if not worth_writing(deployment.status, status, last=memory.status_written_at, now=now):
        return
    events = (*deployment_events(deployment.status, status), *child_events(deployment.status, status))
    try:
        written = await write_status(runtime, memory.backoffs, DEPLOYMENT, metadata, events=events, status=status)
    except NamespaceEnds:
        raise
    except ClusterError as error:
        log.warning("status not written object=%s error=%s", metadata.name, error)
        memory.failures.append(error)
        return
    if not written:
        return
    memory.status_written_at = now
    for wake in wakes_between(deployment.status, status):
        runtime.meter.woke(wake.level or "unknown", float(wake.seconds or 0))


def _publish_views(runtime: Runtime, namespace: str, memory: DeploymentMemory, plan: DeploymentPlan) -> None:
    """Each adapter's own reconcile writes its status, when what it is computed from has changed."""
    for view in memory.publish(plan.views, runtime.now()):
        runtime.wake(adapter_key(namespace, view.decision.adapter.metadata.name))
