# SPDX-License-Identifier: Apache-2.0
"""Making the check pod of a changed template, and remembering its verdict for the next plan."""

import logging

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.foreign_text import plain_text
from diffusion_operator.api.names import DEPLOYMENT
from diffusion_operator.errors import ClusterRefused
from diffusion_operator.plan.replicas.check_pod import Check, checked, refused
from diffusion_operator.plan.replicas.revision import Template
from diffusion_operator.plan.replicas.template_trial import RETRY, WORDS
from diffusion_operator.reconcile.memory import DeploymentMemory
from diffusion_operator.reconcile.pod_guard import guard
from diffusion_operator.reconcile.report import report
from diffusion_operator.reconcile.runtime import Runtime
from diffusion_operator.render.check_pod import check_pod

log = logging.getLogger(__name__)


async def check_template(
    runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, check: Check, *, template: Template
) -> None:
    """Record the plan's verdict in `memory.check`, report one that has just passed, and make the check pod if it is to be made.

    A refusal is recorded as a failed check, which is tried again in a minute. Any other error is kept in `memory.failures`.
    """
    events, memory.check = checked(memory.check, check.record), check.record
    await report(runtime, events, kind=DEPLOYMENT, about=deployment.metadata)
    if not check.makes or check.record is None:
        return
    manifest = check_pod(deployment, template, nodes=check.nodes)
    try:
        guard(runtime.settings, manifest)
        await runtime.cluster.create(manifest)
        log.info("check pod made namespace=%s pod=%s", deployment.metadata.namespace, manifest["metadata"]["name"])
    except ClusterRefused as error:
        memory.check = refused(check.record, plain_text(str(error), WORDS), again_at=runtime.now() + RETRY)
    except Exception as error:  # a pass ends with a status, whatever fails
        memory.failures.append(error)
