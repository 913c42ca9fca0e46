# SPDX-License-Identifier: Apache-2.0
"""One pass over a DiffusionDeployment: observe, plan, act, write the status once."""

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.deployment_status import DeploymentStatus
from diffusion_operator.api.meta import reason_of
from diffusion_operator.api.names import ADAPTER, DEPLOYMENT
from diffusion_operator.plan.actions import CreatePod
from diffusion_operator.plan.deployment import DeploymentPlan, plan_deployment
from diffusion_operator.plan.events import deployment_events, wakes_between
from diffusion_operator.plan.polling import WAKEABLE_POLL_S
from diffusion_operator.reconcile.act import act_on_pods, call_workers
from diffusion_operator.reconcile.children import apply_children, doubt_secret, keep_optional_children
from diffusion_operator.reconcile.glance import glance_of, says_the_same
from diffusion_operator.reconcile.keyed_queue import Key, Result
from diffusion_operator.reconcile.memory import DeploymentMemory
from diffusion_operator.reconcile.observe import adapters_of, observe, parse
from diffusion_operator.reconcile.repairs import tell_missed_pods
from diffusion_operator.reconcile.report import report
from diffusion_operator.reconcile.runtime import Runtime, adapter_key, deployment_key
from diffusion_operator.reconcile.status_write import encode_status, worth_writing
from diffusion_operator.reconcile.template_trial import try_template
from diffusion_operator.render.control_secret import control_secret
from diffusion_operator.render.desired_config import desired_config
from diffusion_operator.render.service import service


async def reconcile_deployment(runtime: Runtime, key: Key, *, touched: bool) -> Result:
    """`touched`: something woke the key, and not time alone."""
    if await _nothing_new(runtime, key, touched=touched):
        return Result(requeue_after_s=WAKEABLE_POLL_S)
    manifest = await runtime.cluster.get(DEPLOYMENT, key.namespace, key.name)
    if manifest is None or manifest["metadata"].get("deletionTimestamp"):
        return await _gone(runtime, key)
    deployment = parse(manifest, DiffusionDeployment)
    memory = runtime.memory(deployment.metadata)

    observed = await observe(runtime, deployment, memory)
    plan = plan_deployment(observed, runtime.now())
    memory.attempts, memory.departures = dict(plan.attempts), plan.departures
    await tell_missed_pods(runtime, deployment, memory, plan)

    doubt_secret(memory, observed.pods, now=runtime.now())
    await _apply_children(runtime, deployment, memory, plan)
    await act_on_pods(runtime, deployment, memory, plan.pods, template=plan.template)
    if plan.trial is not None:
        await try_template(runtime, deployment, memory, plan.trial, template=plan.template)
    await call_workers(runtime, memory, plan.calls)

    await _write_status(runtime, deployment, memory, plan)
    _publish_views(runtime, key.namespace, memory, plan)
    for told in plan.told:
        await report(runtime, (told.event,), kind=ADAPTER, about=told.about)
    steady_s = runtime.settings.steady_poll_s
    memory.glance = glance_of(observed, look_again_s=plan.look_again_s, now=runtime.now(), steady_s=steady_s)
    return Result(requeue_after_s=min(plan.look_again_s or steady_s, steady_s))


async def _nothing_new(runtime: Runtime, key: Key, *, touched: bool) -> bool:
    """Whether all sleep and say what they said; the pass that comes where they do not looks at everything, as do those after a failure."""
    memory = runtime.memories.get((key.namespace, key.name))
    glance = memory.glance if memory is not None else None
    if memory is None or glance is None:
        return False
    memory.glance = None
    if touched or runtime.now() >= glance.until or not await says_the_same(runtime, memory, glance):
        return False
    memory.glance = glance
    return True


async def _gone(runtime: Runtime, key: Key) -> Result:
    """Owner references collect the children; the adapters that referred to it must hear of it."""
    runtime.memories.pop((key.namespace, key.name), None)
    runtime.ready_reasons.pop(key, None)
    runtime.statuses.pop(key, None)
    for adapter in await adapters_of(runtime, key.namespace, key.name):
        runtime.wake(adapter_key(key.namespace, adapter.metadata.name))
    return Result(gone=True)


async def _apply_children(runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, plan: DeploymentPlan) -> None:
    """Before the pods, which mount two of them."""
    children = (
        control_secret(deployment, key=runtime.settings.operator_key),
        desired_config(deployment, plan.desired, plan.status.model),
        service(deployment),
    )
    await apply_children(runtime, deployment, memory, children)
    await keep_optional_children(runtime, deployment, memory)


async def _write_status(runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, plan: DeploymentPlan) -> None:
    """Events first: they are named after what they tell, so one that is written again after a crash in between is the same one."""
    metadata, now, key = deployment.metadata, runtime.now(), deployment_key(deployment.metadata.namespace, deployment.metadata.name)
    runtime.ready_reasons[key] = reason_of(plan.status.conditions, "Ready")
    runtime.statuses[key] = DeploymentStatus(replica_states=plan.status.replica_states, held=plan.status.held)
    if _is_outdated_at_once(deployment, memory, plan):
        return
    if not worth_writing(deployment.status, plan.status, last=memory.status_written_at, now=now):
        return
    await report(runtime, deployment_events(deployment.status, plan.status), kind=DEPLOYMENT, about=metadata)
    await runtime.cluster.apply_status(DEPLOYMENT, metadata.namespace, metadata.name, status=encode_status(plan.status))
    memory.status_written_at = now
    for wake in wakes_between(deployment.status, plan.status):
        runtime.meter.woke(wake.level or "unknown", float(wake.seconds or 0))


def _is_outdated_at_once(deployment: DiffusionDeployment, memory: DeploymentMemory, plan: DeploymentPlan) -> bool:
    """The first status of all waits for the pass that sees the first pods, which follows: one write instead of two."""
    made = any(isinstance(action, CreatePod) for action in plan.pods)
    return made and not memory.refusal and deployment.status.observed_generation is None


def _publish_views(runtime: Runtime, namespace: str, memory: DeploymentMemory, plan: DeploymentPlan) -> None:
    """Each adapter's own reconcile writes its status, when what it is computed from has changed."""
    for view in memory.publish(plan.views, runtime.now()):
        runtime.wake(adapter_key(namespace, view.decision.adapter.metadata.name))
