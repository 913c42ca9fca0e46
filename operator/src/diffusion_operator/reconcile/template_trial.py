# SPDX-License-Identifier: Apache-2.0
"""Asking the API server whether it would make a pod of a changed template, and remembering its answer for the next plan."""

import logging

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.foreign_text import plain_text
from diffusion_operator.errors import ClusterError
from diffusion_operator.plan.observed.observed import Answer, TemplateTrial
from diffusion_operator.plan.replicas.revision import Template
from diffusion_operator.plan.replicas.template_trial import WORDS, answer_of, remembered
from diffusion_operator.plan.results.actions import CreatePod
from diffusion_operator.reconcile.memory import DeploymentMemory
from diffusion_operator.reconcile.pod_guard import guard
from diffusion_operator.reconcile.runtime import Runtime
from diffusion_operator.render.pod import pod

log = logging.getLogger(__name__)


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
