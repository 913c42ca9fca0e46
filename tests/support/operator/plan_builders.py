# SPDX-License-Identifier: Apache-2.0
"""Builders of a plan's input for tables of cases: deployments, pods and state documents with only the fields of the case.

Real: the plan and its messages. Not real: there is nothing behind them.
"""

from datetime import timedelta
from typing import Any

import msgspec

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.worker_state import WorkerPhase, WorkerState
from diffusion_operator.plan.deployment import DeploymentPlan, plan_deployment
from diffusion_operator.plan.observed.observed import Answer, Observed, Poll, TemplateCheck, TemplateTrial
from diffusion_operator.plan.observed.pods import Container, Pod
from diffusion_operator.plan.replicas.revision import template_of
from diffusion_operator.plan.results.actions import DeletePod, DrainWorker
from support.operator.fake_cluster import EPOCH

RUNNING = Container(running=True)
NOW = EPOCH + timedelta(minutes=5)


def says(phase: WorkerPhase, **more: Any) -> WorkerState:
    return WorkerState(boot_id="b", state=phase, **more)


READY = says(WorkerPhase.READY)


def made(status: dict[str, Any] | None = None, **spec: Any) -> DiffusionDeployment:
    metadata = {"name": "d", "namespace": "n", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z", "generation": 3}
    document = {"metadata": metadata, "spec": {"model": {"source": {"path": "/m"}}} | spec, "status": status or {}}
    return msgspec.convert(document, DiffusionDeployment)


REVISION = template_of(made(), default_image="worker:1").revision


def pod(index: int = 0, incarnation: int = 0, **facts: Any) -> Pod:
    defaults = {"created_at": EPOCH, "revision": REVISION, "scheduled": True, "node": "node", "ip": "10.0.0.1", "ready": True}
    facts = defaults | {"container": RUNNING} | facts
    return Pod(name=f"d-{index}-{incarnation}", uid=f"uid-{index}-{incarnation}", index=index, incarnation=incarnation, **facts)


def planned(
    *pods: Pod, states: dict[int, WorkerState] | None = None, status: dict[str, Any] | None = None, stale: tuple[int, ...] = (), **spec: Any
) -> DeploymentPlan:
    """Return the plan for these pods. Every worker is ready unless `states` has another state for its index; `stale` are those whose last
    poll failed.

    A changed template counts as tried and checked.
    """
    polls = {one.uid: Poll(state=(states or {}).get(one.index, READY), failures=one.index in stale) for one in pods}
    deployment = made(status, **spec)
    revision = template_of(deployment, default_image="worker:1", pods=pods).revision
    trial = TemplateTrial(revision=revision, generation=3, answer=Answer.FINE, tried_at=NOW, since=NOW)
    check = TemplateCheck(revision=revision, answer=Answer.FINE, since=NOW)
    observed = Observed(deployment=deployment, default_image="worker:1", pods=pods, polls=polls, trial=trial, check=check)
    return plan_deployment(observed, NOW)


def leaving(plan: DeploymentPlan) -> list[str]:
    """Return the sorted names of the pods that the plan deletes, or has their workers drain before that."""
    drained = [call.worker.pod_uid.replace("uid", "d", 1) for call in plan.calls if isinstance(call, DrainWorker)]
    return sorted([*drained, *(one.name for one in plan.pods if isinstance(one, DeletePod))])
