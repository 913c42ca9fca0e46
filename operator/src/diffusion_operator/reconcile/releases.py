# SPDX-License-Identifier: Apache-2.0
"""Other releases of the operator that watch the same objects. `status.operator` names the one that manages an object; all others step back.

An object is claimed before anything is done for it. An operator without election has no name: it claims nothing, and steps back as well.
"""

import logging
from datetime import timedelta

import msgspec

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.names import DEPLOYMENT
from diffusion_operator.election.state import Timing
from diffusion_operator.errors import ClusterConflict, ClusterError, NamespaceEnds
from diffusion_operator.reconcile.keyed_queue import Key, Result
from diffusion_operator.reconcile.memory import DeploymentMemory
from diffusion_operator.reconcile.runtime import Runtime, deployment_key
from diffusion_operator.reconcile.status_write import encode_status

ANOTHERS = "ManagedByAnotherRelease"
"""In place of the reason of Ready, for metrics."""
LOOK_AGAIN_S = 30.0
CONFLICT_S = 1.0
OVERWRITTEN = timedelta(seconds=Timing().lease)
"""A claim that is gone so soon was overwritten by an operator from before there were claims, which writes on."""
CLAIM = "claim"

log = logging.getLogger(__name__)


async def is_anothers(runtime: Runtime, release: str | None) -> bool:
    """Return whether `release`, which an object's status names, is another release than this one and may be alive.

    False for None: nobody manages the object.
    """
    if release is None or release == runtime.release:
        return False
    return runtime.others is None or not await runtime.others.has_expired(release)


def step_back(runtime: Runtime, key: Key, release: str | None, *, pause_s: float = LOOK_AGAIN_S) -> Result:
    """Leave an object to another release, with a line in the log at first, and return to look again after `pause_s`."""
    if runtime.ready_reasons.get(key) != ANOTHERS:
        log.warning("object left to another release object=%s release=%s", key, release or "unnamed")
    runtime.hide(key)
    runtime.ready_reasons[key] = ANOTHERS
    return Result(requeue_after_s=pause_s)


async def claim(runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory) -> Result | None:
    """Return None where this release manages the deployment. Otherwise leave it to another one, or claim it and look again."""
    key = deployment_key(deployment.metadata.namespace, deployment.metadata.name)
    named = deployment.status.operator
    if await is_anothers(runtime, named):
        runtime.forget(key.namespace, key.name)
        runtime.watches.forget(key.namespace, key.name)
        return step_back(runtime, key, named)
    if named == runtime.release or runtime.release is None:
        return None
    if named is None and memory.claimed_at is not None and runtime.now() - memory.claimed_at < OVERWRITTEN:
        return step_back(runtime, key, None, pause_s=OVERWRITTEN.total_seconds())
    return await _claim(runtime, deployment, memory)


async def _claim(runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory) -> Result | None:
    """Write this release into a deployment's status, and return to look again.

    Return None if the claim is refused: it stops nothing, because the status would be refused as well.
    """
    metadata, before = deployment.metadata, deployment.status.operator
    if memory.backoffs.waiting(CLAIM, runtime.now()):
        return None
    status = encode_status(msgspec.structs.replace(deployment.status, operator=runtime.release))
    try:
        await runtime.cluster.apply_status(DEPLOYMENT, metadata.namespace, metadata.name, status=status, version=memory.version)
    except ClusterConflict:
        return Result(requeue_after_s=CONFLICT_S)
    except NamespaceEnds:
        raise
    except ClusterError as error:
        memory.backoffs.failed(CLAIM, error, runtime.now())
        memory.failures.append(error)
        return None
    log.info("claimed object=%s/%s release=%s before=%s", metadata.namespace, metadata.name, runtime.release, before)
    memory.claimed_at = runtime.now()
    return Result(requeue_after_s=0.0)
