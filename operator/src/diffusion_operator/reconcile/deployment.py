# SPDX-License-Identifier: Apache-2.0
"""A pass over a DiffusionDeployment: observe, plan, act, write the status once.

A child, a pod or a call that fails keeps nothing else from being done. The status is written all the same, and then the pass fails."""

import logging

import msgspec

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.deployment_status import DeploymentStatus
from diffusion_operator.api.foreign_text import plain_text
from diffusion_operator.api.meta import settle_conditions
from diffusion_operator.api.names import ADAPTER, DEPLOYMENT
from diffusion_operator.errors import ClusterError, NamespaceEnds, NotUnderstood
from diffusion_operator.pace import Pace, unhurried
from diffusion_operator.plan.adapters.conditions import NOT_UNDERSTOOD, not_understood
from diffusion_operator.plan.deployment import DeploymentPlan, plan_in_slices, status_after
from diffusion_operator.plan.observed.children import hurried
from diffusion_operator.plan.observed.observed import Answer, Asleep, Observed, TemplateTrial
from diffusion_operator.plan.replicas.check_pod import checked
from diffusion_operator.plan.replicas.revision import Template
from diffusion_operator.plan.replicas.template_trial import WORDS, answer_of, remembered
from diffusion_operator.plan.results.actions import CreatePod
from diffusion_operator.plan.results.events import child_events, condition_events, deployment_events, wakes_between
from diffusion_operator.plan.status.conditions import pass_failed
from diffusion_operator.reconcile.act import act_on_pods
from diffusion_operator.reconcile.children.keeping import DesiredFiles, keep_children, next_try_s, recheck_secret
from diffusion_operator.reconcile.children.repairs import tell_missed_pods
from diffusion_operator.reconcile.keyed_queue import Key, Result
from diffusion_operator.reconcile.memory import DeploymentMemory
from diffusion_operator.reconcile.not_understood import tell_not_understood
from diffusion_operator.reconcile.observe import Unheard, observe
from diffusion_operator.reconcile.pod_guard import guard
from diffusion_operator.reconcile.report import report
from diffusion_operator.reconcile.runtime import Runtime, adapter_key, deployment_key
from diffusion_operator.reconcile.status_write import worth_writing, write_due_s, write_status
from diffusion_operator.reconcile.store.parsing import parse
from diffusion_operator.render.control_secret import control_secret
from diffusion_operator.render.pod import pod
from diffusion_operator.render.service import service

LOOK = "look"
UNHEARD_S = 0.5

log = logging.getLogger(__name__)


async def reconcile_deployment(runtime: Runtime, key: Key) -> Result:
    manifest = await runtime.cluster.get(DEPLOYMENT, key.namespace, key.name)
    if manifest is None or manifest["metadata"].get("deletionTimestamp"):
        return await _gone(runtime, key)
    try:
        deployment = parse(manifest, DiffusionDeployment)
    except NotUnderstood as error:
        return await tell_not_understood(runtime, key, manifest, not_understood(error.why))
    if runtime.ready_reasons.get(key) == NOT_UNDERSTOOD:  # adapters of it say so, too
        runtime.hide(key)
        await _wake_adapters(runtime, key)
    memory = runtime.memory(deployment.metadata)

    _begin(memory, deployment, runtime)
    memory.version = manifest["metadata"]["resourceVersion"]
    if memory.backoffs.waiting(LOOK, runtime.now()):
        return Result(requeue_after_s=memory.backoffs.next_s(runtime.now()))
    try:
        observed, plan = await _look(runtime, deployment, memory)
    except Unheard:
        return Result(requeue_after_s=UNHEARD_S)
    memory.remember(plan.adapters, observed.attempts)
    memory.departures = plan.departures
    await tell_missed_pods(runtime, deployment, memory, plan)

    makes = plan.trial.pod is not None or any(isinstance(action, CreatePod) for action in plan.pods)
    recheck_secret(deployment, memory, observed.pods, makes=makes, now=runtime.now())
    await _keep_children(runtime, deployment, memory, plan)
    made = await act_on_pods(runtime, deployment, memory, plan.pods, template=plan.template)
    if plan.trial.pod is not None:
        await try_template(runtime, deployment, memory, plan.trial.pod, template=plan.template)
    await report(runtime, checked(memory.check, plan.trial.check), kind=DEPLOYMENT, about=deployment.metadata)
    memory.check = plan.trial.check
    runtime.calls.begin(key, memory, plan.calls)

    status = status_after(deployment, plan, children=memory.children, refusal=memory.refusal, now=runtime.now())
    if not (made and deployment.status.observed_generation is None):  # the pass that sees the first pods follows at once
        await _write_status(runtime, deployment, memory, status)
    await _publish_views(runtime, key.namespace, memory)
    for told in plan.told:
        await report(runtime, (told.event,), kind=ADAPTER, about=told.about)
    return _next_pass(runtime, memory, plan)


def _begin(memory: DeploymentMemory, deployment: DiffusionDeployment, runtime: Runtime) -> None:
    """Forget the failures of the pass before. After an edit of the spec every child is tried at once."""
    memory.failures.clear()
    memory.withheld_s = None
    memory.backoffs.see(deployment.metadata.generation)
    if memory.generation != deployment.metadata.generation:
        memory.generation = deployment.metadata.generation
        memory.tries = {kind: hurried(one, runtime.now()) for kind, one in memory.tries.items()}


async def _look(runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory) -> tuple[Observed, DeploymentPlan]:
    """Observe and plan. A failure leaves nothing to act on, so the status says so before the error is raised again."""
    try:
        observed = await observe(runtime, deployment, memory)
        plan = await unhurried(plan_in_slices(observed, runtime.now(), memory.adapters))
        memory.backoffs.succeeded(LOOK)
        return observed, plan
    except (NamespaceEnds, Unheard):
        raise
    except Exception as error:
        memory.backoffs.failed(LOOK, error, runtime.now())
        await _tell_of_no_plan(runtime, deployment, memory, error)
        raise


def _next_pass(runtime: Runtime, memory: DeploymentMemory, plan: DeploymentPlan) -> Result:
    """Return the time of the next pass, the soonest at which anything is due, and the first failure of this one.

    Without such a time the next pass is the resync's, or that of a change. A failure keeps nothing else from being done at its time.
    """
    now = runtime.now()
    waits = (plan.look_again_s, next_try_s(memory, now), memory.backoffs.next_s(now), memory.withheld_s)
    failure = next(iter(memory.failures), None)  # the queue logs it
    return Result(requeue_after_s=min((one for one in waits if one is not None), default=None), failure=failure)


async def _gone(runtime: Runtime, key: Key) -> Result:
    """Forget a deployment that is gone, and wake the adapters that referred to it.

    The children are collected by their owner references.
    """
    runtime.forget(key.namespace, key.name)
    runtime.watches.forget(key.namespace, key.name)
    runtime.hide(key)
    await _wake_adapters(runtime, key)
    return Result(gone=True)


async def _wake_adapters(runtime: Runtime, key: Key) -> None:
    for name in await runtime.cluster.adapter_versions(key.namespace, key.name):
        runtime.wake(adapter_key(key.namespace, name))


async def _keep_children(runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, plan: DeploymentPlan) -> None:
    """Keep the children as the spec asks, before the pods, which mount some of them."""
    secret = control_secret(deployment, key=runtime.settings.operator_key)
    files = DesiredFiles(adapters=plan.adapters.file, model=plan.status.model)
    memory.children = await keep_children(runtime, deployment, memory, secret, files, service(deployment))


async def _tell_of_no_plan(runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, error: Exception) -> None:
    """Write Ready=Unknown and Degraded with the error into the status, and leave the rest of it as it was.

    The last observations may no longer hold, so the message says that the rest may be out of date.
    """
    failure = f"{type(error).__name__}: {error}"
    text = (
        f"the operator could not reconcile this object: {failure}; the rest of this status may be out of date, and the operator tries again"
    )
    now, generation, before = runtime.now(), deployment.metadata.generation, deployment.status.conditions
    told = settle_conditions(pass_failed(text), previous=before, generation=generation, now=now)
    others = tuple(one for one in before if one.type not in ("Ready", "Degraded"))
    await _write_status(runtime, deployment, memory, msgspec.structs.replace(deployment.status, conditions=(*told, *others)))


async def _write_status(runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, status: DeploymentStatus) -> None:
    """Write the status and its Events, if it changed; changes of mere counts are written later, at most once in an interval.

    A ClusterError is added to `memory.failures`, and the pass reports it in its result. NamespaceEnds is raised.
    """
    metadata, now, key = deployment.metadata, runtime.now(), deployment_key(deployment.metadata.namespace, deployment.metadata.name)
    runtime.show(key, status.conditions)
    runtime.statuses[key] = DeploymentStatus(replica_states=status.replica_states, held=status.held)
    runtime.asleep[key] = Asleep(key.namespace, key.name, deployment.spec.resources.devices, status.asleep_replicas or 0)
    if not worth_writing(deployment.status, status, last=memory.status_written_at, now=now):
        if deployment.status != status:
            memory.withhold(write_due_s(deployment.status, status, last=memory.status_written_at, now=now))
        return
    before = deployment.status
    events = (*deployment_events(before, status), *condition_events(before, status), *child_events(before, status))
    try:
        written = await write_status(runtime, memory.backoffs, DEPLOYMENT, metadata, version=memory.version, events=events, status=status)
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


async def _publish_views(runtime: Runtime, namespace: str, memory: DeploymentMemory) -> None:
    """Wake the adapters whose view changed enough to be published; their own reconcile writes their status."""
    pace = Pace()
    for view in await unhurried(memory.publish(runtime.now())):
        await pace.keep()
        runtime.wake(adapter_key(namespace, view.decision.adapter.metadata.name))


async def try_template(
    runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, action: CreatePod, *, template: Template
) -> None:
    """Send a pod of the template to the API server as a dry run, and record the answer in `memory.trial`.

    No pod is created. Errors are recorded and not raised: `answer_of` judges a ClusterError. Any other error is undecided and is also kept
    in `memory.failures`.
    """
    manifest = pod(deployment, template, index=action.index, incarnation=action.incarnation)
    answer, message = Answer.FINE, ""
    try:
        guard(runtime.settings, manifest)
        await runtime.cluster.try_create(manifest)
    except ClusterError as error:
        answer, message = answer_of(error.status, str(error)), plain_text(str(error), WORDS)
    except Exception as error:  # a pass ends with a status, whatever fails
        answer, message = Answer.UNDECIDED, plain_text(f"{type(error).__name__}: {error}", WORDS)
        memory.failures.append(error)
    now, metadata = runtime.now(), deployment.metadata
    trial = TemplateTrial(
        revision=template.revision, generation=metadata.generation, answer=answer, message=message, tried_at=now, since=now
    )
    memory.trial = remembered(memory.trial, trial)
    what = "template tried namespace=%s name=%s revision=%s answer=%s error=%s"
    log.info(what, metadata.namespace, metadata.name, template.revision, answer.value, message)
